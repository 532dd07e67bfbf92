"""Records at a fixed rate of which every partition, or every key, has its own: what is due leaves together.

Record ``i`` should leave ``i / rate`` seconds after the start, and its latency counts from then, whenever the client could take
it (no coordinated omission). Every quarter of a millisecond at most, all that is due is handed over, in one call for each
partition, or for all of a topic with their keys; how they become batches is the client's business. Unlike :mod:`.due_batches`
nothing waits here for the batch before it: in an outage records queue up in the client, and each partition goes on by itself.

A thread for each producer takes the moments of acknowledgements, the one that sends does the rest, for many at once.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, Message

from stratalog_loadgen.clients.payloads import stamped
from stratalog_loadgen.clients.producing import TICK_NS, Work, keys_of
from stratalog_loadgen.clients.schedule import Schedule
from stratalog_loadgen.processes.control import MEASURE, Control
from stratalog_loadgen.processes.loads import Counted, ProducerLoad
from stratalog_loadgen.results.histogram import Histogram

_TURN_RECORDS_MAX = 1000
_TURN_MAX_S = 0.05
_STEADY_NS = 1_000_000_000
"""A partition that acknowledges a record this soon after its moment has no backlog."""


class Heard(NamedTuple):
    """Of one record, by number; its partition is where it went, not where it was meant to go."""

    record: int
    partition: int
    at_ns: int
    failure: str


class DueRecords(Work):
    """Hands over what is due, to the partitions in turn or by key. Begins to count anew when told that all is steady."""

    def __init__(self, load: ProducerLoad, control: Control) -> None:
        super().__init__(load, control)
        self._schedule = Schedule(load)
        self._partitions = range(0, load.partitions, load.partition_step)
        self._places = len(load.topics) * (len(self._partitions) if load.each_partition else 1)
        self._values, self._keys = itertools.cycle(self.pool), keys_of(load)
        self._in_turn = itertools.cycle(self.producers)
        self._messages: list[dict[str, Any]] = [{"value": b""} for _ in range(_TURN_RECORDS_MAX)]
        self._arrivals: deque[Heard] = deque()
        self._steady: set[tuple[str, int]] = set()

    def run(self) -> Counted:
        return self.run_at_rate(self._schedule, self._send_all, self._take_arrivals)

    def _send_all(self) -> None:
        while self.sent < self._schedule.records and self.control.running(self.sent, heard=len(self._steady)):
            if self.gives_up(self._schedule):
                return
            self.note_cpu()
            self._take_arrivals()
            if self.control.told(MEASURE):
                self._count_anew()
            handed_ns = time.monotonic_ns()
            self._send_due(self._schedule.due(handed_ns))
            wait_ns = max(self._schedule.moment_ns(self.sent), handed_ns + TICK_NS) - time.monotonic_ns()
            time.sleep(min(_TURN_MAX_S, max(0.0, wait_ns / 1e9)))

    def _send_due(self, due: int) -> None:
        """Topics take turns record by record, and in each its partitions: one chunk for all that go to the same place.

        confluent-kafka 2.16 takes a batch's records with a partition each, and sends them anywhere.
        """
        first, until = self.sent, min(due, self.sent + _TURN_RECORDS_MAX)
        for start in range(first, min(until, first + self._places)):
            numbers = range(start, until, self._places)
            self._note_behind(numbers)
            chunk = [self._message(place, number) for place, number in enumerate(numbers)]
            self.hand_over(next(self._in_turn), self._topic_of(start), chunk, self._partition_of(start))
        self.sent = max(first, until)

    def _message(self, place: int, record: int) -> dict[str, Any]:
        """Used again: the client copies what it is given at once."""
        message, value, key = self._messages[place], next(self._values), next(self._keys)
        message["value"] = stamped(value, int(self._schedule.moment_ns(record))) if self.load.stamps else value
        message["callback"] = partial(self._heard, record)
        if key is not None:
            message["key"] = key
        return message

    def _topic_of(self, record: int) -> str:
        return self.load.topics[record % len(self.load.topics)]

    def _partition_of(self, record: int) -> int:
        """Where it is sent to; -1: the client chooses."""
        if not self.load.each_partition:
            return -1
        return self._partitions[record // len(self.load.topics) % len(self._partitions)]

    def _note_behind(self, numbers: range) -> None:
        now_ns = time.monotonic_ns()
        intended = [self._schedule.moment_ns(number) for number in numbers]
        self.behind.record_all([int(now_ns - moment) // 1000 for moment in intended if moment >= self.measures_from_ns])

    def _heard(self, record: int, failure: KafkaError | None, message: Message) -> None:
        """In a thread that waits for acknowledgements: the moment counts."""
        at_ns = time.monotonic_ns()
        self._arrivals.append(Heard(record, message.partition() or 0, at_ns, failure.str() if failure is not None else ""))

    def _take_arrivals(self) -> None:
        late_us = []
        while self._arrivals:
            record, partition, at_ns, failure = self._arrivals.popleft()
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
        """Count records that are due from now on, and gaps that end from now on."""
        self.measures_from_ns = time.monotonic_ns()
        self.latency, self.behind = Histogram(), Histogram()
        self.gaps.begin_anew()
