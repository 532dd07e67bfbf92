"""Open-loop producers of whole batches: a fixed rate, whatever the cluster does. Latency counts from each record's due time.

Record ``i`` is due ``i / rate`` seconds after the start. Records are passed to the client as batches, each for a partition
without a batch in flight: when the batch is full, or when its first record has waited for ``linger_ms``, as in a producer's
accumulator; without a linger, every quarter of a millisecond. While no partition is free, records wait here, and the wait
counts. Due times never shift: after a stall, all records of that time are late (no coordinated omission), and records that
were due before the end are sent even if that takes longer.

Precision: latency is from each record's due time to its batch's acknowledgement, whose time a waiting thread takes. The
records of a batch are counted as evenly spaced values. If the client splits a batch, its first part counts as acknowledged
with the last: never too early, and too late by less than one round trip.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, Message

from stratalog_loadgen.clients.payloads import STAMP, heads_of
from stratalog_loadgen.clients.producing import TICK_NS
from stratalog_loadgen.clients.schedule import Schedule
from stratalog_loadgen.clients.whole_batches import LeaderQueue, Target, WholeBatches
from stratalog_loadgen.processes.control import Control
from stratalog_loadgen.processes.loads import Counted, ProducerLoad

_BLOCKED_WAIT_S = 0.0002
_TURN_MAX_S = 0.05


class BatchAcknowledged(NamedTuple):
    """The acknowledgement thread's report on a batch: records ``first`` to ``first + records - 1``."""

    queue: LeaderQueue
    target: Target
    first: int
    records: int
    at_ns: int
    failure: str


class DueBatches(WholeBatches):
    """Sends what is due, and never more."""

    def __init__(self, load: ProducerLoad, control: Control) -> None:
        super().__init__(load, control)
        self._schedule = Schedule(load)
        self._linger_ns = load.linger_ms * 1e6
        self._acknowledgements: deque[BatchAcknowledged] = deque()
        self._handed_ns = self._free_ns = 0
        self._blocked = False
        self._messages = [{"value": b""} for _ in range(load.batch_records)]
        self._values = itertools.cycle(value[STAMP.size :] if load.stamps else value for value in self.pool)

    def run(self) -> Counted:
        return self.run_at_rate(self._schedule, self._send_all, self._take_acknowledgements)

    def _send_all(self) -> None:
        while self.sent < self._schedule.records and self.control.running(self.sent):
            if self.gives_up(self._schedule):
                return
            self.note_cpu()
            self._take_acknowledgements()
            self._send_due()
            self._blocked = self._left() > 0
            time.sleep(_BLOCKED_WAIT_S if self._blocked else self._until_due_s())

    def _send_due(self) -> None:
        for sender in self._in_turn():
            self._fill(sender)
            if not self._left():
                return

    def _left(self) -> int:
        """Return how many records may be sent now: a full batch, or fewer after the linger of the first."""
        now_ns = time.monotonic_ns()
        due = self._schedule.due(now_ns) - self.sent
        full = min(self.load.batch_records, self._schedule.records - self.sent)
        return min(due, full) if due >= full or (due > 0 and now_ns >= self._closes_ns()) else 0

    def _until_due_s(self, without_rate: float = 0.0) -> float:
        full_ns = self._schedule.moment_ns(min(self._schedule.records, self.sent + self.load.batch_records) - 1)
        wait_s = (min(full_ns, self._closes_ns()) - time.monotonic_ns()) / 1e9
        return min(_TURN_MAX_S, max(0.0, wait_s))

    def _closes_ns(self) -> float:
        """Return when the next batch is sent even if it is not full; without a linger, not before the next tick."""
        tick_ns = self._handed_ns + TICK_NS if not self._linger_ns else 0
        return max(self._schedule.moment_ns(self.sent) + self._linger_ns, tick_ns)

    def _hand_over_next(self, producer: Any, queue: LeaderQueue, records: int) -> int:
        records = min(records, self.load.batch_records)
        first, target = self.sent, queue.take()
        chunk = self._stamped(first, records)
        chunk[-1] = {**chunk[-1], "callback": partial(self._on_acknowledged, queue, target, first, records)}
        self._note_behind(first, records)
        self.hand_over(producer, target[0], chunk, target[1])
        return records

    def _stamped(self, first: int, records: int) -> list[dict[str, Any]]:
        """Return the messages of a batch. They are reused, because the client copies values at once."""
        chunk = self._messages[:records]
        if not self.load.stamps:
            for message in chunk:
                message["value"] = next(self._values)
            return chunk
        heads = heads_of([int(self._schedule.moment_ns(number)) for number in range(first, first + records)])
        for message, head in zip(chunk, heads, strict=True):
            message["value"] = head + next(self._values)
        return chunk

    def _note_behind(self, first: int, records: int) -> None:
        """Record how late the load itself is, from when the batch was closed and a partition was free."""
        self._handed_ns = time.monotonic_ns()
        early, oldest_ns = self._before_measuring(first, records), self._schedule.moment_ns(first)
        closed_ns = min(oldest_ns + self._linger_ns, self._schedule.moment_ns(first + self.load.batch_records - 1))
        since_ns = max(closed_ns, self._free_ns if self._blocked else 0)
        # Records that were due after the batch had closed are late from their own due time.
        waited = max(0, min(records, int((since_ns - oldest_ns) / self._schedule.interval_ns) + 1))
        if waited > early:
            self.behind.record((self._handed_ns - since_ns) / 1000, waited - early)
        youngest_us = (self._handed_ns - self._schedule.moment_ns(first + records - 1)) / 1000
        self.behind.record_evenly(youngest_us, self._schedule.interval_ns / 1000, records - max(waited, early))

    def _on_acknowledged(
        self, queue: LeaderQueue, target: Target, first: int, records: int, failure: KafkaError | None, message: Message
    ) -> None:
        """Take the time of an acknowledgement, in the polling thread. The sending thread does the rest."""
        reason = failure.str() if failure is not None else ""
        self._acknowledgements.append(BatchAcknowledged(queue, target, first, records, time.monotonic_ns(), reason))

    def _take_acknowledgements(self) -> None:
        while self._acknowledgements:
            acknowledged = self._acknowledgements.popleft()
            acknowledged.queue.give_back(acknowledged.target)
            self._under_way -= 1
            self._free_ns = acknowledged.at_ns
            if acknowledged.failure:
                self.failed += acknowledged.records
                self.failure = acknowledged.failure
                continue
            self._count(acknowledged)

    def _count(self, acknowledged: BatchAcknowledged) -> None:
        """Count the records of the batch that were due after the warm-up."""
        youngest_us = (acknowledged.at_ns - self._schedule.moment_ns(acknowledged.first + acknowledged.records - 1)) / 1000
        counted = acknowledged.records - self._before_measuring(acknowledged.first, acknowledged.records)
        self.latency.record_evenly(youngest_us, self._schedule.interval_ns / 1000, counted)

    def _before_measuring(self, first: int, records: int) -> int:
        """Return how many of these records were due during the warm-up."""
        early_ns = self.measures_from_ns - self._schedule.moment_ns(first)
        return min(records, max(0, math.ceil(early_ns / self._schedule.interval_ns)))
