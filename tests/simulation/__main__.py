"""``python -m simulation``: run scenarios from seeds. Exits 1 if an invariant did not hold, and says how to repeat the run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

from simulation.runs import SCENARIOS, Outcome, broken, run_many, run_one

BAR: Final = 30


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
    parser.add_argument("--seeds", type=int, default=20, help="how many to run, the scenarios in turns")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once; by default one for each core")
    return parser.parse_args()


def _one(names: list[str], seed: int) -> int:
    outcomes = [run_one(name, seed) for name in names]
    for outcome in outcomes:
        print(f"seed {seed}, scenario {outcome.scenario}")
        print("\n".join(outcome.trace))
    return _verdict(outcomes)


def _many(names: list[str], first_seed: int, seeds: int, jobs: int) -> int:
    print(f"seeds {first_seed}..{first_seed + seeds - 1}, scenarios {', '.join(names)} in turns, {jobs} at once", flush=True)
    work = [(names[seed % len(names)], seed) for seed in range(first_seed, first_seed + seeds)]
    started = time.perf_counter()
    outcomes = list(_shown(run_many(work, jobs), len(work)))
    _summary(outcomes, time.perf_counter() - started)
    return _verdict(outcomes)


def _shown(outcomes: Iterator[Outcome], expected: int) -> Iterator[Outcome]:
    """A bar on a terminal, a line for each run elsewhere; failures always have their line."""
    is_terminal = sys.stdout.isatty()
    for done, outcome in enumerate(outcomes, 1):
        if outcome.failure or not is_terminal:
            end = outcome.failure or outcome.trace[-1].strip()
            print(f"{outcome.scenario:7} seed {outcome.seed:<6} {outcome.seconds:5.1f} s  {end}", flush=True)
        if is_terminal:
            bar = "#" * (BAR * done // expected)
            print(f"\r[{bar:{BAR}}] {done}/{expected}", end="\n" if done == expected else "", flush=True)
        yield outcome


def _summary(outcomes: Sequence[Outcome], seconds: float) -> None:
    for name in SCENARIOS:
        times = [outcome.seconds for outcome in outcomes if outcome.scenario == name]
        if times:
            print(f"{name:7} {len(times):4} runs, {sum(times) / len(times):.2f} s of a core each, {max(times):.2f} s at most")
    rate = 60 * len(outcomes) / seconds
    alone = 60 * len(outcomes) / (sum(outcome.seconds for outcome in outcomes) or 1.0)
    print(f"{len(outcomes)} runs in {seconds:.0f} s: {rate:.0f} runs/min; {alone:.0f} runs/min of one core's time")


def _verdict(outcomes: Sequence[Outcome]) -> int:
    failed = broken(outcomes)
    for outcome in failed:
        print(f"BROKEN {outcome.failure}")
        print(f"  repeat with: make sim SCENARIO={outcome.scenario} SEED={outcome.seed}")
    print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
