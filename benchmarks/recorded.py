"""Condensed runs: the figures behind the published page, without the rest of a run's journal.

A run's journal stays on the machine that measured it. ``recorded/NAME.json`` keeps every row, but only the quantities and
settings that the page reads, with five significant digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import journal
from benchmarks.journal import Row, Run
from benchmarks.summary import SERVER, SHARE
from benchmarks.tables import MEMORY, SHOWN

DIRECTORY = Path(__file__).with_name("recorded")
_PREFIXES = (SERVER, SHARE, MEMORY)
_RATE = "wanted_records_per_s"


def condensed(run: Run) -> Run:
    """Return the run with only what the page reads. Condensing twice changes nothing."""
    return msgspec.structs.replace(run, rows=[_condensed(row) for row in run.rows])


def write(name: str, run: Run, directory: Path = DIRECTORY) -> None:
    """Write the condensed run, one line for each row."""
    directory.mkdir(parents=True, exist_ok=True)
    head, rows = msgspec.json.encode(msgspec.structs.replace(run, rows=[])), condensed(run).rows
    lines = b",\n".join(map(msgspec.json.encode, rows))
    (directory / f"{name}.json").write_bytes(head.removesuffix(b'"rows":[]}') + b'"rows":[\n' + lines + b"\n]}\n")


def read_runs() -> dict[str, Run]:
    """All runs by name, oldest name first: those of the repository, and in full those that were measured here."""
    return dict(sorted((journal.read_runs(DIRECTORY) | journal.read_runs()).items()))


def _condensed(row: Row) -> Row:
    return msgspec.structs.replace(row, measured=_figures(row.measured), settings=_settings(row.settings))


def _figures(measured: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in measured.items() if name in SHOWN or name.startswith(_PREFIXES)}
    return {name: _rounded(value) for name, value in kept.items() if isinstance(value, int | float)}


def _rounded(value: float) -> float:
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() else rounded


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a load at a fixed rate that say for how long the client holds a record back."""
    if not settings.get(_RATE):
        return {}
    payload = {"payload": {"record_bytes": settings["payload"]["record_bytes"]}} if "payload" in settings else {}
    return {name: settings[name] for name in (_RATE, "linger_ms", "batch_bytes") if name in settings} | payload
