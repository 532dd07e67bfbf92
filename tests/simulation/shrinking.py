"""Shortens a failing run: leaves out decisions as long as the run still fails in the same way (delta debugging, ddmin).

Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002. Candidates run in parallel, and the first in
order that fails is taken, so that the result does not depend on which process is the fastest. Time is bounded: the result at
the time limit still fails, but may contain unnecessary decisions.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from simulation.runs import Outcome, run_many

KIND_CHARACTERS: Final = 60
LATER_S: Final = 3.0
"""A shorter run may fail this much later, because less happens in it; more would make the trace unreadable."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The shortest failing run that was found."""

    outcome: Outcome
    runs: int
    seconds: float
    is_minimal: bool
    """True if no single decision can be left out; False if the time ran out before that was known."""


def kind_of(failure: str) -> str:
    """Return the failure's kind: failures of one kind differ only in numbers, names of objects and offsets."""
    return re.sub(r"[0-9a-f]{8,}|\d+", "#", failure)[:KIND_CHARACTERS]


def shrink(failed: Outcome, jobs: int, seconds: float, on_progress: Callable[[int], None] = lambda size: None) -> Shrunk:
    """Shorten ``failed``, the outcome of a complete run or of a run that was shortened before."""
    return _Search(failed, jobs, seconds, on_progress).run()


class _Search:
    def __init__(self, failed: Outcome, jobs: int, seconds: float, on_progress: Callable[[int], None]) -> None:
        self._best = failed
        self._kind = kind_of(failed.failure)
        self._jobs = jobs
        self._started = time.monotonic()
        self._seconds = seconds
        self._on_progress = on_progress
        self._until_s = failed.ended_at_s + LATER_S
        self._runs = 0

    def run(self) -> Shrunk:
        chunks = 2
        names = self._names()
        # Quite often the run fails without any fault.
        if names and self._first_failing([()]) is not None:
            names = self._names()
        while names and not self._is_over():
            pieces = _cut(names, chunks)
            if self._first_failing([_without(pieces, index) for index in range(len(pieces))]) is not None:
                names = self._names()
                chunks = max(2, min(chunks - 1, len(names)))
            elif chunks >= len(names):
                return self._result(is_minimal=not self._is_over())
            else:
                chunks = min(2 * chunks, len(names))
        return self._result(is_minimal=not names)

    def _names(self) -> list[str]:
        self._on_progress(len(self._best.decisions))
        return [decision.name for decision in self._best.decisions]

    def _first_failing(self, candidates: Sequence[Sequence[str]]) -> Outcome | None:
        """Run the candidates in batches; keep and return the first outcome that fails in the same way. None: there is none."""
        for start in range(0, len(candidates), self._jobs):
            if self._is_over():
                return None
            batch = candidates[start : start + self._jobs]
            runs = [replace(self._best.run, kept=frozenset(kept), until_s=self._until_s) for kept in batch]
            self._runs += len(runs)
            outcomes = {outcome.run: outcome for outcome in run_many(runs, self._jobs)}
            for run in runs:
                if kind_of(outcomes[run].failure) == self._kind:
                    self._best = outcomes[run]
                    return self._best
        return None

    def _is_over(self) -> bool:
        return time.monotonic() - self._started > self._seconds

    def _result(self, *, is_minimal: bool) -> Shrunk:
        return Shrunk(self._best, self._runs, time.monotonic() - self._started, is_minimal)


def _cut(names: Sequence[str], chunks: int) -> list[Sequence[str]]:
    """Cut ``names`` into ``chunks`` pieces of about the same length, in order."""
    bounds = [len(names) * index // chunks for index in range(chunks + 1)]
    return [names[begin:end] for begin, end in itertools.pairwise(bounds) if end > begin]


def _without(pieces: Sequence[Sequence[str]], index: int) -> list[str]:
    return [name for other, piece in enumerate(pieces) if other != index for name in piece]


def describe(shrunk: Shrunk) -> str:
    """Return the shortened schedule and its trace."""
    outcome = shrunk.outcome
    minimal = "none can be left out" if shrunk.is_minimal else "time was over"
    lines = [
        f"{len(outcome.decisions)} decisions are left after {shrunk.runs} runs in {shrunk.seconds:.0f} s; {minimal}:",
        *(f"  {decision}" for decision in outcome.decisions),
        "trace:",
        *outcome.trace,
        f"repeat with: {outcome.run.command()}",
    ]
    return "\n".join(lines)
