"""Runs fixed seeds, fresh seeds and some of those that once found a bug, and checks that a seed determines everything.

It also checks that the simulator finds planted faults: those that it must find at once, and a sample of those that few seeds
notice (``make mutants`` runs each). Each runs in its own process, as in ``make sim``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.runs import SCENARIOS

pytestmark = pytest.mark.timeout(3000)
"""Other tests may take most of the processors' time meanwhile."""
SAMPLE_S = 30
TESTS = Path(__file__).parents[1]
FIRST_SEED = 930
"""The scenarios take the seeds in turns: six runs for each of eighteen. From this seed on they usually meet every state."""
SEEDS = 108
MORE_SEEDS = 108
"""Tried while a state was never met."""
FRESH_SEEDS = 18
TURNS = 3
"""Each commit runs every third of the seeds that found a bug, and compares the traces of every third scenario."""
ONCE_BROKEN = [
    ("quorum", 110),  # removals of old log files became durable out of order and left a gap
    ("leader-churn", 4),  # a log in which an entry of an earlier term overruled one of a later was refused at the restart
    ("leader-churn", 529),  # a leader whose held-back messages got no answer was never told so
    ("lost-disks", 116),  # a writer waited half a minute for one lost answer of the metadata, while its bookies were back
    ("lost-disks", 72000736),  # two copies stayed on one host after a move that had only one target
    ("lost-disks", 74200115),  # the next disk was lost while a ledger was open that had been placed on a lost one
    ("lost-disks", 37549520),  # a checker did not expect a disk to be lost between its copy of an entry and the new record
    ("outages", 74101746),  # a reader that went back at random did not come to the end of a log of 17 fetches in two minutes
    ("ledgers", 179),  # a failed bookie was taken back between the decision to replace it and the change that did
    ("log", 9),  # four copies were asked for while one of four bookies had refused to start with a corrupt log
    ("log", 5013),  # a producer sent a sixth batch while the first was unacknowledged, and its retry was not recognised
    ("log", 74102558),  # an owner that had lost its partition opened a ledger below the end of its successor's log
    ("ownership-changes", 74102482),  # the same, after a ledger was trimmed whose seal got no answer
    ("compaction", 91000231),  # a tombstone went at its horizon, which counts from the start of a pass that took two seconds
    ("compaction", 73000002),  # a session ended within a pass, which kept the worker's only map: nothing was compacted any more
    ("compacted-topics", 1),  # two compactions passed between a read and the search for the transactions aborted in it
    (
        "compacted-topics",
        74031015,
    ),  # offsets were added to a transaction before any group existed, and that was refused for good
    ("compacted-topics", 74101047),  # retention removed history between a read and the search for what was aborted in it
    ("everything", 91000415),  # the start of a log moved while a broker took it over, and its readers got an error for good
    ("everything", 74000380),  # a late marker of a topic's first deletion ended the time for a restore after the second
    ("history", 74000143),  # the bucket was checked before listings showed the last writes
    ("history", 74001820),  # a descriptor of an attachment that was given up was written after the deletion of its objects
    ("history", 380),  # a failed call of bounded_map stood unhandled while the calls before it waited
    ("history", 73000378),  # a marker of a deleted topic was written again, and the write took effect after its deletion
    ("transactions", 74000002),  # a removed member trusted a heartbeat that a loading coordinator had accepted
    ("history", 74101734),  # the policy of a topic whose deletion was final was looked up for a pointer still there
    ("history", 1516595452),  # retention lost its race against an owner that kept opening ledgers
    ("history", 74101629),  # a checker took a pointer that still contained its manifest for another version, so for a fork
    ("history", 74801034),  # a detached topic was attached again from a listing that did not show its last manifest yet
    ("history", 86000017),  # an altered flag was taken for that of a later release, so a tree page was not repaired
    ("history", 90000777),  # of an altered segment whose data key was lost, too, only the data key was restored
    ("history", 90001814),  # a write without an answer replaced a verified copy by a cut one, which only a scrub notices
    ("restores", 74100850),  # the marker of a cut to a point came after the next takeover, and a checker missed what was cut
    ("restores", 74702770),  # an owner did not require that the topic of its ledger still exists
    ("restores", 74800315),  # a takeover arrived after its operator had given up, and nobody restored again
    ("restores", 592),  # an operator took a bucket back between the two steps of a restore
    ("restores", 93000483),  # garbage was judged by a committed manifest that was not in the store yet
    ("restores", 81001237),  # no attempt at a restore came to its end in a minute, while every tenth request failed
    ("transactions", 81001002),  # brokers crashed too often for any transaction to be committed, until the faults ended
    ("transactions", 1535812535),  # retention removed the last ledger with records before another held the producers' state
    ("transactions", 74900983),  # an owner that was lost while it handed over called its state inconsistent
    ("old-metadata", 50000089),  # what a bookie had left of a deleted ledger could not be copied to those that had deleted it
    ("old-metadata", 50000278),  # an owner took the state in a ledger that others had deleted for the newest one
    ("consumers", 99001186),  # two owners of an internal partition died between opening a ledger and its checkpoint
    ("ownership-changes", 99001861),  # a partition was lost when it began to be served, and nobody served it again
    ("transactions", 97001079),  # a failed takeover left its coordinator, which wrote into the log of the next one
]


NOTICED_AT_ONCE = [
    "bookie_acknowledges_before_sync",
    "recovery_closes_at_the_lac",
    "confirmed_at_one_copy",
    "vote_is_not_stored",
    "raft_log_is_not_synced",
    "votes_for_whoever_asks",
    "votes_twice_in_a_term",
    "one_copy_commits",
    "earlier_terms_are_committed_by_counting",
    "lost_read_counts_as_absence",
    "recovery_reads_do_not_fence",
    "recovery_believes_fresh_bookies",
    "closed_without_fragments_of_the_rewrite",
    "unreadable_copy_counts_as_absence",
    "collector_lists_after_the_scan",
    "objects_are_deleted_after_an_unknown_outcome",
    "takeover_skips_ledgers_in_recovery",
    "internal_ledgers_go_at_the_opening",
]


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    return run("simulation", *words)


def run(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", module, *words]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, check=False)


def test_a_sample_of_planted_faults_is_noticed(fresh_seed: int) -> None:
    done = run("simulation.mutants.hunt", "--sample", str(fresh_seed), "--sample-seconds", str(SAMPLE_S))

    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-4000:]
    assert " 0 survived" in done.stdout


def test_the_same_seed_gives_the_same_trace(fresh_seed: int) -> None:
    for scenario in list(SCENARIOS)[fresh_seed % TURNS :: TURNS]:
        first, second = (simulate("--scenario", scenario, "--seed", "3").stdout for _ in range(2))

        assert first.endswith("1 passed, 0 failed\n"), scenario
        assert first.count("\n") > 20 or scenario == "raft-scripts", scenario  # Its runs note one line per script.
        assert first == second, scenario


def test_planted_faults_are_noticed() -> None:
    words = [word for name in NOTICED_AT_ONCE for word in ("--mutant", name)]

    done = run("simulation.mutants.hunt", "--seeds", "60", *words)

    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-4000:]
    assert f"{len(NOTICED_AT_ONCE)} killed, 0 survived" in done.stdout


def test_seeds_that_found_a_bug(fresh_seed: int) -> None:
    runs = ONCE_BROKEN[fresh_seed % TURNS :: TURNS]

    done = simulate(*(word for scenario, seed in runs for word in ("--run", f"{scenario}:{seed}")))

    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert f"{len(runs)} passed, 0 failed" in done.stdout


def test_invariants_hold_and_every_interesting_state_is_met(fresh_seed: int) -> None:
    fresh = ["--fresh", str(FRESH_SEEDS), "--fresh-seed", str(fresh_seed)]
    seeds = ["--first-seed", str(FIRST_SEED), "--seeds", str(SEEDS), "--more", str(MORE_SEEDS)]

    done = simulate(*seeds, *fresh, "--require-states")

    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    passed = re.search(r"^(\d+) passed, 0 failed$", done.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) >= SEEDS + FRESH_SEEDS
