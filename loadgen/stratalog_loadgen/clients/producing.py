"""The common parts of all producers of a load.

At a fixed rate every record has a due time. Its latency counts from then, even if the client could not take it, so a stall
shows in all records that were due during it, and not only in one (no coordinated omission). Records count that were
acknowledged between the end of the warm-up and the end of the run; so does the CPU time between the same two moments.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from stratalog_loadgen.clients.payloads import payloads
from stratalog_loadgen.clients.schedule import Schedule
from stratalog_loadgen.processes.control import Control, cpu_s, resident_bytes
from stratalog_loadgen.processes.loads import Counted, ProducerLoad
from stratalog_loadgen.results.gaps import Gaps
from stratalog_loadgen.results.histogram import Histogram

_FLUSH_TIMEOUT_S = 120.0
_FULL_WAIT_S = 0.05
# How long after the end records that were due before it may still be sent.
_OVERDUE_S = 30.0
_SWITCH_INTERVAL_S = 0.0005
TICK_NS = 250_000
"""Records that are due within this time are sent together."""


class ProducerRun:
    """One process's producers, payloads and counts."""

    def __init__(self, load: ProducerLoad, control: Control) -> None:
        self.load = load
        self.control = control
        self.producers = [Producer(load.client) for _ in range(load.producers)]
        self.pool = payloads(load.payload, load.seed)
        self.latency = Histogram()
        self.behind = Histogram()
        self.gaps = Gaps()
        self.sent = 0
        self.failed = 0
        self.failure = ""
        self.measures_from_ns = 0
        self._cpu_before_s = 0.0

    def run(self) -> Counted:
        raise NotImplementedError

    def run_at_rate(
        self, schedule: Schedule, send_all: Callable[[], None], take_acknowledgements: Callable[[], None]
    ) -> Counted:
        """Run ``send_all`` while a thread per producer polls it; call ``take_acknowledgements`` when all are received."""
        # The polling thread must not wait for the sending thread's GIL interval.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        ended = threading.Event()
        pollers = [threading.Thread(target=_poll_until, args=(producer, ended), daemon=True) for producer in self.producers]
        for poller in pollers:
            poller.start()
        schedule.began_ns = round(self.control.began * 1e9)
        self.measures_from_ns = schedule.began_ns + round(self.load.warmup_s * 1e9)
        send_all()
        ended_at, cpu = time.monotonic(), cpu_s() - self._cpu_before_s
        self.wait_until_delivered()
        ended.set()
        for poller in pollers:
            poller.join()
        take_acknowledgements()
        began_at = self.measures_from_ns / 1e9
        return self.counted(self.latency.count, began_at, max(began_at, ended_at), cpu)

    def note_cpu(self) -> None:
        """Note the CPU time used until the end of the warm-up."""
        if time.monotonic_ns() < self.measures_from_ns or not self._cpu_before_s:
            self._cpu_before_s = cpu_s()

    def gives_up(self, schedule: Schedule) -> bool:
        """Return whether the end is long past. Records that were due before it and are not sent count as failed then."""
        if time.monotonic_ns() <= schedule.end_ns() + _OVERDUE_S * 1e9:
            return False
        self.failed += schedule.records - self.sent
        self.failure = f"records that were due before the end were not sent within {_OVERDUE_S:.0f} s after it"
        return True

    def hand_over(self, producer: Producer, topic: str, chunk: list[dict[str, Any]], partition: int) -> None:
        """Pass ``chunk`` to the client. Raises ``KafkaException`` if it refuses a record, unless its queue is full."""
        while (taken := int(producer.produce_batch(topic, chunk, partition=partition))) < len(chunk):
            failure = chunk[-1]["_error"]
            if failure.code() != KafkaError._QUEUE_FULL:
                raise KafkaException(failure)
            chunk = chunk[taken:]
            # Due times do not shift: the wait for room is part of the latency.
            producer.poll(_FULL_WAIT_S)

    def delivered(self, intended_ns: int, failure: KafkaError | None, message: Message, records: int) -> None:
        """Count ``records`` records, of which this is the last; all count as failed if it failed."""
        if failure is not None:
            self.failed += records
            self.failure = failure.str()
            return
        if intended_ns >= self.measures_from_ns:
            self.latency.record((time.monotonic_ns() - intended_ns) // 1000)

    def wait_until_delivered(self) -> None:
        for producer in self.producers:
            producer.flush(_FLUSH_TIMEOUT_S)
        left = sum(map(len, self.producers))
        if left:
            self.failed += left
            self.failure = f"{left} records were not acknowledged within {_FLUSH_TIMEOUT_S:.0f} s of the end"

    def counted(self, records: int, began_at: float, ended_at: float, cpu: float) -> Counted:
        return Counted(
            records=records,
            record_bytes=records * self.load.payload.record_bytes,
            began_at=began_at,
            ended_at=ended_at,
            sent=self.sent,
            failed=self.failed,
            failure=self.failure,
            latency=self.latency.buckets(),
            latency_max_us=self.latency.maximum_us,
            behind=self.behind.buckets(),
            behind_max_us=self.behind.maximum_us,
            gaps=self.gaps.longest(),
            cpu_s=cpu,
            resident_bytes=resident_bytes(),
        )

    def running(self) -> bool:
        within = self.control.elapsed_s() < self.load.warmup_s + self.load.duration_s
        more = not self.load.records or self.sent < self.load.records
        return self.control.running(self.sent) and more and (within or bool(self.load.records))


def keys_of(load: ProducerLoad) -> Iterator[bytes | None]:
    """Return the keys of the records, endlessly."""
    if load.keys == "none":
        return itertools.repeat(None)
    if load.keys == "round-robin":
        return itertools.cycle([f"key-{number}".encode() for number in range(10_000)])
    # Distinct at each call, like the clock; the seed separates processes.
    return (f"{load.seed}-{time.monotonic_ns()}".encode() for _ in itertools.count())


def _poll_until(producer: Producer, ended: threading.Event) -> None:
    """Poll a producer in its own thread until ``ended``."""
    while not ended.is_set():
        producer.poll(0.1)
