"""Open-loop producers of single records, to the partitions in turn or by key, at a fixed rate.

Record ``i`` is due ``i / rate`` seconds after the start. Its latency counts from then, whenever the client could take it (no
coordinated omission). At most every quarter of a millisecond, everything that is due is passed to the client, in one call per
partition, or per topic for records with keys; the client makes the batches. Unlike in :mod:`.due_batches`, no record waits here
for an earlier batch: in an outage records queue up in the client, and each partition recovers independently.

A thread per producer takes the times of acknowledgements; the sending thread processes them in bulk.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, Message

from stratalog_loadgen.clients.payloads import stamped
from stratalog_loadgen.clients.producing import TICK_NS, ProducerRun, keys_of
from stratalog_loadgen.clients.schedule import Schedule
from stratalog_loadgen.processes.control import MEASURE, Control
from stratalog_loadgen.processes.loads import Counted, ProducerLoad
from stratalog_loadgen.results.histogram import Histogram

_TURN_RECORDS_MAX = 1000
_TURN_MAX_S = 0.05
_STEADY_NS = 1_000_000_000
"""A partition that acknowledges a record this soon after its due time has no backlog."""


class Acknowledged(NamedTuple):
    """The acknowledgement of one record, by number. ``partition`` is the one that the client chose."""

    record: int
    partition: int
    at_ns: int
    failure: str


class DueRecords(ProducerRun):
    """Sends what is due, to the partitions in turn or by key. Restarts counting at MEASURE, when all partitions are steady."""

    def __init__(self, load: ProducerLoad, control: Control) -> None:
        super().__init__(load, control)
        self._schedule = Schedule(load)
        self._partitions = range(0, load.partitions, load.partition_step)
        self._places = len(load.topics) * (len(self._partitions) if load.each_partition else 1)
        self._values, self._keys = itertools.cycle(self.pool), keys_of(load)
        self._in_turn = itertools.cycle(self.producers)
        self._messages: list[dict[str, Any]] = [{"value": b""} for _ in range(_TURN_RECORDS_MAX)]
        self._acknowledgements: deque[Acknowledged] = deque()
        self._steady: set[tuple[str, int]] = set()

    def run(self) -> Counted:
        return self.run_at_rate(self._schedule, self._send_all, self._take_acknowledgements)

    def _send_all(self) -> None:
        while self.sent < self._schedule.records and self.control.running(self.sent, steady_partitions=len(self._steady)):
            if self.gives_up(self._schedule):
                return
            self.note_cpu()
            self._take_acknowledgements()
            if self.control.received(MEASURE):
                self._count_anew()
            handed_ns = time.monotonic_ns()
            self._send_due(self._schedule.due(handed_ns))
            wait_ns = max(self._schedule.moment_ns(self.sent), handed_ns + TICK_NS) - time.monotonic_ns()
            time.sleep(min(_TURN_MAX_S, max(0.0, wait_ns / 1e9)))

    def _send_due(self, due: int) -> None:
        """Send to topics in turn, and in each to its partitions in turn, with one call per partition.

        confluent-kafka 2.16 accepts a partition per record of a batch, but ignores it.
        """
        first, until = self.sent, min(due, self.sent + _TURN_RECORDS_MAX)
        for start in range(first, min(until, first + self._places)):
            numbers = range(start, until, self._places)
            self._note_behind(numbers)
            chunk = [self._message(place, number) for place, number in enumerate(numbers)]
            self.hand_over(next(self._in_turn), self._topic_of(start), chunk, self._partition_of(start))
        self.sent = max(first, until)

    def _message(self, place: int, record: int) -> dict[str, Any]:
        """Return a message. Messages are reused, because the client copies them at once."""
        message, value, key = self._messages[place], next(self._values), next(self._keys)
        message["value"] = stamped(value, int(self._schedule.moment_ns(record))) if self.load.stamps else value
        message["callback"] = partial(self._on_acknowledged, record)
        if key is not None:
            message["key"] = key
        return message

    def _topic_of(self, record: int) -> str:
        return self.load.topics[record % len(self.load.topics)]

    def _partition_of(self, record: int) -> int:
        """Return the partition of a record; -1: the client chooses."""
        if not self.load.each_partition:
            return -1
        return self._partitions[record // len(self.load.topics) % len(self._partitions)]

    def _note_behind(self, numbers: range) -> None:
        now_ns = time.monotonic_ns()
        intended = [self._schedule.moment_ns(number) for number in numbers]
        self.behind.record_all([int(now_ns - moment) // 1000 for moment in intended if moment >= self.measures_from_ns])

    def _on_acknowledged(self, record: int, failure: KafkaError | None, message: Message) -> None:
        """Take the time of an acknowledgement, in the polling thread."""
        at_ns = time.monotonic_ns()
        self._acknowledgements.append(
            Acknowledged(record, message.partition() or 0, at_ns, failure.str() if failure is not None else "")
        )

    def _take_acknowledgements(self) -> None:
        late_us = []
        while self._acknowledgements:
            record, partition, at_ns, failure = self._acknowledgements.popleft()
            if failure:
                self.failed += 1
                self.failure = failure
                continue
            intended_ns = self._schedule.moment_ns(record)
            if self.load.each_partition:
                self._note_partition((self._topic_of(record), partition), at_ns, at_ns - intended_ns)
            if intended_ns >= self.measures_from_ns:
                late_us.append(int(at_ns - intended_ns) // 1000)
        self.latency.record_all(late_us)

    def _note_partition(self, place: tuple[str, int], at_ns: int, late_ns: float) -> None:
        self.gaps.acknowledged(*place, at_ns)
        if late_ns <= _STEADY_NS:
            self._steady.add(place)

    def _count_anew(self) -> None:
        """Restart counting: records that are due from now on, and gaps that end from now on."""
        self.measures_from_ns = time.monotonic_ns()
        self.latency, self.behind = Histogram(), Histogram()
        self.gaps.begin_anew()
