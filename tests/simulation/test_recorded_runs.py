"""An interrupted series of runs resumes where it stopped, on the same code only, and its summary names that code."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from simulation import recorded_runs
from simulation.recorded_runs import OtherSeries, RecordedRuns, summary
from simulation.runs import Outcome, Run

WORK = [Run("quorum", 1), Run("log", 2), Run("quorum", 3)]


def outcome(run: Run, failure: str = "") -> Outcome:
    return Outcome(run, 1.5, 20.0, failure, ["trace"], [], Counter({"fetch from bookies": 3}))


def test_what_is_recorded_is_not_run_again(tmp_path: Path) -> None:
    first = RecordedRuns(tmp_path, WORK)
    passed = list(first.record([outcome(WORK[0]), outcome(WORK[1], "AssertionError: lost")]))
    assert passed == first.outcomes

    second = RecordedRuns(tmp_path, WORK)

    assert second.missing == [WORK[2]]
    assert [(each.run, each.failure, each.met) for each in second.outcomes] == [
        (each.run, each.failure, each.met) for each in passed
    ]


def test_a_line_that_was_cut_short_is_run_again(tmp_path: Path) -> None:
    list(RecordedRuns(tmp_path, WORK).record([outcome(WORK[0]), outcome(WORK[1])]))
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:-9])

    again = RecordedRuns(tmp_path, WORK)
    list(again.record([outcome(WORK[1])]))

    assert again.missing == [WORK[1], WORK[2]]
    assert RecordedRuns(tmp_path, WORK).missing == [WORK[2]]


def test_processes_that_run_at_once_write_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "runs-001.jsonl").touch()  # One that has only just begun.
    one, other = RecordedRuns(tmp_path, WORK[:2]), RecordedRuns(tmp_path, WORK[1:])
    first, second = one.record(map(outcome, WORK[:2])), other.record(map(outcome, WORK[1:]))
    for each in (first, second, first, second):
        next(each)

    both = RecordedRuns(tmp_path, WORK)

    assert both.missing == []
    assert sorted(each.run.seed for each in both.outcomes) == [1, 2, 3]


def test_a_failure_is_kept_if_another_process_had_none(tmp_path: Path) -> None:
    for failure in ("", "AssertionError: lost", ""):
        list(RecordedRuns(tmp_path, []).record([outcome(WORK[0], failure)]))

    assert [each.failure for each in RecordedRuns(tmp_path, WORK).outcomes] == ["AssertionError: lost"]


def test_runs_of_other_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list(RecordedRuns(tmp_path, WORK).record([outcome(WORK[0])]))
    monkeypatch.setattr(recorded_runs, "commit_hash", lambda: "another commit with the same code")
    assert RecordedRuns(tmp_path, WORK).missing == WORK[1:]

    monkeypatch.setattr(recorded_runs, "code_digest", lambda: "other code")

    with pytest.raises(OtherSeries, match="name another directory"):
        RecordedRuns(tmp_path, WORK)


def test_a_run_does_not_count_if_the_code_changed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedRuns(tmp_path, WORK)
    running = recorded.record(map(outcome, WORK))
    next(running)
    monkeypatch.setattr(recorded_runs, "file_stamps", lambda: [("a file", 1, 2)])

    with pytest.raises(OtherSeries, match="changed while it ran"):
        next(running)

    monkeypatch.undo()
    assert RecordedRuns(tmp_path, WORK).missing == WORK[1:]


def test_a_file_as_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "progress").write_text("{}\n")

    with pytest.raises(OtherSeries, match="in a directory"):
        RecordedRuns(tmp_path / "progress", WORK)


def test_the_summary_names_code_commits_failures_and_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_runs, "code_digest", lambda: "abc123")
    for commit, run in zip(("def456", "789abc"), WORK, strict=False):
        monkeypatch.setattr(recorded_runs, "commit_hash", lambda commit=commit: commit)
        list(RecordedRuns(tmp_path, WORK).record([outcome(run, "AssertionError: lost" * (run.seed == 2))]))

    recorded = RecordedRuns(tmp_path, WORK)
    text = "\n".join(summary(recorded.outcomes, recorded.code, recorded.commits))

    assert "2 runs, seeds 1 to 2, 1 failed" in text
    assert "Simulated code `abc123`" in text
    assert "commits `789abc`, `def456`." in text
    assert "AssertionError: lost (`make sim SCENARIO=log SEED=2`)" in text
    assert "| fetch from bookies | 2 of 2 | 6 | `log`, `quorum` |" in text
