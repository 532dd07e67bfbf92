"""Counts the records that a process of consumers has read, from the first on, and again from the end of the warm-up."""

from __future__ import annotations

import time
from collections.abc import Sequence

from stratalog_loadgen.clients.payloads import stamps_of
from stratalog_loadgen.processes.control import cpu_s, resident_bytes
from stratalog_loadgen.processes.loads import ConsumerLoad, Counted
from stratalog_loadgen.results.histogram import Histogram


class ReceivedRecords:
    """Records, bytes, latencies, and the CPU time that the process used for them."""

    def __init__(self, load: ConsumerLoad) -> None:
        self._load = load
        self._latency = Histogram()
        self._per_group = dict.fromkeys(load.groups, 0)
        self._records = 0
        self._bytes = 0
        self._first_at = 0.0
        self._last_at = 0.0
        self._is_windowed = False
        self._cpu_from_s = 0.0
        self._cpu_until_s = 0.0
        self.all_records = 0
        self.failure = ""

    def count_anew(self) -> None:
        self._latency = Histogram()
        self._per_group = dict.fromkeys(self._load.groups, 0)
        self._records = self._bytes = 0
        self._first_at = self._last_at = time.monotonic()
        self._cpu_from_s = self._cpu_until_s = cpu_s()
        self._is_windowed = True

    def take(self, group: str, records: int, size: int, values: Sequence[bytes] = ()) -> None:
        """Count records received now, ``size`` bytes in total. ``values`` are needed if they are stamped."""
        now = time.monotonic()
        self.all_records += records
        if not records:
            return
        if not self._first_at:
            self._first_at, self._cpu_from_s = now, cpu_s()
        self._last_at, self._cpu_until_s = now, cpu_s()
        self._records += records
        self._per_group[group] += records
        self._bytes += size
        if self._load.stamps:
            now_ns = time.monotonic_ns()
            self._latency.record_all([(now_ns - sent_ns) // 1000 for sent_ns in stamps_of(values)])

    def end(self) -> None:
        """End the measured time."""
        if self._is_windowed:
            self._last_at, self._cpu_until_s = time.monotonic(), cpu_s()

    def counted(self, assigned: dict[str, int], settled_s: float, rebalance_s: float) -> Counted:
        return Counted(
            records=self._records,
            record_bytes=self._bytes,
            began_at=self._first_at,
            ended_at=self._last_at,
            failure=self.failure,
            latency=self._latency.buckets(),
            latency_max_us=self._latency.maximum_us,
            assigned=assigned,
            settled_s=settled_s,
            rebalance_s=rebalance_s,
            cpu_s=self._cpu_until_s - self._cpu_from_s,
            resident_bytes=resident_bytes(),
            per_group=self._per_group,
        )
