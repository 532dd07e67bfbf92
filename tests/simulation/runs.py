"""Runs a scenario from a seed, alone or many in separate processes.

Each run is a fork of this process: its garbage, caches and planted faults cannot affect another run, and nothing is ever
collected. So a run depends only on its scenario, its seed and its schedule.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from typing import Final

from support.compaction_kernels import load_kernels

from simulation.checkers.observers import observe_calls
from simulation.clients import consumer_protocol, kafka
from simulation.clients import transactions as client_transactions
from simulation.scenarios import (
    commands,
    compacted_topics,
    compaction,
    consumers,
    everything,
    fencing_races,
    history,
    leader_churn,
    ledgers,
    log,
    lost_disks,
    old_metadata,
    outages,
    ownership_changes,
    quorum,
    raft_scripts,
    restores,
    transactions,
)
from simulation.simulated_code import not_counted
from simulation.world.loop import CURRENT, FailedInBackground
from simulation.world.machine import World
from simulation.world.schedule import Decision, Schedule
from stratalog_core.errors import StratalogError
from stratalog_core.restarting import restarting

_CONTEXT: Final = multiprocessing.get_context("fork")
COMPACTING: Final = ("commands", "compaction", "compacted-topics")
RUN_CPU_S: Final = 300
"""More processor time than any run takes."""


@dataclass(frozen=True, slots=True)
class Run:
    """The parameters of a run. With ``kept``, only the decisions that it names are carried out (see ``schedule.py``)."""

    scenario: str
    seed: int
    kept: frozenset[str] | None = None
    until_s: float | None = None
    """Simulated time at which the run is given up, which is a failure."""

    def command(self) -> str:
        """Return the command that repeats the run."""
        if self.kept is None:
            return f"make sim SCENARIO={self.scenario} SEED={self.seed}"
        kept = ",".join(sorted(self.kept)) or "nothing"
        return f"make sim SCENARIO={self.scenario} SEED={self.seed} KEEP={kept}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run. ``seconds`` is processor time; ``failure`` is empty if all invariants held."""

    run: Run
    seconds: float
    ended_at_s: float
    failure: str
    trace: list[str]
    decisions: list[Decision]
    met: Counter[str]
    """The number of times that the run met each state of ``coverage.py``."""


SCENARIOS: dict[str, Callable[[World], None]] = {
    "quorum": quorum.simulate,
    "leader-churn": leader_churn.simulate,
    "raft-scripts": raft_scripts.simulate,
    "ledgers": lambda world: ledgers.Scenario(world).simulate(),
    "fencing-races": lambda world: fencing_races.Scenario(world).simulate(),
    "lost-disks": lambda world: lost_disks.Scenario(world).simulate(),
    "history": lambda world: history.Scenario(world).simulate(),
    "ownership-changes": lambda world: ownership_changes.Scenario(world).simulate(),
    "log": lambda world: log.Scenario(world).simulate(),
    "outages": lambda world: outages.Scenario(world).simulate(),
    "commands": lambda world: commands.Scenario(world).simulate(),
    "restores": lambda world: restores.Scenario(world).simulate(),
    "compaction": lambda world: compaction.Scenario(world).simulate(),
    "compacted-topics": lambda world: compacted_topics.Scenario(world).simulate(),
    "transactions": lambda world: transactions.Scenario(world).simulate(),
    "everything": lambda world: everything.Scenario(world).simulate(),
    "consumers": lambda world: consumers.Scenario(world).simulate(),
    "old-metadata": lambda world: old_metadata.Scenario(world).simulate(),
}


class _TraceLog(logging.Handler):
    """Adds log records of the code under test to the trace, at their simulated time.

    A logged exception that is not one of the product's own is a bug that an outermost loop caught: the run fails. So is any
    exception that ends a background loop.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = CURRENT.get()
        name = process.name if process else "-"
        self._world.note(f"  {name}: {record.levelname} {record.name}: {record.getMessage()}")
        failure = record.exc_info[1] if record.exc_info else None
        is_expected = isinstance(failure, (StratalogError, OSError)) and record.name != restarting.__module__
        if failure is not None and not is_expected:
            self._world.loop.fail(FailedInBackground(f"{name} logged {failure!r}: {record.getMessage()}"), failure)


def _run(world: World, run: Run) -> None:
    # Tasks of crashed processes complain while they are collected; that says nothing about the code under test.
    sys.unraisablehook = lambda unraisable: None
    root = logging.getLogger()
    handler = _TraceLog(world)
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    # A collection would take a third of the time, and finalizers would run at moments that the seed does not determine.
    gc.disable()
    try:
        SCENARIOS[run.scenario](world)
        world.loop.check_at_end()
        if run.kept is None:
            world.coverage.require_progress(run.scenario)
    except (AssertionError, TimeoutError, StratalogError) as broken:
        _break(world, broken)
    except RuntimeError:
        # The loop was stopped early: something failed with no caller to receive it.
        if world.loop.failure is None:
            raise
    finally:
        # Tasks of crashed processes are closed from here on. Their `finally` and `except` blocks run, and may log.
        root.handlers[:] = [logging.NullHandler()]
        world.loop.finish()
        gc.enable()
    if world.loop.failure is not None and not world.failure:
        _break(world, world.loop.failure)


def _break(world: World, broken: Exception) -> None:
    world.note(f"INVARIANT BROKEN: {broken!r}")
    if broken.__cause__ is not None:
        world.trace.extend("".join(traceback.format_exception(broken.__cause__)).splitlines())
    world.failure = f"{type(broken).__name__}: {broken}"


def load_messages() -> None:
    """Load Kafka's messages before many runs, which each would otherwise load them: a fork inherits them."""
    for versions in (kafka.VERSIONS, kafka.BY_TOPIC_ID, consumer_protocol.MEMBER_VERSIONS, client_transactions.VERSIONS_2):
        kafka.load_versions(versions)


def run_one(scenario: str, seed: int, kept: frozenset[str] | None = None) -> Outcome:
    """Run a scenario in this process."""
    return _outcome(Run(scenario, seed, kept))


def _outcome(run: Run) -> Outcome:
    started = time.process_time()
    world = World(run.seed, Schedule(kept=run.kept))
    if run.until_s is not None:
        world.loop.call_at(run.until_s, world.loop.fail, TimeoutError(f"given up after {run.until_s:g} simulated seconds"))
    with observe_calls(world.coverage, world.changes):
        _run(world, run)
    seconds = time.process_time() - started
    return Outcome(
        run, seconds, world.loop.time(), world.failure, world.trace, list(world.schedule.decisions.values()), world.coverage.met
    )


def run_many(runs: Iterable[Run], jobs: int) -> Iterator[Outcome]:
    """Run each in its own process, ``jobs`` at once; yield outcomes as they complete."""
    waiting = iter(runs)
    running: dict[connection.Connection, tuple[ForkProcess, Run]] = {}
    gc.collect()
    gc.freeze()
    try:
        while True:
            while len(running) < jobs and (run := next(waiting, None)) is not None:
                receiver, process = _fork(run)
                running[receiver] = process, run
            if not running:
                return
            for ready in connection.wait(list(running)):
                assert isinstance(ready, connection.Connection)
                yield _take(ready, *running.pop(ready))
    finally:
        for process, _ in running.values():
            process.kill()


@cache
def _load_kernels() -> None:
    """Load the compiled code of compaction here, so that no run does it, nor collects what it leaves."""
    load_kernels()
    gc.collect()
    gc.freeze()


def _fork(run: Run) -> tuple[connection.Connection, ForkProcess]:
    if run.scenario in COMPACTING:
        _load_kernels()
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_run_here, args=(run, sender))
    process.start()
    sender.close()
    return receiver, process


def end_after_cpu_s(seconds: int) -> None:
    """End this process after so much processor time, its stack on standard error: a coroutine may loop without yielding."""
    faulthandler.register(signal.SIGXCPU, chain=True)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 10))


def _run_here(run: Run, sender: connection.Connection) -> None:
    end_after_cpu_s(RUN_CPU_S)
    loaded = set(sys.modules)
    outcome = _outcome(run)
    uncounted = not_counted({name: module for name, module in sys.modules.items() if name not in loaded})
    if uncounted and not outcome.failure:
        outcome = replace(outcome, failure=f"imported {', '.join(uncounted)}: add them to simulated_code.py")
    sender.send(outcome)
    sender.close()


def _take(receiver: connection.Connection, process: ForkProcess, run: Run) -> Outcome:
    try:
        outcome: Outcome = receiver.recv()
    except EOFError:
        process.join()
        outcome = Outcome(
            run, 0.0, 0.0, f"the process ended with {process.exitcode}, see its standard error", [""], [], Counter()
        )
    receiver.close()
    process.join()
    return outcome


def broken(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.failure]
