"""How long a run may take: an estimate beforehand, corrected by what its cells took, and a bar. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.journal import Run
from benchmarks.matrix import Cell, Profile

Place = tuple[Cell, str]
"""A cell on a system."""

# Roughly what a small machine does; what a run has measured corrects it.
_BYTES_PER_S, _COLD_BYTES_PER_S, _JAVA_RECORDS_PER_S = 60e6, 30e6, 40_000
_CELL_S, _PARTITION_S, _CLUSTER_S = 0.8, 0.004, 15.0
_BAR = 30
_PATIENCE, _PATIENCE_MIN_S = 6, 240.0


def window_s(cell: Cell, profile: Profile) -> float:
    """One window of a cell, its warm-up included: the first write to a partition opens its log, which is no steady state."""
    return warmup_s(cell.settings, profile) + cell.duration_s(profile)


def warmup_s(settings: Mapping[str, Any], profile: Profile) -> float:
    return profile.warmup_s + profile.warmup_per_partition_s * int(settings.get("partitions", 0))


def expected_s(cell: Cell, profile: Profile) -> float:
    """Of one cell on one system, everything included."""
    settings = cell.settings
    overhead_s = _CELL_S + _PARTITION_S * (int(settings.get("partitions", 0)) + int(settings.get("consumers", 0)))
    return overhead_s + _WORK_S[cell.kind](settings, window_s(cell, profile))


def _windows(count: float) -> Callable[[Mapping[str, Any], float], float]:
    return lambda settings, window: (count + ("rate_share" in settings)) * window


_WORK_S: dict[str, Callable[[Mapping[str, Any], float], float]] = {
    "produce": _windows(1),
    "produce_java": lambda settings, _: 5 + settings["records"] / _JAVA_RECORDS_PER_S,
    "latency": _windows(1.2),
    "copy": _windows(1.5),
    "tail": _windows(1.2),
    "workload_file": _windows(1.2),
    "catch_up": lambda settings, window: window + 2 * settings["history_bytes"] / _BYTES_PER_S,
    "cold_replay": lambda settings, _: 2 * settings["history_bytes"] / _COLD_BYTES_PER_S,
    "failover": lambda settings, _: 5 + settings["before_s"] + settings["after_s"],
    "restart": lambda settings, _: 45,
    "connections": lambda settings, _: 5 + settings["hold_s"] + settings["connections"] / 1000,
    "growth": lambda settings, window: 2 * window + settings["times"] * settings["history_bytes"] / _BYTES_PER_S,
    "growth_partitions": lambda settings, window: 2 * window + _PARTITION_S * settings["times"] * settings["partitions"],
}


def limit_s(cell: Cell, profile: Profile) -> float:
    """When a cell is given up: far beyond what it should take."""
    return max(_PATIENCE_MIN_S, _PATIENCE * expected_s(cell, profile))


def left_s(run: Run, profile: Profile, cells: Iterable[Cell], left: Iterable[Place], clusters: int = 0) -> float:
    """Seconds that cells on systems may still take, and as many new ``clusters``.

    A cell takes as long as it did on the same system before, or what is expected, times what that was wrong by so far.
    """
    expected = {cell.name: expected_s(cell, profile) for cell in cells}
    took = {(row.cell, row.system): row.took_s for row in run.rows if row.took_s}
    known = [(seconds, expected[name]) for (name, _), seconds in took.items() if name in expected]
    wrong_by = sum(seconds for seconds, _ in known) / sum(other for _, other in known) if known else 1.0
    cells_s = sum(took.get((cell.name, system), wrong_by * expected_s(cell, profile)) for cell, system in left)
    return cells_s + clusters * (_CLUSTER_S + profile.warm_cluster_s)


def bar(done: int, whole: int, seconds_left: float) -> str:
    """``[####----] 3 of 12 cells, about 4 min left``."""
    filled = _BAR * done // whole if whole else _BAR
    return f"[{'#' * filled}{'-' * (_BAR - filled)}] {done} of {whole} cells, about {seconds_left / 60:.0f} min left"
