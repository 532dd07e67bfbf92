"""Producers of whole batches, at full speed or at a rate: as many in flight as the client allows, none queued behind them.

An idempotent client of librdkafka 2.16 sends nothing to a partition with five *records* in flight, that is one batch, and
nothing to a broker with five requests in flight. While a batch waits for that, its thread polls without a pause, which burns a
core, and takes it from a cluster on the same machine. So batches in flight are counted here, and the next one is passed on when
an earlier one is acknowledged; many producers together have only as much in flight as keeps any cluster busy. Partitions take
turns batch by batch, as with the partitioner of Java's client (KIP-794); leaders are those at the start.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from stratalog_core.errors import Unavailable
from stratalog_loadgen.clients.producing import ProducerRun, keys_of
from stratalog_loadgen.processes.control import Control, cpu_s
from stratalog_loadgen.processes.loads import Counted, ProducerLoad

_POLL_S = 0.05
_PAUSE_PER_PRODUCER_S, _PAUSE_MIN_S, _PAUSE_MAX_S = 0.0002, 0.002, 0.05
_METADATA_TIMEOUT_S = 30
_UNDER_WAY_BYTES_MAX = 32 * 1024 * 1024

Target = tuple[str, int]


class WholeBatches(ProducerRun):
    """Sends batches whenever a producer has room; with a rate, not before the next batch is due."""

    def __init__(self, load: ProducerLoad, control: Control) -> None:
        super().__init__(load, control)
        self._acknowledged = 0
        self._chunks = itertools.cycle(self._made_chunks())
        queues = _targets_by_leader(self.producers[0], load)
        self._senders = deque(
            _Sender(producer, queues, load.in_flight, number) for number, producer in enumerate(self.producers)
        )
        self._under_way = 0
        self._under_way_max = self._most()

    def run(self) -> Counted:
        began, cpu = time.monotonic(), cpu_s()
        while self.running() and self.control.elapsed_s() < self.load.warmup_s:
            self._round()
        if self.load.warmup_s:
            began, cpu = time.monotonic(), cpu_s()
        self.measures_from_ns, before = time.monotonic_ns(), self._acknowledged
        while self.running():
            self._round()
        if self.load.records:
            self.wait_until_delivered()
        records, ended, cpu = self._acknowledged - before, time.monotonic(), cpu_s() - cpu
        self.wait_until_delivered()
        return self.counted(records, began, ended, cpu)

    def _most(self) -> int:
        """Return how many batches of this process may be in flight: its share of the limit of all producers."""
        batch_bytes = max(1, self.load.batch_records * self.load.payload.record_bytes)
        share_bytes = _UNDER_WAY_BYTES_MAX * self.load.producers // self.load.producers_in_all
        return max(1, share_bytes // batch_bytes)

    def _round(self) -> None:
        handed = sum(self._fill(sender) for sender in self._in_turn())
        if len(self._senders) == 1:
            self._senders[0].producer.poll(self._until_due_s())
            return
        acknowledged = sum(sender.producer.poll(0) for sender in self._senders)
        if not handed and not acknowledged:
            time.sleep(min(_PAUSE_MAX_S, max(_PAUSE_MIN_S, _PAUSE_PER_PRODUCER_S * len(self._senders))))

    def _in_turn(self) -> Iterator[_Sender]:
        """Yield the senders, starting after the last one served, while more may be in flight."""
        for _ in range(len(self._senders)):
            if self._under_way >= self._under_way_max:
                return
            self._senders.rotate(-1)
            yield self._senders[-1]

    def _fill(self, sender: _Sender) -> int:
        """Send batches while there is room; return their number."""
        handed = 0
        while (left := self._left()) and (queue := sender.queue_with_room()) is not None:
            self.sent += self._hand_over_next(sender.producer, queue, left)
            self._under_way += 1
            handed += 1
        return handed

    def _hand_over_next(self, producer: Producer, queue: LeaderQueue, records: int) -> int:
        """Send one batch of at most ``records``; return its number of records."""
        chunk = next(self._chunks)
        if records < len(chunk):
            chunk = [dict(message) for message in chunk[:records]]
        target = queue.take()
        chunk[-1]["callback"] = partial(self._arrived, queue, target, len(chunk), time.monotonic_ns())
        self.hand_over(producer, target[0], chunk, target[1])
        return len(chunk)

    def _left(self) -> int:
        """Return how many records may be sent now, if a whole batch is due."""
        if self.load.records:
            return max(0, self.load.records - self.sent)
        return self.load.batch_records if self._until_due_s(0) <= 0 else 0

    def _until_due_s(self, without_rate: float = _POLL_S) -> float:
        """Return how long to poll: at most until the next batch is due."""
        if not self.load.records_per_s:
            return without_rate
        due_in_s = self.sent / self.load.records_per_s - self.control.elapsed_s()
        return min(_POLL_S, due_in_s) if due_in_s > 0 else without_rate

    def _arrived(
        self, queue: LeaderQueue, target: Target, records: int, sent_ns: int, failure: KafkaError | None, message: Message
    ) -> None:
        """The last record of a batch is acknowledged, and with it all before it, which went to the same partition."""
        queue.give_back(target)
        self._under_way -= 1
        self.delivered(sent_ns, failure, message, records)
        if failure is None:
            self._acknowledged += records

    def _made_chunks(self) -> list[list[dict[str, Any]]]:
        """Return batches that are reused, so that the loop does no work per record."""
        size = self.load.batch_records
        values, keys = itertools.cycle(self.pool), keys_of(self.load)
        made = max(1, -(-len(self.pool) // size))
        return [[_message(next(values), next(keys)) for _ in range(size)] for _ in range(made)]


class LeaderQueue:
    """One leader's partitions without a batch in flight, the longest idle first. ``room``: requests that may be in flight."""

    def __init__(self, targets: Iterable[Target], room: int) -> None:
        self._free = deque(targets)
        self.room = room

    @property
    def open(self) -> bool:
        return self.room > 0 and bool(self._free)

    def take(self) -> Target:
        self.room -= 1
        return self._free.popleft()

    def give_back(self, target: Target) -> None:
        self.room += 1
        self._free.append(target)


class _Sender:
    """One producer. Each starts at another partition, so that they do not all send to the same one."""

    def __init__(self, producer: Producer, queues: list[list[Target]], room: int, number: int) -> None:
        self.producer = producer
        turned = [queue[number % len(queue) :] + queue[: number % len(queue)] for queue in queues]
        self._queues = [LeaderQueue(queue, room) for queue in turned]

    def queue_with_room(self) -> LeaderQueue | None:
        """Return the queue with the most room; None if all are full."""
        return max((queue for queue in self._queues if queue.open), key=lambda queue: queue.room, default=None)


def _targets_by_leader(producer: Producer, load: ProducerLoad) -> list[list[Target]]:
    """Return the partitions of each leader. With keys the client chooses the partition, so targets have none."""
    leaders: dict[int, list[Target]] = {}
    for topic in load.topics:
        for number, leader in _leaders_of(producer, topic).items():
            leaders.setdefault(leader, []).append((topic, number))
    if load.keys != "none":
        return [[(topic, -1) for _ in range(load.in_flight) for topic in load.topics] for _ in leaders]
    # More than one batch in flight per partition only if batches are smaller than what the client allows in flight.
    at_once = -(-load.in_flight // load.batch_records)
    return [targets * at_once for targets in leaders.values()]


def _leaders_of(producer: Producer, topic: str) -> dict[int, int]:
    """Return the leader of each partition. Waits for them, because brokers learn of a new topic at different times.

    Raises ``Unavailable`` if a partition has no leader in time.
    """
    deadline = time.monotonic() + _METADATA_TIMEOUT_S
    while time.monotonic() < deadline:
        partitions = producer.list_topics(topic, _METADATA_TIMEOUT_S).topics[topic].partitions
        leaders = {number: found.leader for number, found in partitions.items()}
        if leaders and min(leaders.values()) >= 0:
            return leaders
        time.sleep(_POLL_S)
    raise Unavailable(f"topic {topic} has partitions without a leader, or none at all, after {_METADATA_TIMEOUT_S} s")


def _message(value: bytes, key: bytes | None) -> dict[str, Any]:
    return {"value": value} if key is None else {"value": value, "key": key}
