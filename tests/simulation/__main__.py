"""``python -m simulation``: run scenarios from seeds. Exits 1 if an invariant breaks, and prints how to repeat the run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import SystemRandom
from typing import Final

from simulation.checkers import coverage
from simulation.recorded_runs import OtherSeries, RecordedRuns, summary
from simulation.runs import SCENARIOS, Outcome, Run, broken, load_messages, run_many
from simulation.shrinking import describe, shrink
from simulation.simulated_code import code_digest, commit_hash

BAR: Final = 30
FRESH_SEEDS_BELOW: Final = 2**31


def main() -> int:
    arguments = _arguments()
    try:
        outcomes = _several(arguments.run, arguments.jobs) if arguments.run else _of_seeds(arguments)
    except OtherSeries as other:
        print(other, file=sys.stderr)
        return 2
    failed = broken(outcomes)
    if failed and (arguments.shrink or (arguments.seed is None and not arguments.run)):
        _shrink(failed[0], arguments.jobs, arguments.shrink_seconds)
    never_met = coverage.never_met([outcome.met for outcome in outcomes]) if arguments.require_states else []
    for state in never_met:
        print(f"NEVER MET {state}")
    return 1 if failed or never_met else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--scenario", choices=["all", *SCENARIOS], default="all")
    parser.add_argument("--seed", type=int, help="run this one and print its trace")
    parser.add_argument("--run", type=_run, action="append", metavar="SCENARIO:SEED", help="run this; can be repeated")
    parser.add_argument("--keep", type=_names, help="with --seed: leave out all decisions but these (NAME,NAME or nothing)")
    parser.add_argument("--shrink", action="store_true", help="with --seed: if it fails, find the fewest decisions that fail")
    parser.add_argument("--shrink-seconds", type=float, default=120.0, help="how long to look; 0: not at all")
    parser.add_argument("--seeds", type=int, default=20, help="how many to run, the scenarios in turns")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--fresh", type=int, default=0, help="how many more to run, from a seed that is drawn now")
    parser.add_argument("--fresh-seed", type=int, help="with --fresh: the first of them, to run the same again")
    parser.add_argument("--require-states", action="store_true", help="fail if a state of coverage.py is met by no run")
    parser.add_argument("--more", type=int, default=0, help="with --require-states: so many more seeds until each is met")
    parser.add_argument("--progress", type=Path, help="record runs in this directory, and run only what it has not yet")
    parser.add_argument("--result", type=Path, help="write a summary that names the code to this file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once; by default one for each core")
    return parser.parse_args()


def _names(words: str) -> frozenset[str]:
    return frozenset() if words == "nothing" else frozenset(words.split(","))


def _run(words: str) -> Run:
    scenario, _, seed = words.partition(":")
    if scenario not in SCENARIOS:
        raise argparse.ArgumentTypeError(f"no scenario {scenario!r}; there are {', '.join(SCENARIOS)}")
    return Run(scenario, int(seed))


def _of_seeds(arguments: argparse.Namespace) -> list[Outcome]:
    names = list(SCENARIOS) if arguments.scenario == "all" else [arguments.scenario]
    return _many(names, arguments) if arguments.seed is None else _one(names, arguments.seed, arguments.keep)


def _several(runs: Sequence[Run], jobs: int) -> list[Outcome]:
    load_messages()
    outcomes = list(_shown(run_many(runs, jobs), len(runs)))
    _verdict(outcomes)
    return outcomes


def _one(names: Sequence[str], seed: int, kept: frozenset[str] | None) -> list[Outcome]:
    outcomes = list(run_many([Run(name, seed, kept) for name in names], 1))
    for outcome in outcomes:
        print(f"seed {seed}, scenario {outcome.run.scenario}")
        print("\n".join(outcome.trace))
    _verdict(outcomes)
    return outcomes


def _many(names: Sequence[str], arguments: argparse.Namespace) -> list[Outcome]:
    seeds = list(range(arguments.first_seed, arguments.first_seed + arguments.seeds))
    print(f"{len(seeds)} seeds from {arguments.first_seed}, scenarios {', '.join(names)} in turns, {arguments.jobs} at once")
    if arguments.fresh:
        first = arguments.fresh_seed if arguments.fresh_seed is not None else SystemRandom().randrange(FRESH_SEEDS_BELOW)
        print(f"{arguments.fresh} fresh seeds: --fresh {arguments.fresh} --fresh-seed {first} runs the same")
        seeds += range(first, first + arguments.fresh)
    sys.stdout.flush()
    work = [Run(names[seed % len(names)], seed) for seed in seeds]
    recorded = RecordedRuns(arguments.progress, work) if arguments.progress else None
    missing = recorded.missing if recorded else work
    load_messages()
    started = time.perf_counter()
    running = run_many(missing, arguments.jobs)
    outcomes = list(_shown(recorded.record(running) if recorded and missing else running, len(missing)))
    outcomes = recorded.outcomes if recorded else outcomes
    if arguments.require_states:
        further = range(arguments.first_seed + arguments.seeds, arguments.first_seed + arguments.seeds + arguments.more)
        outcomes += until_all_states_are_met(
            outcomes, names, further, lambda runs: _shown(run_many(runs, arguments.jobs), len(runs))
        )
    seconds = time.perf_counter() - started
    print("\n".join(coverage.table((outcome.run.scenario, outcome.met) for outcome in outcomes)))
    _summary(outcomes, len(outcomes) if recorded is None else len(missing), seconds)
    _verdict(outcomes)
    if arguments.result:
        code, commits = (recorded.code, recorded.commits) if recorded else (code_digest(), [commit_hash()])
        arguments.result.write_text("\n".join(summary(outcomes, code, commits)) + "\n")
    return outcomes


def until_all_states_are_met(
    outcomes: Sequence[Outcome], names: Sequence[str], seeds: range, run: Callable[[Sequence[Run]], Iterator[Outcome]]
) -> list[Outcome]:
    """Run further seeds, a turn of all scenarios at a time, while a state was never met; return their outcomes.

    A change of the product shifts what each seed does, so that a rare state may be missing from seeds that had it before.
    """
    found: list[Outcome] = []
    for begin in range(0, len(seeds), len(names)):
        missing = coverage.never_met([outcome.met for outcome in (*outcomes, *found)])
        if not missing:
            break
        turn = seeds[begin : begin + len(names)]
        print(f"not met yet: {', '.join(missing)}; {len(turn)} more seeds from {turn[0]}", flush=True)
        found += run([Run(names[seed % len(names)], seed) for seed in turn])
    return found


def _shrink(failed: Outcome, jobs: int, seconds: float) -> None:
    if seconds > 0:
        if not failed.decisions:  # An earlier process recorded it, without its decisions.
            (failed,) = run_many([failed.run], 1)
        print(
            f"shrinking scenario {failed.run.scenario}, seed {failed.run.seed}: {len(failed.decisions)} decisions", flush=True
        )
        print(describe(shrink(failed, jobs, seconds, lambda size: print(f"  {size} decisions still fail", flush=True))))


def _shown(outcomes: Iterator[Outcome], expected: int) -> Iterator[Outcome]:
    """Yield the outcomes. Show a bar on a terminal, else a line per run; failures always get a line."""
    is_terminal = sys.stdout.isatty()
    for done, outcome in enumerate(outcomes, 1):
        if outcome.failure or not is_terminal:
            end = outcome.failure or outcome.trace[-1].strip()
            print(f"{outcome.run.scenario:7} seed {outcome.run.seed:<6} {outcome.seconds:5.1f} s  {end}", flush=True)
        if is_terminal:
            bar = "#" * (BAR * done // expected)
            print(f"\r[{bar:{BAR}}] {done}/{expected}", end="\n" if done == expected else "", flush=True)
        yield outcome


def _summary(outcomes: Sequence[Outcome], ran: int, seconds: float) -> None:
    for name in SCENARIOS:
        times = [outcome.seconds for outcome in outcomes if outcome.run.scenario == name]
        if times:
            print(f"{name:7} {len(times):4} runs, {sum(times) / len(times):.2f} s of a core each, {max(times):.2f} s at most")
    rate = 60 * ran / (seconds or 1.0)
    alone = 60 * len(outcomes) / (sum(outcome.seconds for outcome in outcomes) or 1.0)
    print(f"{ran} runs in {seconds:.0f} s: {rate:.0f} runs/min; {alone:.0f} runs/min of one core's time")


def _verdict(outcomes: Sequence[Outcome]) -> None:
    failed = broken(outcomes)
    for outcome in failed:
        print(f"BROKEN {outcome.failure}")
        print(f"  repeat with: {outcome.run.command()}")
    print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")


if __name__ == "__main__":
    sys.exit(main())
