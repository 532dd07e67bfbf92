"""A harness for scripts over Raft cores alone, message by message: no disks, no network, no clock of its own.

The seed assigns the nodes' roles and the order in which messages arrive. Checked: no two nodes apply different entries at one
index, and no node is sent an impossible message.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from stratalog_core.errors import Invalid, Retriable
from stratalog_metadata.raft import Entry, HardState, LogTail, Membership, Message, Raft, RaftSettings
from stratalog_metadata.raft.messages import Append, TimeoutNow

NODES: Final = 5
TURNS_MAX: Final = 1_000


class RaftHarness:
    """Five nodes, of which ``founders`` are the first members. Every write is durable at once.

    A message carries one entry, so that some of a leader's entries arrive and others do not.
    """

    def __init__(self, randomness: random.Random, founders: int) -> None:
        self.parts = list(range(1, NODES + 1))
        randomness.shuffle(self.parts)
        self.members = Membership.of_voters(self.parts[:founders])
        self.cores = {node_id: self._core(node_id, randomness) for node_id in self.parts}
        self.sides: list[frozenset[int]] = [frozenset(self.parts)]
        self.deaf: set[int] = set()
        """Nodes that receive no entries."""
        self.withheld: set[tuple[int, int]] = set()
        """(node, term) pairs: the node never receives entries of the term, unless it would refuse the message anyway."""
        self._random = randomness
        self._applied: dict[int, Entry] = {}
        self._under_way: list[Message] = []

    def _core(self, node_id: int, randomness: random.Random) -> Raft:
        settings = RaftSettings(node_id=node_id, append_bytes_max=1)
        log = LogTail()
        return Raft(settings, self.members, hard_state=HardState(), log=log, applied=0, random=randomness, now=0.0)

    def split(self, *sides: Iterable[int]) -> None:
        self.sides = [frozenset(side) for side in sides]

    def elect(self, node_id: int) -> None:
        """Make the node ask for votes, as after a leadership transfer or an election timeout."""
        core = self.cores[node_id]
        with suppress(Invalid):
            core.step(TimeoutNow(sender=core.leader or node_id % NODES + 1, receiver=node_id, term=max(core.term, 1)))
        self.play()

    def beat(self, node_id: int) -> None:
        """Send a leader's heartbeats, which also resends lost messages."""
        self.cores[node_id].tick(self.cores[node_id].settings.heartbeat_s)
        self.play()

    def forsake(self, node_id: int) -> None:
        """Advance a leader's time without answers from a quorum, so that it steps down."""
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
        """Deliver messages until none are left."""
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
        if not is_carried or (isinstance(message, Append) and self._is_kept_back(message)):
            return
        try:
            self.cores[message.receiver].step(message)
        except Invalid as refused:
            raise AssertionError(f"a message that cannot be: {refused.message}") from refused

    def _is_kept_back(self, append: Append) -> bool:
        if append.receiver in self.deaf:
            return True
        fits = self.cores[append.receiver].log.matches(append.previous_index, append.previous_term)
        return fits and any((append.receiver, entry.term) in self.withheld for entry in append.entries)


def begin(harness: RaftHarness, leader: int) -> None:
    harness.elect(leader)
    harness.write(leader)
    assert harness.cores[leader].is_leader


def other_side(harness: RaftHarness, leader: int, former: int) -> None:
    """Let the others continue without the former leader, then reconnect it."""
    harness.elect(leader)
    harness.write(leader)
    assert harness.cores[leader].commit > 2, "the majority goes on"
    harness.split(harness.parts)
    harness.elect(leader)
    harness.elect(former)
    harness.write(leader)
