"""``python -m simulation``: run scenarios from seeds. Exits 1 if an invariant did not hold, and says how to repeat the run."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from simulation import duels, ledgers, quorum
from simulation.log import Scenario
from simulation.loop import CURRENT
from simulation.machine import World
from stratalog_core.errors import StratalogError


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run ended; ``failure`` is empty if all invariants held."""

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


def run_duels(seed: int) -> World:
    scenario = duels.Scenario(seed)
    _run(scenario.world, scenario.simulate)
    return scenario.world


SCENARIOS: dict[str, Callable[[int], World]] = {
    "quorum": run_quorum,
    "ledgers": run_ledgers,
    "duels": run_duels,
    "log": run_log,
}


class _TraceLog(logging.Handler):
    """What the code under test logs belongs into the trace, at its simulated time."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = CURRENT.get()
        name = process.name if process else "-"
        self._world.note(f"  {name}: {record.levelname} {record.name}: {record.getMessage()}")


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
        world.loop.look_after_tasks()
        world.loop.look_after_tasks()
        if world.loop.failure is not None:
            _break(world, world.loop.failure)
    except RuntimeError:
        # The loop was stopped in the middle: something failed where nobody waits for it.
        if world.loop.failure is None:
            raise
        _break(world, world.loop.failure)
    except (AssertionError, TimeoutError, StratalogError) as broken:
        _break(world, broken)
    finally:
        log.removeHandler(handler)
        world.loop.finish()
        gc.enable()


def _break(world: World, broken: Exception) -> None:
    world.note(f"INVARIANT BROKEN: {broken!r}")
    world.failure = f"{type(broken).__name__}: {broken}"


def run_one(scenario: str, seed: int) -> Outcome:
    started = time.perf_counter()
    world = SCENARIOS[scenario](seed)
    return Outcome(scenario, seed, time.perf_counter() - started, world.failure, world.trace)


def main() -> int:
    arguments = _arguments()
    names = list(SCENARIOS) if arguments.scenario == "all" else [arguments.scenario]
    if arguments.seed is not None:
        return _one(names, arguments.seed)
    return _many(names, arguments.first_seed, arguments.seeds, arguments.jobs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--scenario", choices=["all", *SCENARIOS], default="all")
    parser.add_argument("--seed", type=int, help="run this one and print its trace")
    parser.add_argument("--seeds", type=int, default=20, help="how many to run")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    return parser.parse_args()


def _one(names: list[str], seed: int) -> int:
    outcomes = [run_one(name, seed) for name in names]
    for outcome in outcomes:
        print(f"seed {seed}, scenario {outcome.scenario}")
        print("\n".join(outcome.trace))
    return _verdict(outcomes)


def _many(names: list[str], first_seed: int, seeds: int, jobs: int) -> int:
    print(f"seeds {first_seed}..{first_seed + seeds - 1}, scenarios {', '.join(names)}", flush=True)
    work = [(name, seed) for seed in range(first_seed, first_seed + seeds) for name in names]
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(jobs) as pool:
        for outcome in pool.map(run_one, *zip(*work, strict=True)):
            outcomes.append(outcome)
            end = outcome.failure or outcome.trace[-1].strip()
            print(f"{outcome.scenario:7} seed {outcome.seed:<6} {outcome.seconds:5.1f} s  {end}", flush=True)
    return _verdict(outcomes)


def _verdict(outcomes: list[Outcome]) -> int:
    broken = [outcome for outcome in outcomes if outcome.failure]
    for outcome in broken:
        print(f"BROKEN {outcome.failure}")
        print(f"  repeat with: make sim SCENARIO={outcome.scenario} SEED={outcome.seed}")
    print(f"{len(outcomes) - len(broken)} passed, {len(broken)} failed")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
