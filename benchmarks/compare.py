"""Stratalog and Apache Kafka in turns, in one run, on one machine: ``python -m benchmarks.compare``, or ``make bench``.

Machines are noisy: rounds alternate (A B A B), and what counts is the ratio of the medians. Kafka acknowledges from the page
cache, as it does by default; Stratalog's acknowledgements are fsynced. The load comes from Kafka's own Java tools, on the same
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import failover, systems
from benchmarks.report import write_report
from benchmarks.systems import System, create_topic
from stratalog.bench import java_tools

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results.json"
_REPORT = _ROOT / "docs" / "benchmarks.md"
_Start = Callable[[Path], AbstractContextManager[System]]
_START: dict[str, _Start] = {"stratalog": systems.stratalog, "kafka": systems.kafka}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured; the defaults take about five minutes a round."""

    records: int = 500_000
    record_bytes: int = 1000
    latency_records: int = 60_000
    latency_records_per_s: int = 2000
    failover_partitions: int = 100
    rounds: int = 2


def main() -> None:
    """Measure, write ``benchmarks/results.json`` and the table in ``docs/benchmarks.md``."""
    sizes = _arguments()
    rounds: list[dict[str, object]] = []
    for number in range(1, sizes.rounds + 1):
        for name, start in _START.items():
            print(f"round {number}: {name}", flush=True)
            measured = _round(name, start, sizes)
            print(json.dumps(measured, indent=2), flush=True)
            rounds.append({"system": name, "round": number, "measured": measured})
    results = {"machine": _machine(), "sizes": asdict(sizes), "at": time.strftime("%Y-%m-%d"), "rounds": rounds}
    _RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    write_report(results, _REPORT)


def _arguments() -> Sizes:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return Sizes(**vars(parser.parse_args()))


def _round(name: str, start: _Start, sizes: Sizes) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix=f"bench-{name}-", ignore_cleanup_errors=True) as directory:
        with start(Path(directory)) as system:
            measured = _throughput(system, sizes)
            measured |= _latency(system, sizes)
            measured["resident_bytes"] = system.resident_bytes()
            if system.make_cold("throughput"):
                cold = java_tools.consume(system.bootstrap, "throughput", records=sizes.records)
                measured["cold_megabytes_per_s"] = cold.fetching_megabytes_per_s
            lost = failover.measure(system, "failover", sizes.failover_partitions)
            measured["failover_gap_median_s"] = lost.median_gap_s
            measured["failover_gap_max_s"] = lost.max_gap_s
        return measured


def _throughput(system: System, sizes: Sizes) -> dict[str, float]:
    create_topic(system, "throughput", 6)
    properties: dict[str, str | int] = {"acks": "all", "batch.size": 131072, "linger.ms": 5}
    before, client_before = system.cpu_s(), os.times().children_user + os.times().children_system
    sent = java_tools.produce(
        system.bootstrap,
        "throughput",
        records=sizes.records,
        record_bytes=sizes.record_bytes,
        warmup_records=sizes.records // 10,
        properties=properties,
    )
    client = os.times().children_user + os.times().children_system - client_before
    gigabytes = sizes.records * sizes.record_bytes / 1e9
    cpu = {f"cpu_s_per_gb_{role}": (used - before[role]) / gigabytes for role, used in system.cpu_s().items()}
    cpu |= {"cpu_s_per_gb": sum(cpu.values()), "cpu_s_per_gb_client": client / gigabytes}
    tail = java_tools.consume(system.bootstrap, "throughput", records=sizes.records)
    return {"produce_records_per_s": sent.records_per_s, "tail_megabytes_per_s": tail.fetching_megabytes_per_s, **cpu}


def _latency(system: System, sizes: Sizes) -> dict[str, float]:
    create_topic(system, "latency", 6)
    properties: dict[str, str | int] = {"acks": "all", "linger.ms": 0}
    sent = java_tools.produce(
        system.bootstrap,
        "latency",
        records=sizes.latency_records,
        record_bytes=sizes.record_bytes,
        records_per_s=sizes.latency_records_per_s,
        warmup_records=sizes.latency_records // 3,
        properties=properties,
    )
    return {"latency_p50_ms": sent.p50_ms, "latency_p99_ms": sent.p99_ms, "latency_p999_ms": sent.p999_ms}


def _machine() -> dict[str, object]:
    return {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}


if __name__ == "__main__":
    main()
