"""``python -m simulation``: run scenarios from seeds. Exits 1 if an invariant did not hold, and says how to repeat the run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

from simulation.runs import SCENARIOS, Outcome, Run, broken, run_many
from simulation.shrinking import describe, shrink

BAR: Final = 30


def main() -> int:
    arguments = _arguments()
    names = list(SCENARIOS) if arguments.scenario == "all" else [arguments.scenario]
    if arguments.seed is not None:
        outcomes = _one(names, arguments.seed, arguments.keep)
    else:
        outcomes = _many(names, arguments.first_seed, arguments.seeds, arguments.jobs)
    failed = broken(outcomes)
    if failed and (arguments.shrink or arguments.seed is None):
        _shrink(failed[0], arguments.jobs, arguments.shrink_seconds)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--scenario", choices=["all", *SCENARIOS], default="all")
    parser.add_argument("--seed", type=int, help="run this one and print its trace")
    parser.add_argument("--keep", type=_names, help="with --seed: leave out all decisions but these (NAME,NAME or nothing)")
    parser.add_argument("--shrink", action="store_true", help="with --seed: if it fails, find the fewest decisions that fail")
    parser.add_argument("--shrink-seconds", type=float, default=120.0, help="how long to look; 0: not at all")
    parser.add_argument("--seeds", type=int, default=20, help="how many to run, the scenarios in turns")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once; by default one for each core")
    return parser.parse_args()


def _names(words: str) -> frozenset[str]:
    return frozenset() if words == "nothing" else frozenset(words.split(","))


def _one(names: Sequence[str], seed: int, kept: frozenset[str] | None) -> list[Outcome]:
    outcomes = list(run_many([Run(name, seed, kept) for name in names], 1))
    for outcome in outcomes:
        print(f"seed {seed}, scenario {outcome.run.scenario}")
        print("\n".join(outcome.trace))
    _verdict(outcomes)
    return outcomes


def _many(names: Sequence[str], first_seed: int, seeds: int, jobs: int) -> list[Outcome]:
    print(f"seeds {first_seed}..{first_seed + seeds - 1}, scenarios {', '.join(names)} in turns, {jobs} at once", flush=True)
    work = [Run(names[seed % len(names)], seed) for seed in range(first_seed, first_seed + seeds)]
    started = time.perf_counter()
    outcomes = list(_shown(run_many(work, jobs), len(work)))
    _summary(outcomes, time.perf_counter() - started)
    _verdict(outcomes)
    return outcomes


def _shrink(failed: Outcome, jobs: int, seconds: float) -> None:
    if seconds > 0:
        print(
            f"shrinking scenario {failed.run.scenario}, seed {failed.run.seed}: {len(failed.decisions)} decisions", flush=True
        )
        print(describe(shrink(failed, jobs, seconds, lambda size: print(f"  {size} decisions still fail", flush=True))))


def _shown(outcomes: Iterator[Outcome], expected: int) -> Iterator[Outcome]:
    """A bar on a terminal, a line for each run elsewhere; failures always have their line."""
    is_terminal = sys.stdout.isatty()
    for done, outcome in enumerate(outcomes, 1):
        if outcome.failure or not is_terminal:
            end = outcome.failure or outcome.trace[-1].strip()
            print(f"{outcome.run.scenario:7} seed {outcome.run.seed:<6} {outcome.seconds:5.1f} s  {end}", flush=True)
        if is_terminal:
            bar = "#" * (BAR * done // expected)
            print(f"\r[{bar:{BAR}}] {done}/{expected}", end="\n" if done == expected else "", flush=True)
        yield outcome


def _summary(outcomes: Sequence[Outcome], seconds: float) -> None:
    for name in SCENARIOS:
        times = [outcome.seconds for outcome in outcomes if outcome.run.scenario == name]
        if times:
            print(f"{name:7} {len(times):4} runs, {sum(times) / len(times):.2f} s of a core each, {max(times):.2f} s at most")
    rate = 60 * len(outcomes) / seconds
    alone = 60 * len(outcomes) / (sum(outcome.seconds for outcome in outcomes) or 1.0)
    print(f"{len(outcomes)} runs in {seconds:.0f} s: {rate:.0f} runs/min; {alone:.0f} runs/min of one core's time")


def _verdict(outcomes: Sequence[Outcome]) -> None:
    failed = broken(outcomes)
    for outcome in failed:
        print(f"BROKEN {outcome.failure}")
        print(f"  repeat with: {outcome.run.command()}")
    print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")


if __name__ == "__main__":
    sys.exit(main())
