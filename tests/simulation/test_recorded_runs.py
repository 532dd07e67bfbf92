"""An interrupted series of runs resumes where it stopped, and its summary names the commit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from simulation.recorded_runs import OtherSeries, RecordedRuns, summary
from simulation.runs import Outcome, Run

WORK = [Run("quorum", 1), Run("log", 2), Run("quorum", 3)]


def outcome(run: Run, failure: str = "") -> Outcome:
    return Outcome(run, 1.5, 20.0, failure, ["trace"], [], Counter({"fetch from bookies": 3}))


def test_what_is_recorded_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    first = RecordedRuns(path, WORK)
    passed = list(first.record([outcome(WORK[0]), outcome(WORK[1], "AssertionError: lost")]))
    assert passed == first.outcomes

    second = RecordedRuns(path, WORK)

    assert second.missing == [WORK[2]]
    assert [(each.run, each.failure, each.met) for each in second.outcomes] == [
        (each.run, each.failure, each.met) for each in passed
    ]


def test_a_line_that_was_cut_short_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    list(RecordedRuns(path, WORK).record([outcome(WORK[0]), outcome(WORK[1])]))
    path.write_text(path.read_text()[:-9])

    again = RecordedRuns(path, WORK)
    list(again.record([outcome(WORK[1])]))

    assert again.missing == [WORK[1], WORK[2]]
    assert RecordedRuns(path, WORK).missing == [WORK[2]]


def test_another_series_is_refused(tmp_path: Path) -> None:
    RecordedRuns(tmp_path / "progress", WORK)

    with pytest.raises(OtherSeries, match="remove the file"):
        RecordedRuns(tmp_path / "progress", WORK[:2])


def test_the_summary_names_commit_failures_and_states() -> None:
    text = "\n".join(summary([outcome(WORK[0]), outcome(WORK[1], "AssertionError: lost")], "abc123"))

    assert "`abc123`: 2 runs, seeds 1 to 2, 1 failed" in text
    assert "AssertionError: lost (`make sim SCENARIO=log SEED=2`)" in text
    assert "| fetch from bookies | 2 of 2 | 6 | `log`, `quorum` |" in text
