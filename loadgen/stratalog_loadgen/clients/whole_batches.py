"""Producers of whole batches, at full speed or at a rate: as many on their way as may be in flight, none waiting behind them.

An idempotent client of librdkafka 2.16 sends nothing to a partition while five *records* are on their way to it, that is one
batch, and nothing to a broker while five requests are. A batch that waits for that has its thread ask the operating system for
news without a pause: a core burnt for nothing, and taken from the cluster if that is on the same machine. So batches on their
way are counted here, and the next is handed over when an earlier one was acknowledged; of many producers only as much is on its
way as keeps any cluster busy. Partitions take turns batch by batch, as with the partitioner of Java's client (KIP-794); leaders
are those at the start.
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
from stratalog_loadgen.clients.producing import Work, keys_of
from stratalog_loadgen.processes.control import Control, cpu_s
from stratalog_loadgen.processes.loads import Counted, ProducerLoad

_POLL_S = 0.05
_PAUSE_PER_PRODUCER_S, _PAUSE_MIN_S, _PAUSE_MAX_S = 0.0002, 0.002, 0.05
_METADATA_TIMEOUT_S = 30
_UNDER_WAY_BYTES_MAX = 32 * 1024 * 1024

Target = tuple[str, int]


class WholeBatches(Work):
    """Fills every producer's lanes whenever there is room; with a rate, when the next batch is due, too."""

    def __init__(self, load: ProducerLoad, control: Control) -> None:
        super().__init__(load, control)
        self._acknowledged = 0
        self._chunks = itertools.cycle(self._made_chunks())
        lanes = _targets_by_leader(self.producers[0], load)
        self._senders = deque(
            _Sender(producer, lanes, load.in_flight, number) for number, producer in enumerate(self.producers)
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
        """Batches of this process that may be on their way: its share of what all producers together may."""
        batch_bytes = max(1, self.load.batch_records * self.load.payload.record_bytes)
        share_bytes = _UNDER_WAY_BYTES_MAX * self.load.producers // self.load.producers_in_all
        return max(1, share_bytes // batch_bytes)

    def _round(self) -> None:
        handed = sum(self._fill(sender) for sender in self._in_turn())
        if len(self._senders) == 1:
            self._senders[0].producer.poll(self._until_due_s())
            return
        heard = sum(sender.producer.poll(0) for sender in self._senders)
        if not handed and not heard:
            time.sleep(min(_PAUSE_MAX_S, max(_PAUSE_MIN_S, _PAUSE_PER_PRODUCER_S * len(self._senders))))

    def _in_turn(self) -> Iterator[_Sender]:
        """All, beginning with the one after the last that had its turn, as long as more may be on its way."""
        for _ in range(len(self._senders)):
            if self._under_way >= self._under_way_max:
                return
            self._senders.rotate(-1)
            yield self._senders[-1]

    def _fill(self, sender: _Sender) -> int:
        """How many batches there was room for."""
        handed = 0
        while (left := self._left()) and (lane := sender.lane_with_room()) is not None:
            self.sent += self._hand_over_next(sender.producer, lane, left)
            self._under_way += 1
            handed += 1
        return handed

    def _hand_over_next(self, producer: Producer, lane: Lane, records: int) -> int:
        """One batch, of ``records`` at most; how many it holds."""
        chunk = next(self._chunks)
        if records < len(chunk):
            chunk = [dict(message) for message in chunk[:records]]
        target = lane.take()
        chunk[-1]["callback"] = partial(self._arrived, lane, target, len(chunk), time.monotonic_ns())
        self.hand_over(producer, target[0], chunk, target[1])
        return len(chunk)

    def _left(self) -> int:
        """Records that may be handed over now, if a whole batch is due."""
        if self.load.records:
            return max(0, self.load.records - self.sent)
        return self.load.batch_records if self._until_due_s(0) <= 0 else 0

    def _until_due_s(self, without_rate: float = _POLL_S) -> float:
        """How long to wait for news: not beyond the moment at which the next batch should leave, if it may."""
        if not self.load.records_per_s:
            return without_rate
        due_in_s = self.sent / self.load.records_per_s - self.control.elapsed_s()
        return min(_POLL_S, due_in_s) if due_in_s > 0 else without_rate

    def _arrived(
        self, lane: Lane, target: Target, records: int, sent_ns: int, failure: KafkaError | None, message: Message
    ) -> None:
        """The last record of a batch is done with; with it all before it, which went to the same partition."""
        lane.give_back(target)
        self._under_way -= 1
        self.delivered(sent_ns, failure, message, records)
        if failure is None:
            self._acknowledged += records

    def _made_chunks(self) -> list[list[dict[str, Any]]]:
        """Batches made beforehand and used again and again, so that the loop makes nothing per record."""
        size = self.load.batch_records
        values, keys = itertools.cycle(self.pool), keys_of(self.load)
        made = max(1, -(-len(self.pool) // size))
        return [[_message(next(values), next(keys)) for _ in range(size)] for _ in range(made)]


class Lane:
    """One leader's partitions that no batch is on its way to, the one that has waited longest first."""

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
    """One producer. Each begins at another partition, lest all send to the same one at the same time."""

    def __init__(self, producer: Producer, lanes: list[list[Target]], room: int, number: int) -> None:
        self.producer = producer
        turned = [lane[number % len(lane) :] + lane[: number % len(lane)] for lane in lanes]
        self._lanes = [Lane(lane, room) for lane in turned]

    def lane_with_room(self) -> Lane | None:
        """The one with the most."""
        return max((lane for lane in self._lanes if lane.open), key=lambda lane: lane.room, default=None)


def _targets_by_leader(producer: Producer, load: ProducerLoad) -> list[list[Target]]:
    """Every partition at its leader; with keys the client chooses the partition, and brokers are not told apart."""
    leaders: dict[int, list[Target]] = {}
    for topic in load.topics:
        for number, leader in _leaders_of(producer, topic).items():
            leaders.setdefault(leader, []).append((topic, number))
    if load.keys != "none":
        return [[(topic, -1) for _ in range(load.in_flight) for topic in load.topics] for _ in leaders]
    # More than one at once only where batches are smaller than what the client lets be on its way to a partition.
    at_once = -(-load.in_flight // load.batch_records)
    return [targets * at_once for targets in leaders.values()]


def _leaders_of(producer: Producer, topic: str) -> dict[int, int]:
    """By partition. Raises ``Unavailable`` if some have none for long: a broker learns of a new topic a while after others."""
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
