"""Runs that do not end by themselves, and faults that cannot be planted, are failures."""

from __future__ import annotations

import signal

import pytest

from simulation import runs
from simulation.mutants.hunt import Mutant, hunt
from simulation.runs import Run, run_many


def spins(run: Run) -> None:
    while True:
        pass


def test_a_run_that_loops_without_yielding_ends_with_its_stack(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "RUN_CPU_S", 1)
    monkeypatch.setattr(runs, "_outcome", spins)
    (outcome,) = run_many([Run("quorum", 1)], 1)
    assert f"ended with {-signal.SIGXCPU}" in outcome.failure
    assert "in spins" in capfd.readouterr().err


def test_a_fault_that_cannot_be_planted_was_not_noticed() -> None:
    def fails() -> None:
        raise AttributeError("what it changes is gone")

    with pytest.raises(RuntimeError, match="fails cannot be planted"):
        hunt(Mutant(name="fails", scenario="quorum", plant=fails), [1])
