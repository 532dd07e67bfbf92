"""Outcomes of many runs in a file, one JSON line each, so that a long series can be interrupted and resumed.

The first line identifies the series: scenarios, seeds and the commit. The file of another series is refused.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from simulation.checkers import coverage
from simulation.runs import Outcome, Run


class OtherSeries(Exception):
    """The progress file belongs to other seeds, scenarios or another commit."""


def commit_hash() -> str:
    """Return the commit of the working tree; ``-dirty`` is appended if it differs from its commit."""
    directory = Path(__file__).parent
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout.strip()


class RecordedRuns:
    """The outcomes of a series. ``work`` is the whole series; ``path`` is its progress file."""

    def __init__(self, path: Path, work: Sequence[Run]) -> None:
        self._path = path
        self.commit = commit_hash()
        self._series = {
            "commit": self.commit,
            "scenarios": sorted({run.scenario for run in work}),
            "seeds": [min(run.seed for run in work), max(run.seed for run in work)],
            "runs": len(work),
        }
        self.outcomes: list[Outcome] = list(self._read())
        known = {(outcome.run.scenario, outcome.run.seed) for outcome in self.outcomes}
        self.missing = [run for run in work if (run.scenario, run.seed) not in known]

    def _read(self) -> Iterator[Outcome]:
        if not self._path.exists():
            self._path.write_text(json.dumps(self._series) + "\n")
            return
        series, *lines = self._path.read_text().splitlines()
        if json.loads(series) != self._series:
            raise OtherSeries(
                f"{self._path} records {series}; this is {json.dumps(self._series)}: remove the file to begin anew"
            )
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # Truncated when an earlier process was killed.
                yield _outcome(json.loads(line))

    def record(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """Write each outcome to the file, then yield it."""
        with self._path.open("a") as file:
            if not self._path.read_bytes().endswith(b"\n"):
                file.write("\n")
            for outcome in outcomes:
                file.write(json.dumps(_row(outcome)) + "\n")
                file.flush()
                self.outcomes.append(outcome)
                yield outcome


def summary(outcomes: Sequence[Outcome], commit: str) -> list[str]:
    """Return a Markdown summary: commit, runs, failures with commands to repeat them, and the states that were met."""
    failed = [outcome for outcome in outcomes if outcome.failure]
    seeds = [outcome.run.seed for outcome in outcomes]
    counts = Counter(outcome.run.scenario for outcome in outcomes)
    rows = [f"| `{name}` | {runs} | {sum(each.run.scenario == name for each in failed)} |" for name, runs in counts.items()]
    return [
        f"Commit `{commit}`: {len(outcomes)} runs, seeds {min(seeds)} to {max(seeds)}, {len(failed)} failed,"
        f" {sum(outcome.seconds for outcome in outcomes) / 3600:.1f} hours of a core.",
        "",
        *(f"- {outcome.failure} (`{outcome.run.command()}`)" for outcome in failed),
        *([""] if failed else []),
        "| scenario | runs | failed |",
        "| --- | --- | --- |",
        *rows,
        "",
        *coverage.table((outcome.run.scenario, outcome.met) for outcome in outcomes),
    ]


def _row(outcome: Outcome) -> dict[str, Any]:
    return {
        "scenario": outcome.run.scenario,
        "seed": outcome.run.seed,
        "seconds": round(outcome.seconds, 3),
        "ended_at_s": outcome.ended_at_s,
        "failure": outcome.failure,
        "met": outcome.met,
    }


def _outcome(row: dict[str, Any]) -> Outcome:
    """Return the outcome of a row, without trace and decisions, which are not recorded."""
    run = Run(row["scenario"], row["seed"])
    return Outcome(run, row["seconds"], row["ended_at_s"], row["failure"], [""], [], Counter(row["met"]))
