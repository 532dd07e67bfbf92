"""Medians and ratios of a comparison, as the table in ``docs/benchmarks.md``. The text around the table is written by hand."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One row. ``scale`` divides the measured value; ``more_is_better`` says how to read the ratio."""

    key: str
    title: str
    more_is_better: bool
    scale: float = 1.0


QUANTITIES = (
    Quantity(key="produce_records_per_s", title="produce, acks=all, 128 KiB batches, records/s", more_is_better=True),
    Quantity(key="cpu_s_per_gb", title="… CPU of all servers, s/GB", more_is_better=False),
    Quantity(key="cpu_s_per_gb_client", title="… CPU of the Java client, s/GB", more_is_better=False),
    Quantity(key="latency_p50_ms", title="2,000 records/s, linger 0: p50, ms", more_is_better=False),
    Quantity(key="latency_p99_ms", title="… p99, ms", more_is_better=False),
    Quantity(key="latency_p999_ms", title="… p99.9, ms", more_is_better=False),
    Quantity(key="tail_megabytes_per_s", title="consume what was just written, MB/s", more_is_better=True),
    Quantity(key="cold_megabytes_per_s", title="replay from the object store, MB/s", more_is_better=True),
    Quantity(key="failover_gap_median_s", title="kill -9 of a broker: median gap of a partition, s", more_is_better=False),
    Quantity(key="failover_gap_max_s", title="… worst partition, s", more_is_better=False),
    Quantity(key="resident_bytes", title="resident memory of all processes, MiB", more_is_better=False, scale=1024 * 1024),
)


def write_report(results: Mapping[str, Any], path: Path) -> None:
    """Replace what stands between the markers of ``path``."""
    document = path.read_text() if path.exists() else f"# Benchmarks\n\n{BEGIN}\n{END}\n"
    before, rest = document.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    path.write_text(f"{before}{BEGIN}\n{table(results)}{END}{after}")


def table(results: Mapping[str, Any]) -> str:
    """Markdown: one row per quantity, with the median of each system's rounds and their ratio."""
    rounds = results["rounds"]
    count = sum(row["system"] == "stratalog" for row in rounds)
    sizes, machine = results["sizes"], results["machine"]
    lines = [
        f"Measured {results['at']} on {machine['cores']} cores, clients included; medians of {count} rounds of each,",
        f"in turns; records of {sizes['record_bytes']} bytes; {sizes['failover_partitions']} partitions at the failover.",
        "",
        "| quantity | Stratalog (fsynced) | Kafka 4.3.1 (page cache) | ratio |",
        "| --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *(_row(quantity, rounds) for quantity in QUANTITIES)]) + "\n"


def _row(quantity: Quantity, rounds: list[dict[str, Any]]) -> str:
    ours, theirs = (_median(quantity, rounds, system) for system in ("stratalog", "kafka"))
    ratio = "–"
    if ours is not None and theirs:
        better = (ours > theirs) == quantity.more_is_better
        ratio = f"{ours / theirs:.2f} ({'better' if better else 'worse'})"
    return f"| {quantity.title} | {_text(ours)} | {_text(theirs)} | {ratio} |"


def _median(quantity: Quantity, rounds: list[dict[str, Any]], system: str) -> float | None:
    values = [row["measured"][quantity.key] for row in rounds if row["system"] == system and quantity.key in row["measured"]]
    return statistics.median(values) / quantity.scale if values else None


def _text(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
