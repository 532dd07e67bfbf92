"""Outcomes of many runs in a directory, so that a long series can be interrupted, resumed and shared among processes.

Each process writes a file of its own, one JSON line for each run; all files of the directory are read. A file's first line
names the code that ran (``simulated_code.py``). A directory with runs of other code is refused.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from simulation.checkers import coverage
from simulation.runs import Outcome, Run
from simulation.simulated_code import code_digest, commit_hash, file_stamps


class OtherSeries(Exception):
    """The runs in the directory are those of other code, or the code changed while runs were recorded."""


class RecordedRuns:
    """The outcomes of a series. ``work`` is the whole series; ``directory`` holds what any process has run of it."""

    def __init__(self, directory: Path, work: Sequence[Run]) -> None:
        self._directory = directory
        self._stamps = file_stamps()
        self.code = code_digest()
        self._commit = commit_hash()
        self.commits: set[str] = set()
        """The commits on which the recorded runs ran: each has the same simulated code."""
        found: dict[Run, Outcome] = {}
        for outcome in self._read(set(work)):
            if outcome.run not in found or outcome.failure:
                found[outcome.run] = outcome
        self.outcomes = list(found.values())
        self.missing = [run for run in work if run not in found]

    def _read(self, work: set[Run]) -> Iterator[Outcome]:
        if self._directory.is_file():
            raise OtherSeries(f"{self._directory} is a file; runs are recorded in a directory")
        for path in sorted(self._directory.glob("*.jsonl")):
            first, *lines = path.read_text().splitlines() or [""]
            if not first:  # Another process is about to write it.
                continue
            series = json.loads(first)
            if series.get("code") != self.code:
                raise OtherSeries(
                    f"{path} records runs of the code {series.get('code')}; this is {self.code}:"
                    " name another directory, or remove the file to begin anew"
                )
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError):  # Truncated when its process was killed.
                    outcome = _outcome(json.loads(line))
                    if outcome.run in work:
                        self.commits.add(series["commit"])
                        yield outcome

    def record(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """Write each outcome to a new file, then yield it. Raise ``OtherSeries`` if the code has changed meanwhile."""
        with self._create() as file:
            _write_line(file, {"code": self.code, "commit": self._commit, "python": platform.python_version()})
            for outcome in outcomes:
                if file_stamps() != self._stamps:
                    raise OtherSeries(
                        f"files of the simulated code changed while it ran: {outcome.run.command()} does not count"
                    )
                _write_line(file, _row(outcome))
                self.commits.add(self._commit)
                self.outcomes.append(outcome)
                yield outcome

    def _create(self) -> TextIO:
        """Open a file that no other process writes."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            with contextlib.suppress(FileExistsError):
                return (self._directory / f"runs-{number:03}.jsonl").open("x")
        raise AssertionError("numbers have no end")


def _write_line(file: TextIO, value: dict[str, Any]) -> None:
    file.write(json.dumps(value) + "\n")
    file.flush()


def summary(outcomes: Sequence[Outcome], code: str, commits: Iterable[str]) -> list[str]:
    """Return a Markdown summary: code, runs, failures with commands to repeat them, and the states that were met."""
    failed = [outcome for outcome in outcomes if outcome.failure]
    seeds = [outcome.run.seed for outcome in outcomes]
    counts = Counter(outcome.run.scenario for outcome in outcomes)
    rows = [
        f"| `{name}` | {runs} | {sum(each.run.scenario == name for each in failed)} |" for name, runs in sorted(counts.items())
    ]
    named = ", ".join(f"`{commit}`" for commit in sorted(commits))
    return [
        f"{len(outcomes)} runs, seeds {min(seeds)} to {max(seeds)}, {len(failed)} failed,"
        f" {sum(outcome.seconds for outcome in outcomes) / 3600:.1f} hours of a core.",
        "",
        f"Simulated code `{code}`, Python {platform.python_version()}, commits {named}.",
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
