"""Medians, ratios and goals of a run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from benchmarks.journal import Run
from benchmarks.matrix import Goal

OURS = "stratalog"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How one goal stands in one cell."""

    goal: Goal
    cell: str
    ratio: float

    @property
    def reached(self) -> bool:
        return self.goal.reached(self.ratio)


def cell_names(run: Run) -> list[str]:
    """In the order in which they were first measured."""
    return list(dict.fromkeys(row.cell for row in run.rows))


def quantities(run: Run, cell: str) -> list[str]:
    """Names of the numbers that any system has for a cell."""
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
                yield Verdict(goal=goal, cell=cell, ratio=found)


def failures(run: Run) -> list[str]:
    """What could not be measured, and why."""
    return [f"{row.cell}, {row.system}, round {row.round}: {row.failure}" for row in run.rows if row.failure]
