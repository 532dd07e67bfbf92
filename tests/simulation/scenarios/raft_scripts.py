"""Scenario: known failures of membership changes and elections, on Raft cores alone, message by message.

Each script of changes is a known way to two disjoint quorums; those of elections are in ``election_scripts.py``. The seed
assigns the nodes and the order of messages. The product may refuse a script's request, which is correct.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from simulation.scenarios import election_scripts
from simulation.scenarios.raft_harness import RaftHarness, begin, other_side
from simulation.world.machine import World
from stratalog_metadata.raft import Member, Membership


def second_change_before_the_first_is_committed(randomness: random.Random) -> None:
    """The leader's side has no majority of the old members or of the next ones, but of the members after those."""
    harness = RaftHarness(randomness, founders=3)
    a, b, c, d, e = harness.parts
    begin(harness, a)
    harness.split((a, d, e), (b, c))
    harness.change(a, Membership.of_voters((a, b, c, d)))
    harness.change(a, Membership.of_voters((a, b, c, d, e)))
    harness.write(a)
    other_side(harness, b, a)


def change_before_an_entry_of_the_term(randomness: random.Random) -> None:
    """The flaw of single-server changes (raft-dev, July 2015): two leaders, each with a change unknown to the other."""
    harness = RaftHarness(randomness, founders=4)
    a, b, c, d, e = harness.parts
    begin(harness, a)
    harness.split((a, e), (b, c, d))
    harness.change(a, Membership.of_voters((a, b, c, d, e)))
    harness.deaf = {d}
    harness.elect(b)
    harness.change(b, Membership.of_voters((b, c, d)))
    harness.write(b)
    harness.deaf = set()
    harness.split((b, c), (a, d, e))
    harness.forsake(a)
    for _ in range(3):
        harness.elect(a)
    harness.write(a)


def learner_on_the_smaller_side(randomness: random.Random) -> None:
    harness = RaftHarness(randomness, founders=3)
    a, b, c, d, _ = harness.parts
    begin(harness, a)
    harness.change(a, harness.members.with_learner(Member(node_id=d, identity="", address="d:1")))
    harness.split((a, d), (b, c))
    harness.write(a)
    other_side(harness, b, a)


def two_voters_at_once(randomness: random.Random) -> None:
    harness = RaftHarness(randomness, founders=3)
    a, b, c, d, e = harness.parts
    begin(harness, a)
    harness.split((a, d, e), (b, c))
    harness.change(a, Membership.of_voters((a, b, c, d, e)))
    harness.write(a)
    other_side(harness, b, a)


SCRIPTS: Final[tuple[Callable[[random.Random], None], ...]] = (
    second_change_before_the_first_is_committed,
    change_before_an_entry_of_the_term,
    learner_on_the_smaller_side,
    two_voters_at_once,
    *election_scripts.SCRIPTS,
)


def simulate(world: World) -> None:
    """Run all scripts. Raises ``AssertionError`` if two nodes apply different entries."""
    for script in SCRIPTS:
        world.note(script.__name__)
        script(world.random(script.__name__))
