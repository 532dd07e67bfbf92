"""Runs that do not end and faults that cannot be planted are failures; states that were not met get more seeds."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from simulation import runs
from simulation.__main__ import until_all_states_are_met
from simulation.checkers.coverage import STATES
from simulation.mutants.hunt import Mutant, hunt
from simulation.runs import SCENARIOS, Outcome, Run, run_many, run_one
from simulation.world.machine import Machine, Ports, World


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


async def logs_when_it_is_closed(machine: Machine, ports: Ports) -> None:
    try:
        await asyncio.sleep(60)
    except BaseException:
        logging.getLogger("product").exception("closed")


def crash_a_process_that_logs_when_it_is_closed(world: World) -> None:
    machine = Machine(world, "one", logs_when_it_is_closed)
    machine.boot()
    world.loop.run_until_complete(asyncio.sleep(1.0))
    machine.crash()
    world.loop.run_until_complete(asyncio.sleep(1.0))


def test_what_crashed_processes_log_after_the_run_is_ignored(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SCENARIOS, "crash", crash_a_process_that_logs_when_it_is_closed)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    outcome = run_one("crash", 1)
    gc.collect()
    assert outcome.failure == ""
    assert not any("closed" in line for line in outcome.trace)
    assert capfd.readouterr().err == ""


def test_a_fault_that_cannot_be_planted_was_not_noticed() -> None:
    def fails() -> None:
        raise AttributeError("what it changes is gone")

    with pytest.raises(RuntimeError, match="fails cannot be planted"):
        hunt(Mutant(name="fails", scenario="quorum", plant=fails), [1])


def outcome_of(run: Run, *met: str) -> Outcome:
    return Outcome(run, 0.0, 0.0, "", [""], [], Counter(met))


def test_more_seeds_run_until_each_state_is_met() -> None:
    begun: list[int] = []

    def meet_the_last_at_seed_13(work: Sequence[Run]) -> Iterator[Outcome]:
        begun.extend(run.seed for run in work)
        return (outcome_of(run, *STATES[-1:] * (run.seed == 13)) for run in work)

    first = outcome_of(Run("log", 1), *STATES[:-1])
    names = ["log", "quorum"]
    more = until_all_states_are_met([first], names, range(10, 30), meet_the_last_at_seed_13)

    assert begun == [10, 11, 12, 13]
    assert {(outcome.run.scenario, outcome.run.seed) for outcome in more} == {
        ("log", 10),
        ("quorum", 11),
        ("log", 12),
        ("quorum", 13),
    }
    assert until_all_states_are_met([first, *more], names, range(30, 50), meet_the_last_at_seed_13) == []
    assert len(until_all_states_are_met([first], names, range(20, 25), meet_the_last_at_seed_13)) == 5
