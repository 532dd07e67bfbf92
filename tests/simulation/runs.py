"""One run of a scenario from a seed, and many of them in processes of their own.

Each run is a fork of this process: what one run leaves behind (garbage, caches, planted faults) cannot reach another, and
nothing is ever collected. So a run depends on its scenario, its seed and its schedule alone.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from typing import Final

from simulation import ledgers, quorum
from simulation.log import Scenario
from simulation.loop import CURRENT, FailedInBackground
from simulation.machine import World
from stratalog_core.errors import StratalogError

_CONTEXT: Final = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run ended; ``seconds`` are the processor's, ``failure`` is empty if all invariants held."""

    scenario: str
    seed: int
    seconds: float
    failure: str
    trace: list[str]


def run_log(seed: int) -> World:
    scenario = Scenario(seed)
    _run(scenario.world, scenario.simulate)
    return scenario.world


def run_ledgers(seed: int) -> World:
    scenario = ledgers.Scenario(seed)
    _run(scenario.world, scenario.simulate)
    return scenario.world


def run_quorum(seed: int) -> World:
    world = World(seed)
    _run(world, lambda: quorum.simulate(world))
    return world


SCENARIOS: dict[str, Callable[[int], World]] = {"quorum": run_quorum, "ledgers": run_ledgers, "log": run_log}


class _TraceLog(logging.Handler):
    """What the code under test logs belongs into the trace, at its simulated time.

    A logged exception that is none of the product's own is a mistake in the code, caught by an outermost loop: the run fails.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = CURRENT.get()
        name = process.name if process else "-"
        self._world.note(f"  {name}: {record.levelname} {record.name}: {record.getMessage()}")
        failure = record.exc_info[1] if record.exc_info else None
        if failure is not None and not isinstance(failure, (StratalogError, OSError)):
            self._world.loop.fail(FailedInBackground(f"{name} logged {failure!r}: {record.getMessage()}"), failure)


def _run(world: World, simulate: Callable[[], object]) -> None:
    # Tasks of crashed processes complain while they are collected; that says nothing about the code under test.
    sys.unraisablehook = lambda unraisable: None
    log = logging.getLogger()
    handler = _TraceLog(world)
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    # A collection would take a third of the time, and finalizers would run at moments that no seed decides.
    gc.disable()
    try:
        simulate()
        world.loop.take_leave()
    except (AssertionError, TimeoutError, StratalogError) as broken:
        _break(world, broken)
    except RuntimeError:
        # The loop was stopped in the middle: something failed where nobody waits for it.
        if world.loop.failure is None:
            raise
    finally:
        log.removeHandler(handler)
        world.loop.finish()
        gc.enable()
    if world.loop.failure is not None and not world.failure:
        _break(world, world.loop.failure)


def _break(world: World, broken: Exception) -> None:
    world.note(f"INVARIANT BROKEN: {broken!r}")
    world.failure = f"{type(broken).__name__}: {broken}"


def run_one(scenario: str, seed: int) -> Outcome:
    """In this process."""
    started = time.process_time()
    world = SCENARIOS[scenario](seed)
    return Outcome(scenario, seed, time.process_time() - started, world.failure, world.trace)


def run_many(work: Iterable[tuple[str, int]], jobs: int) -> Iterator[Outcome]:
    """Each run in a process of its own, ``jobs`` at once; outcomes in the order in which they come."""
    waiting = iter(work)
    running: dict[connection.Connection, tuple[ForkProcess, str, int]] = {}
    gc.collect()
    gc.freeze()
    try:
        while True:
            while len(running) < jobs and (next_one := next(waiting, None)) is not None:
                receiver, process = _fork(*next_one)
                running[receiver] = process, *next_one
            if not running:
                return
            for ready in connection.wait(list(running)):
                assert isinstance(ready, connection.Connection)
                process, scenario, seed = running.pop(ready)
                yield _take(ready, process, scenario, seed)
    finally:
        for process, _, _ in running.values():
            process.kill()


def _fork(scenario: str, seed: int) -> tuple[connection.Connection, ForkProcess]:
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_run_here, args=(scenario, seed, sender))
    process.start()
    sender.close()
    return receiver, process


def _run_here(scenario: str, seed: int, sender: connection.Connection) -> None:
    sender.send(run_one(scenario, seed))
    sender.close()


def _take(receiver: connection.Connection, process: ForkProcess, scenario: str, seed: int) -> Outcome:
    try:
        outcome: Outcome = receiver.recv()
    except EOFError:
        process.join()
        outcome = Outcome(scenario, seed, 0.0, f"the process ended with {process.exitcode}, see its standard error", [""])
    receiver.close()
    process.join()
    return outcome


def broken(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.failure]
