"""Prints figures of cold reads and tiering, one per line, for scripts: ``make bench-cold``.

A cluster of real processes (metadata, bookies, broker, tiering worker) over a MinIO of its own, librdkafka clients. Every
measure runs its control in the same round; the median of all rounds is printed, with the smallest and largest value.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.cold.concurrent_loads import hot_catchup_under_frozen_store, hot_p99_ratio_under_replay, producers_under_catchup
from benchmarks.cold.figures import Figure
from benchmarks.cold.offloads import offload_mb_per_core_s
from benchmarks.cold.replays import Replays, cold_amplification, cold_replay_ratio, replay_resident, server_cpu_s_per_gb
from benchmarks.cold.seeks import cold_seek_p99_ms
from benchmarks.cold.stage import Options, Stage, running, say

MEASURES: Final[dict[str, Callable[[Stage, Replays], list[Figure]]]] = {
    "offload_mb_per_core_s": offload_mb_per_core_s,
    "cold_replay_ratio": cold_replay_ratio,
    "server_cpu_s_per_gb": server_cpu_s_per_gb,
    "replay_resident_share_of_budget": replay_resident,
    "hot_p99_ratio_under_replay": hot_p99_ratio_under_replay,
    "producers_under_catchup": producers_under_catchup,
    "cold_amplification": cold_amplification,
    "cold_seek_p99_ms": cold_seek_p99_ms,
    "hot_catchup_under_frozen_store": hot_catchup_under_frozen_store,
}
"""By the name of its main figure, in the order in which they run: first those whose broker reads the store directly."""

SMOKE: Final = Options(
    rounds=1,
    history_mb=16,
    catch_up_mb=16,
    hot_mb=16,
    offload_mb=8,
    seeks=5,
    window_s=1.0,
    cold_readers=4,
    records_per_s=500,
    catch_up_records_per_s=2_000,
    segment_mb=1,
    broker_memory_mb=64,
    settle_s=0.5,
)
"""Does every measure work? Its figures mean nothing."""


def parsed(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, Options]:
    """The command line; each size has an option of its name."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cold", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MEASURES, metavar="NAME", help=f"some of: {', '.join(MEASURES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all values, sizes and the machine there as well")
    parser.add_argument("--data", type=Path, help="parent of the cluster's directory (default: the temporary directory)")
    parser.add_argument("--smoke", action="store_true", help="the smallest sizes, in a minute; the figures mean nothing")
    for field in msgspec.structs.fields(Options):
        default = f"default {field.default}; in a smoke run {getattr(SMOKE, field.name)}"
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), help=default)
    arguments = parser.parse_args(words)
    named = {name: value for name in Options.__struct_fields__ if (value := getattr(arguments, name)) is not None}
    wrong = [f"--{name.replace('_', '-')} is {value}; it must be more than 0" for name, value in named.items() if value <= 0]
    if wrong:
        parser.error("; ".join(wrong))
    return arguments, msgspec.structs.replace(SMOKE if arguments.smoke else Options(), **named)


def main(words: Sequence[str] | None = None) -> None:
    arguments, options = parsed(words)
    document: dict[str, Any] = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "load_average_before": os.getloadavg()[0]},
        "options": msgspec.to_builtins(options),
        "figures": [],
    }
    data = Path(tempfile.mkdtemp(prefix="stratalog-bench-cold-", dir=arguments.data))
    try:
        with running(data / "cluster", options) as stage:
            replays = Replays(stage)
            for name in arguments.only or MEASURES:
                say(name)
                for figure in MEASURES[name](stage, replays):
                    print(figure.line(), flush=True)
                    document["figures"].append(figure.document())
                if arguments.json:
                    # After each measure: an interrupted run keeps what it has.
                    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    finally:
        shutil.rmtree(data, ignore_errors=True)


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


if __name__ == "__main__":
    main()
