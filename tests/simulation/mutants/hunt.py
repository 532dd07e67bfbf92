"""Planted faults: what the simulator is worth. ``python -m simulation.mutants.hunt`` runs each until an invariant breaks.

A mutant changes the product in memory, in a process of its own, and never in its source. One that survives all its seeds is a
hole in the simulator: a missing fault or a missing checker. Known holes are named in ``NOT_NOTICED_YET``, with the reason.

The seed that noticed a mutant last is in ``killing_seeds.json`` and is tried first; ``--record`` writes the file anew. A change
of the product or of a scenario shifts what a seed does: a recorded seed tells how many seeds a mutant needs, not that it is
noticed now. A sample therefore draws only from mutants that needed few seeds, and tries many times as many.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from simulation.mutants import attachments as mutants_of_attachments
from simulation.mutants import bookies as mutants_of_bookies
from simulation.mutants import clusters as mutants_of_clusters
from simulation.mutants import commands as mutants_of_commands
from simulation.mutants import compacted_topics as mutants_of_compacted_topics
from simulation.mutants import compaction as mutants_of_compaction
from simulation.mutants import consumers as mutants_of_consumers
from simulation.mutants import copies as mutants_of_copies
from simulation.mutants import deletions as mutants_of_deletions
from simulation.mutants import groups as mutants_of_groups
from simulation.mutants import handovers as mutants_of_handovers
from simulation.mutants import history as mutants_of_history
from simulation.mutants import metadata as mutants_of_metadata
from simulation.mutants import old_metadata as mutants_of_old_metadata
from simulation.mutants import partition_transactions as mutants_of_partition_transactions
from simulation.mutants import reads as mutants_of_reads
from simulation.mutants import recompression as mutants_of_recompression
from simulation.mutants import replicas as mutants_of_replicas
from simulation.mutants import restores as mutants_of_restores
from simulation.mutants import second_copy as mutants_of_second_copies
from simulation.mutants import tiers as mutants_of_tiers
from simulation.mutants import transactions as mutants_of_transactions
from simulation.runs import Run, load_messages, run_many

SEEDS = 30
NEEDED_MAX: Final = 5
"""A sample draws from the mutants that needed at most so many seeds, counted from seed 1, when they were recorded last."""
SAMPLE_SEEDS: Final = 120
"""How many seeds a sample tries for each mutant before it has survived."""
KILLING_SEEDS: Final = Path(__file__).with_name("killing_seeds.json")
NOT_NOTICED_YET: Final[dict[str, str]] = {}
"""Mutants that usually survive, and why: what the simulator would have to do more often."""
MISFITS = ("AttributeError", "TypeError", "NameError")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """``plant`` changes the product permanently in this process; the mutant runs in ``scenario``."""

    name: str
    scenario: str
    plant: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The result of a hunt: ``seed`` noticed the mutant; ``failure`` is empty if it survived all seeds."""

    seed: int
    failure: str
    seconds: float

    @property
    def counts(self) -> bool:
        """Return whether the failure is a kill: a plant that no longer fits the product fails by itself and proves nothing."""
        return bool(self.failure) and not any(misfit in self.failure for misfit in MISFITS)


def all_mutants() -> list[Mutant]:
    families = (
        ("ledgers", mutants_of_bookies.MUTANTS),
        ("fencing-races", (*mutants_of_bookies.IN_FENCING_RACES, *mutants_of_clusters.IN_FENCING_RACES)),
        ("lost-disks", (*mutants_of_bookies.IN_LOST_DISKS, *mutants_of_copies.IN_LOST_DISKS)),
        ("quorum", mutants_of_metadata.MUTANTS),
        ("raft-scripts", mutants_of_metadata.IN_RAFT_SCRIPTS),
        (
            "ownership-changes",
            (
                *mutants_of_clusters.IN_OWNERSHIP_CHANGES,
                *mutants_of_groups.IN_OWNERSHIP_CHANGES,
                *mutants_of_handovers.IN_OWNERSHIP_CHANGES,
            ),
        ),
        ("everything", (*mutants_of_handovers.IN_EVERYTHING, *mutants_of_deletions.IN_EVERYTHING)),
        (
            "history",
            (*mutants_of_history.IN_HISTORY, *mutants_of_second_copies.IN_HISTORY, *mutants_of_attachments.IN_HISTORY),
        ),
        ("commands", mutants_of_commands.IN_COMMANDS),
        ("restores", mutants_of_restores.IN_RESTORES),
        ("old-metadata", mutants_of_old_metadata.IN_OLD_METADATA),
        ("compaction", mutants_of_compaction.IN_COMPACTION),
        ("compacted-topics", mutants_of_compacted_topics.IN_COMPACTED_TOPICS),
        ("consumers", mutants_of_consumers.IN_CONSUMERS),
        (
            "transactions",
            (
                *mutants_of_transactions.IN_TRANSACTIONS,
                *mutants_of_partition_transactions.IN_TRANSACTIONS,
                *mutants_of_groups.IN_TRANSACTIONS,
                *mutants_of_replicas.IN_TRANSACTIONS,
            ),
        ),
        ("outages", (*mutants_of_tiers.IN_OUTAGES, *mutants_of_recompression.IN_OUTAGES)),
        (
            "log",
            (
                *mutants_of_clusters.MUTANTS,
                *mutants_of_copies.IN_LOG,
                *mutants_of_groups.IN_LOG,
                *mutants_of_reads.IN_LOG,
                *mutants_of_replicas.IN_LOG,
            ),
        ),
    )
    return [Mutant(name=plant.__name__, scenario=scenario, plant=plant) for scenario, plants in families for plant in plants]


def seeds_to_try(recorded: int | None, first: int, count: int) -> Sequence[int]:
    """The seed that noticed the mutant last, if there is one, then ``count`` consecutive ones."""
    return list(dict.fromkeys([*([] if recorded is None else [recorded]), *range(first, first + count)]))


def sample_of(mutants: Iterable[str], recorded: Mapping[str, int], seed: int) -> list[str]:
    """Return the mutants that few seeds notice, in an order drawn from ``seed``."""
    names = sorted(name for name in mutants if name not in NOT_NOTICED_YET and recorded.get(name, math.inf) <= NEEDED_MAX)
    random.Random(seed).shuffle(names)
    return names


def hunt(mutant: Mutant, seeds: Sequence[int]) -> Kill:
    """Run the mutant on ``seeds`` until an invariant breaks. Runs in a child process, which keeps the plants.

    Raises ``RuntimeError`` if the mutant cannot be planted.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    started = time.perf_counter()
    child = context.Process(target=_hunt_here, args=(mutant, seeds, sender))
    child.start()
    sender.close()
    try:
        receiver.recv()
    except EOFError:
        raise RuntimeError(f"{mutant.name} cannot be planted: see standard error") from None
    try:
        seed, failure = receiver.recv()
    except EOFError:
        seed, failure = seeds[0], "the process died"
    child.join()
    return Kill(seed=seed, failure=failure, seconds=time.perf_counter() - started)


def _hunt_here(mutant: Mutant, seeds: Sequence[int], sender: Connection) -> None:
    mutant.plant()
    sender.send(None)
    # Each run in a process of its own: the coroutines that one run leaves behind fail, and log it, while the next one runs.
    for outcome in run_many([Run(mutant.scenario, seed) for seed in seeds], 1):
        if outcome.failure:
            sender.send((outcome.run.seed, outcome.failure))
            return
    sender.send((seeds[-1], ""))


def _spent_s() -> float:
    """Return the processor time of the hunts that ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.mutants.hunt", description=__doc__)
    mutants = {mutant.name: mutant for mutant in all_mutants()}
    parser.add_argument("--mutant", choices=list(mutants), action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--sample", type=int, metavar="SEED", help="some that few seeds notice, in an order drawn from this seed"
    )
    parser.add_argument(
        "--sample-seconds", type=float, default=60.0, help="with --sample: plant no more after this processor time"
    )
    parser.add_argument("--seeds", type=int, help=f"how many to try; {SEEDS}, or {SAMPLE_SEEDS} with --sample")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write the seeds that noticed them to killing_seeds.json")
    arguments = parser.parse_args()
    if arguments.record and arguments.first_seed != 1:
        parser.error("a recorded seed tells how many seeds were needed: --record begins at seed 1")
    recorded: dict[str, int] = json.loads(KILLING_SEEDS.read_text())
    if arguments.sample is None:
        names, seconds_max, count = arguments.mutant or list(mutants), math.inf, arguments.seeds or SEEDS
    else:
        names = sample_of(arguments.mutant or mutants, recorded, arguments.sample)
        seconds_max, count = arguments.sample_seconds, arguments.seeds or SAMPLE_SEEDS
    load_messages()
    kills: dict[str, Kill] = {}
    for name in names:
        if _spent_s() >= seconds_max:
            break
        seeds = seeds_to_try(recorded.get(name), arguments.first_seed, count)
        kills[name] = kill = hunt(mutants[name], seeds)
        if kill.counts and arguments.record:
            recorded[name] = kill.seed
            KILLING_SEEDS.write_text(
                json.dumps({name: recorded[name] for name in sorted(recorded) if name in mutants}, indent=1) + "\n"
            )
        verdict = f"killed by seed {kill.seed}" if kill.counts else f"SURVIVED {len(seeds)} seeds"
        print(f"{mutants[name].scenario:7} {name:44} {verdict:22} {kill.seconds:5.0f} s  {kill.failure[:150]}", flush=True)
    print("\n".join(summary(kills)))
    return 0 if all(kill.counts or name in NOT_NOTICED_YET for name, kill in kills.items()) else 1


def summary(kills: Mapping[str, Kill]) -> list[str]:
    """Return the known holes that were tried, then one line with the counts and the name of every unexpected survivor."""
    known = [name for name in kills if name in NOT_NOTICED_YET]
    survivors = [name for name, kill in kills.items() if not kill.counts and name not in known]
    lines = [f"NOT NOTICED YET {name}: {NOT_NOTICED_YET[name]}" for name in known if not kills[name].counts]
    lines += [f"noticed this time, although it usually is not: {name}" for name in known if kills[name].counts]
    verdict = f"{sum(kill.counts for kill in kills.values())} killed, {len(survivors)} survived"
    return [*lines, f"{verdict}: {', '.join(survivors)}" if survivors else verdict]


if __name__ == "__main__":
    sys.exit(main())
