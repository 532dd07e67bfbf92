"""Due times of the records of an open-loop load; latency counts from them."""

from __future__ import annotations

from stratalog_loadgen.processes.loads import ProducerLoad


class Schedule:
    """Record ``i`` is due ``i / rate`` seconds after the start, even if earlier records are late."""

    def __init__(self, load: ProducerLoad) -> None:
        self.interval_ns = 1e9 / load.records_per_s
        self.records = load.records or max(1, round(load.records_per_s * (load.warmup_s + load.duration_s)))
        """Number of records that are due before the end, or the requested number of records."""
        self.began_ns = 0

    def moment_ns(self, record: int) -> float:
        return self.began_ns + record * self.interval_ns

    def end_ns(self) -> float:
        return self.moment_ns(self.records)

    def due(self, now_ns: int) -> int:
        """How many of all records are due by now."""
        return min(self.records, int((now_ns - self.began_ns) / self.interval_ns) + 1)
