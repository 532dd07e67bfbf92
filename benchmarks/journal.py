"""Results of a run in one JSON file, written after every cell, so that an interrupted run can continue."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

OURS = "stratalog"
DIRECTORY = Path(__file__).with_name("results")


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cell on one system in one round. ``measured`` is empty after a ``failure``, or if the system has no such thing.

    ``took_s`` is the whole time that it took, preparations included; ``commit`` is ours, empty if it is the run's.
    """

    cell: str
    system: str
    round: int
    at: str
    measured: dict[str, Any]
    settings: dict[str, Any]
    client: str = ""
    failure: str = ""
    profile: str = ""
    commit: str = ""
    took_s: float = 0.0


class Run(msgspec.Struct, kw_only=True):
    """``systems`` describes how each was started; ``commit`` is ours.

    ``remarks``, written into the file by hand, say by the name of a workload what its figures do not say themselves.
    """

    profile: str
    machine: dict[str, Any]
    commit: str
    systems: dict[str, str]
    remarks: dict[str, str] = {}
    rows: list[Row] = []


class Journal:
    """One file. Cells that it has are not measured again."""

    def __init__(self, path: Path, fresh: Run) -> None:
        self._path = path
        self.run = msgspec.json.decode(path.read_bytes(), type=Run) if path.exists() else fresh

    def has(self, cell: str, system: str, round_number: int) -> bool:
        """A cell that failed counts as not measured."""
        wanted = (cell, system, round_number)
        return any((row.cell, row.system, row.round) == wanted and not row.failure for row in self.run.rows)

    def add(self, row: Row) -> None:
        """Replaces an earlier failure; durable afterwards."""
        key = (row.cell, row.system, row.round)
        self.run.rows = [old for old in self.run.rows if (old.cell, old.system, old.round) != key] + [row]
        self._save()

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_suffix(".tmp")
        aside.write_bytes(msgspec.json.format(msgspec.json.encode(self.run), indent=1) + b"\n")
        os.replace(aside, self._path)


def read_runs(directory: Path = DIRECTORY) -> dict[str, Run]:
    """All recorded runs by name, oldest name first."""
    return {path.stem: msgspec.json.decode(path.read_bytes(), type=Run) for path in sorted(directory.glob("*.json"))}
