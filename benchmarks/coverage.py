"""Parts of the matrix without figures in a run: cells that were not carried out, goals without a verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import summary
from benchmarks.grid import column_of
from benchmarks.journal import Run
from benchmarks.matrix import Cell, Goal, Matrix, cells_of

PROFILES = ("quick", "size", "grid")
"""Profiles that the page shows: together they have every workload at its sizes."""


def not_measured(run: Run, matrix: Matrix) -> Iterator[str]:
    """Failures with their reasons, then cells that a system has no result of; those of a grid counted by column."""
    yield from summary.failures(run)
    failed = {row.cell for row in run.rows if row.failure}
    missing = [cell for cell in _declared(matrix) if cell.name not in failed and not _done(run, cell.name)]
    listed = {cell.name for profile in PROFILES for cell in cells_of(matrix, profile) if not _in_grid(matrix, profile, cell)}
    yield from (f"{cell.name}: not in this run" for cell in missing if cell.name in listed)
    columns: dict[str, int] = {}
    for cell in missing:
        if cell.name not in listed:
            column = f"{cell.name.split(maxsplit=1)[0]}, grid of {column_of(cell.settings)}"
            columns[column] = columns.get(column, 0) + 1
    yield from (f"{column}: {count} cells not in this run" for column, count in columns.items())


def goals_without_verdict(run: Run, matrix: Matrix, against: str) -> Iterator[tuple[Goal, str]]:
    """Each with the cell whose figures are missing."""
    known = {(verdict.goal, verdict.cell) for verdict in summary.verdicts(run, matrix.goals, against)}
    cells = dict.fromkeys(cell.name for profile in ("quick", "size") for cell in cells_of(matrix, profile))
    for goal in matrix.goals:
        for cell in filter(goal.covers, cells):
            if (goal, cell) not in known:
                yield goal, cell


def _declared(matrix: Matrix) -> list[Cell]:
    return list({cell.name: cell for profile in PROFILES for cell in cells_of(matrix, profile)}.values())


def _in_grid(matrix: Matrix, profile: str, cell: Cell) -> bool:
    return any(cell.kind == workload.kind and profile in workload.products for workload in matrix.workloads)


def _done(run: Run, cell: str) -> bool:
    """A system that has no such thing has a row, too."""
    return {row.system for row in run.rows if row.cell == cell} >= run.systems.keys()
