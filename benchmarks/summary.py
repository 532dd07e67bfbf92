"""Medians, ratios and goals of a run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from benchmarks.carried import is_queue
from benchmarks.journal import OURS as OURS
from benchmarks.journal import Run
from benchmarks.matrix import Goal


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one goal in one cell. A ratio of latencies is meaningless if the load was not ``carried``."""

    goal: Goal
    cell: str
    ratio: float
    carried: bool = True

    @property
    def reached(self) -> bool:
        return self.carried and self.goal.reached(self.ratio)


def cell_names(run: Run) -> list[str]:
    """In the order in which they were first measured."""
    return list(dict.fromkeys(row.cell for row in run.rows))


def quantities(run: Run, cell: str) -> list[str]:
    """Return the names of the quantities that any system has for a cell."""
    rows = [row for row in run.rows if row.cell == cell]
    return list(dict.fromkeys(name for row in rows for name, value in row.measured.items() if isinstance(value, int | float)))


def rounds(run: Run, cell: str, system: str) -> int:
    return sum(row.cell == cell and row.system == system and bool(row.measured) for row in run.rows)


def median(run: Run, cell: str, system: str, quantity: str) -> float | None:
    """Over the rounds that have it; ``None`` if none has."""
    values = [
        row.measured[quantity]
        for row in run.rows
        if row.cell == cell and row.system == system and isinstance(row.measured.get(quantity), int | float)
    ]
    return float(statistics.median(values)) if values else None


def ratio(run: Run, cell: str, quantity: str, against: str) -> float | None:
    """Ours to theirs; ``None`` if one of them is missing or theirs is zero."""
    ours, theirs = median(run, cell, OURS, quantity), median(run, cell, against, quantity)
    return ours / theirs if ours is not None and theirs else None


def verdicts(run: Run, goals: Sequence[Goal], against: str) -> Iterator[Verdict]:
    """Every goal in every cell it covers and that was measured."""
    for goal in goals:
        for cell in filter(goal.covers, cell_names(run)):
            if goal.over is None:
                found = ratio(run, cell, goal.quantity, against)
            else:
                here, there = (median(run, name, OURS, goal.quantity) for name in (cell, goal.over))
                found = here / there if here is not None and there else None
            if found is not None:
                late = is_queue(run, cell, goal.quantity, against)
                yield Verdict(goal=goal, cell=cell, ratio=found, carried=not late)


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """Explain what limited our rate in one cell, from the CPU time of the windows that counted.

    ``per_gb`` are CPU seconds per GB by role. ``ceiling_mb_per_s`` is what the machine's cores give if all they do is the
    clients' work, our servers costing nothing; ``ceiling_ratio`` is that to the other system's measured rate. With
    ``servers_s_per_gb_allowed`` for all our servers together, the other system's rate as it is and no core ever idle, the goal
    would stand; negative means that the clients alone cost too much for it.
    """

    cell: str
    per_gb: dict[str, float]
    clients_s_per_gb: float
    ceiling_mb_per_s: float
    ceiling_ratio: float
    servers_s_per_gb_allowed: float


SHARE, SERVER = "machine_share_", "server_cpu_s_per_gb_"
"""Prefixes of the names of a role's figures."""


def limit(run: Run, verdict: Verdict, against: str) -> Limit | None:
    """``None`` for goals that are not about a rate, and where CPU was not measured."""
    cell, goal = verdict.cell, verdict.goal
    per_gb = by_role(run, cell, OURS, SERVER)
    clients_s_per_gb = median(run, cell, OURS, "clients_cpu_s_per_gb")
    theirs = median(run, cell, against, "megabytes_per_s")
    if goal.quantity != "records_per_s" or goal.over or not (per_gb and clients_s_per_gb and theirs):
        return None
    cores = float(run.machine["cores"])
    ceiling = cores / clients_s_per_gb * 1000
    return Limit(
        cell=cell,
        per_gb=per_gb,
        clients_s_per_gb=clients_s_per_gb,
        ceiling_mb_per_s=ceiling,
        ceiling_ratio=ceiling / theirs,
        servers_s_per_gb_allowed=cores / ((goal.at_least or 1.0) * theirs / 1000) - clients_s_per_gb,
    )


def held_ms(run: Run, cell: str) -> float:
    """For how long a client that sends at a fixed rate holds the first record of a batch back."""
    settings = next((row.settings for row in run.rows if row.cell == cell and not row.failure), {})
    linger_ms, rate = settings.get("linger_ms", 0.0), settings.get("wanted_records_per_s", 0.0)
    if not linger_ms or not rate:
        return 0.0
    return float(min(linger_ms, settings["batch_bytes"] / settings["payload"]["record_bytes"] / rate * 1000))


def by_role(run: Run, cell: str, system: str, prefix: str) -> dict[str, float]:
    """Medians of the quantities that begin with ``prefix``, by the rest of their names."""
    found = {name: median(run, cell, system, name) for name in quantities(run, cell) if name.startswith(prefix)}
    return {name.removeprefix(prefix): value for name, value in found.items() if value is not None}


def failures(run: Run) -> list[str]:
    """Return what could not be measured, and why."""
    return [f"{row.cell}, {row.system}, round {row.round}: {row.failure}" for row in run.rows if row.failure]
