"""Scenario: how changes of a quorum's members go wrong, played with cores alone, message by message.

Each script is a known way to two quorums that do not meet. Which node plays which part, and the order of messages, come from
the seed. What a script asks for may be refused: that is what keeps the product whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from simulation.machine import World
from stratalog_core.errors import Invalid, Retriable
from stratalog_metadata.raft import Entry, HardState, LogTail, Member, Membership, Message, Raft, RaftSettings
from stratalog_metadata.raft.messages import Append, TimeoutNow

NODES: Final = 5
TURNS_MAX: Final = 1_000


class Stage:
    """Five nodes, of whom ``founders`` are the first members. Disks are quick: everything is durable at once."""

    def __init__(self, randomness: random.Random, founders: int) -> None:
        self.parts = list(range(1, NODES + 1))
        randomness.shuffle(self.parts)
        self.members = Membership.of_voters(self.parts[:founders])
        self.cores = {node_id: self._core(node_id, randomness) for node_id in self.parts}
        self.sides: list[frozenset[int]] = [frozenset(self.parts)]
        self.deaf: set[int] = set()
        """Nodes that no entries get to."""
        self._random = randomness
        self._applied: dict[int, Entry] = {}
        self._under_way: list[Message] = []

    def _core(self, node_id: int, randomness: random.Random) -> Raft:
        settings = RaftSettings(node_id=node_id)
        log = LogTail()
        return Raft(settings, self.members, hard_state=HardState(), log=log, applied=0, random=randomness, now=0.0)

    def split(self, *sides: Iterable[int]) -> None:
        self.sides = [frozenset(side) for side in sides]

    def elect(self, node_id: int) -> None:
        """As after a hand-over, or a silence: the node asks for votes."""
        core = self.cores[node_id]
        with suppress(Invalid):
            core.step(TimeoutNow(sender=core.leader or node_id % NODES + 1, receiver=node_id, term=max(core.term, 1)))
        self.play()

    def forsake(self, node_id: int) -> None:
        """A leader notices that it has heard of no quorum for long, and leads no more."""
        for later_s in (5.0, 10.0):
            self.cores[node_id].tick(later_s)
        self.play()

    def write(self, node_id: int) -> None:
        with suppress(Retriable):
            self.cores[node_id].propose([b"by %d" % node_id])
        self.play()

    def change(self, node_id: int, wanted: Membership) -> None:
        with suppress(Retriable, Invalid):
            self.cores[node_id].change_members(wanted)
        self.play()

    def play(self) -> None:
        """Until nobody has anything to say."""
        for _ in range(TURNS_MAX):
            for core in self.cores.values():
                self._turn(core)
            if not self._under_way:
                return
            self._random.shuffle(self._under_way)
            self._deliver(self._under_way.pop())
        raise AssertionError("it goes on for ever")

    def _turn(self, core: Raft) -> None:
        while (ready := core.ready()) is not None:
            core.persisted(ready.number)
            self._under_way += [*ready.messages, *ready.messages_after]
            for entry in ready.committed:
                known = self._applied.setdefault(entry.index, entry)
                assert known == entry, f"node {core.node_id} applied another entry at {entry.index} than a node before it"

    def _deliver(self, message: Message) -> None:
        is_carried = any({message.sender, message.receiver} <= side for side in self.sides)
        if not is_carried or (message.receiver in self.deaf and isinstance(message, Append)):
            return
        try:
            self.cores[message.receiver].step(message)
        except Invalid as refused:
            raise AssertionError(f"a message that cannot be: {refused.message}") from refused


def second_change_before_the_first_is_committed(randomness: random.Random) -> None:
    """The leader's side has no majority of the old members, nor of the next; but of the members after those."""
    stage = Stage(randomness, founders=3)
    a, b, c, d, e = stage.parts
    _begin(stage, a)
    stage.split((a, d, e), (b, c))
    stage.change(a, Membership.of_voters((a, b, c, d)))
    stage.change(a, Membership.of_voters((a, b, c, d, e)))
    stage.write(a)
    _other_side(stage, b, a)


def change_before_an_entry_of_the_term(randomness: random.Random) -> None:
    """The flaw of single-server changes (raft-dev, July 2015): two leaders, each with a change that the other does not know."""
    stage = Stage(randomness, founders=4)
    a, b, c, d, e = stage.parts
    _begin(stage, a)
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
    _begin(stage, a)
    stage.change(a, stage.members.with_learner(Member(node_id=d, identity="", address="d:1")))
    stage.split((a, d), (b, c))
    stage.write(a)
    _other_side(stage, b, a)


def two_voters_at_once(randomness: random.Random) -> None:
    stage = Stage(randomness, founders=3)
    a, b, c, d, e = stage.parts
    _begin(stage, a)
    stage.split((a, d, e), (b, c))
    stage.change(a, Membership.of_voters((a, b, c, d, e)))
    stage.write(a)
    _other_side(stage, b, a)


SCRIPTS: Final[tuple[Callable[[random.Random], None], ...]] = (
    second_change_before_the_first_is_committed,
    change_before_an_entry_of_the_term,
    learner_on_the_smaller_side,
    two_voters_at_once,
)


def _begin(stage: Stage, leader: int) -> None:
    stage.elect(leader)
    stage.write(leader)
    assert stage.cores[leader].is_leader


def _other_side(stage: Stage, leader: int, former: int) -> None:
    """The rest goes on without the former leader, and meets it again."""
    stage.elect(leader)
    stage.write(leader)
    assert stage.cores[leader].commit > 2, "the majority goes on"
    stage.split(stage.parts)
    stage.elect(leader)
    stage.elect(former)
    stage.write(leader)


def simulate(world: World) -> None:
    """All scripts. Raises ``AssertionError`` when two nodes apply different entries."""
    for script in SCRIPTS:
        world.note(script.__name__)
        script(world.random(script.__name__))
