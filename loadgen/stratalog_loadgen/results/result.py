"""Results: what ran, where, with which settings, for how long, and what came out; one shape for people, programs and pages."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any

import confluent_kafka
import msgspec

from stratalog_core.errors import Unavailable
from stratalog_loadgen.processes.loads import Counted
from stratalog_loadgen.results.histogram import Histogram


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """``measured`` has its units at the ends of the names. ``window`` is when it was counted, in seconds of the machine's
    monotonic clock: the cluster's resource use can be matched with it.
    """

    what: str
    settings: dict[str, Any]
    measured: dict[str, Any]
    client: str
    machine: dict[str, Any]
    at: str
    window: tuple[float, float] | None = None


def result(
    what: str,
    settings: dict[str, Any],
    measured: dict[str, Any],
    *,
    client: str | None = None,
    window: tuple[float, float] | None = None,
) -> Result:
    """Stamped with this machine, the client's version and the time."""
    library = f"confluent-kafka {confluent_kafka.version()}, librdkafka {confluent_kafka.libversion()[0]}"
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Result(
        what=what, settings=settings, measured=measured, client=client or library, machine=machine, at=at, window=window
    )


CARRIED_MIN = 0.99
"""The share of its rate below which a load falls behind: its records wait for those before them, longer and longer."""


def produced_rate(measured: Mapping[str, Any]) -> float | None:
    """Records per second of producers; if consumers are measured, their rate has its own name."""
    rate = measured.get("produced_records_per_s", measured.get("records_per_s"))
    return None if rate is None else float(rate)


def carried_share(settings: Mapping[str, Any], measured: Mapping[str, Any]) -> float | None:
    """Return the share of the asked rate that producers sent; ``None`` of loads without one."""
    wanted = settings.get("wanted_records_per_s")
    rate = produced_rate(measured)
    return rate / wanted if wanted and rate is not None else None


def window_of(counts: Sequence[Counted]) -> tuple[float, float]:
    """From the first to the last moment at which any of them counted."""
    return min(c.began_at for c in counts), max(c.ended_at for c in counts)


def throughput(counts: Sequence[Counted]) -> dict[str, Any]:
    """Rates of processes that worked at the same time, and what they used themselves. Raises ``Unavailable`` if none worked."""
    records, size = sum(c.records for c in counts), sum(c.record_bytes for c in counts)
    began, ended = window_of([c for c in counts if c.began_at] or counts)
    elapsed_s = ended - began
    if elapsed_s <= 0 or not records:
        reasons = {c.failure for c in counts if c.failure}
        raise Unavailable(
            f"no record was acknowledged or read: {'; '.join(reasons) or 'no error was reported; measure for longer'}"
        )
    return {
        "records": records,
        "record_bytes_in_all": size,
        "elapsed_s": elapsed_s,
        "records_per_s": records / elapsed_s,
        "megabytes_per_s": size / elapsed_s / 1e6,
        "client_cpu_s": sum(c.cpu_s for c in counts),
        "client_cpu_s_per_gb": sum(c.cpu_s for c in counts) / (size / 1e9) if size else None,
        "client_resident_bytes": sum(c.resident_bytes for c in counts),
    }


def failures(counts: Sequence[Counted]) -> dict[str, Any]:
    """How many records failed, and one reason."""
    reasons = [c.failure for c in counts if c.failure]
    return {"failed": sum(c.failed for c in counts), "failure": reasons[0] if reasons else None}


def latencies(counts: Sequence[Counted], prefix: str) -> dict[str, float]:
    """Percentiles over all processes, from the moment at which each record should have been sent."""
    return _summary([(c.latency, c.latency_max_us) for c in counts], prefix)


def behind(counts: Sequence[Counted], prefix: str) -> dict[str, float]:
    """How late the load itself was: part of every latency."""
    return _summary([(c.behind, c.behind_max_us) for c in counts], prefix)


def _summary(histograms: Sequence[tuple[list[tuple[int, int]], int]], prefix: str) -> dict[str, float]:
    whole = Histogram()
    for buckets, maximum_us in histograms:
        whole.add(Histogram(buckets, maximum_us))
    return {f"{prefix}_{name}": value for name, value in whole.summary_ms().items()}
