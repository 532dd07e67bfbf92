"""Scenario: how changes of a quorum's members and its elections go wrong, played with cores alone, message by message.

Each script of changes is a known way to two quorums that do not meet; those of elections are in ``reigns.py``. Which node plays
which part, and the order of messages, come from the seed. What a script asks for may be refused: that is what keeps the
product whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from simulation import reigns
from simulation.machine import World
from simulation.stage import Stage, begin, other_side
from stratalog_metadata.raft import Member, Membership


def second_change_before_the_first_is_committed(randomness: random.Random) -> None:
    """The leader's side has no majority of the old members, nor of the next; but of the members after those."""
    stage = Stage(randomness, founders=3)
    a, b, c, d, e = stage.parts
    begin(stage, a)
    stage.split((a, d, e), (b, c))
    stage.change(a, Membership.of_voters((a, b, c, d)))
    stage.change(a, Membership.of_voters((a, b, c, d, e)))
    stage.write(a)
    other_side(stage, b, a)


def change_before_an_entry_of_the_term(randomness: random.Random) -> None:
    """The flaw of single-server changes (raft-dev, July 2015): two leaders, each with a change that the other does not know."""
    stage = Stage(randomness, founders=4)
    a, b, c, d, e = stage.parts
    begin(stage, a)
    stage.split((a, e), (b, c, d))
    stage.change(a, Membership.of_voters((a, b, c, d, e)))
    stage.deaf = {d}
    stage.elect(b)
    stage.change(b, Membership.of_voters((b, c, d)))
    stage.write(b)
    stage.deaf = set()
    stage.split((b, c), (a, d, e))
    stage.forsake(a)
    for _ in range(3):
        stage.elect(a)
    stage.write(a)


def learner_on_the_smaller_side(randomness: random.Random) -> None:
    stage = Stage(randomness, founders=3)
    a, b, c, d, _ = stage.parts
    begin(stage, a)
    stage.change(a, stage.members.with_learner(Member(node_id=d, identity="", address="d:1")))
    stage.split((a, d), (b, c))
    stage.write(a)
    other_side(stage, b, a)


def two_voters_at_once(randomness: random.Random) -> None:
    stage = Stage(randomness, founders=3)
    a, b, c, d, e = stage.parts
    begin(stage, a)
    stage.split((a, d, e), (b, c))
    stage.change(a, Membership.of_voters((a, b, c, d, e)))
    stage.write(a)
    other_side(stage, b, a)


SCRIPTS: Final[tuple[Callable[[random.Random], None], ...]] = (
    second_change_before_the_first_is_committed,
    change_before_an_entry_of_the_term,
    learner_on_the_smaller_side,
    two_voters_at_once,
    *reigns.SCRIPTS,
)


def simulate(world: World) -> None:
    """All scripts. Raises ``AssertionError`` when two nodes apply different entries."""
    for script in SCRIPTS:
        world.note(script.__name__)
        script(world.random(script.__name__))
