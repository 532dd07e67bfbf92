"""Raft under a hostile network, from a seed: messages lost, doubled and reordered, nodes crashed with what was not synced.

With ``changes``, members come and go, and disks are lost and replaced under the same number with a new identity.

After every event the properties of the Raft paper (figure 3) are checked over all nodes, and linearizability of reads. In
the end everything is healed, and the cluster must agree and go on.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratalog_core.errors import Conflict, Retriable
from stratalog_metadata.raft import (
    Entry,
    EntryKind,
    HardState,
    LogTail,
    Member,
    Membership,
    Message,
    Raft,
    RaftSettings,
    Ready,
    Role,
    Snapshot,
)
from stratalog_metadata.raft.membership import decode_members

Applied = list[Entry]


@dataclass
class Disk:
    """The state that survives a crash."""

    hard_state: HardState = field(default_factory=HardState)
    base: tuple[int, int] = (0, 0)
    entries: list[Entry] = field(default_factory=list)
    state: Applied = field(default_factory=list)
    identity: str = "as founded"

    def membership(self, founded: Membership) -> Membership:
        """Return the membership in force at the state's index."""
        known = [entry.payload for entry in self.state if entry.kind is EntryKind.MEMBERS]
        return decode_members(known[-1]) if known else founded

    def store(self, ready: Ready) -> None:
        if ready.snapshot is not None:
            self.base, self.entries = (ready.snapshot.index, ready.snapshot.term), []
            self.state = msgspec.msgpack.decode(ready.snapshot.content, type=Applied)
        self.hard_state = ready.hard_state or self.hard_state
        if ready.entries:
            first = ready.entries[0].index
            self.entries = [entry for entry in self.entries if entry.index < first] + list(ready.entries)

    def compact(self, index: int, state: Applied) -> None:
        tail = LogTail(*self.base, self.entries)
        tail.compact(index)
        self.base, self.entries = (tail.base_index, tail.base_term), list(tail.between(tail.base_index + 1, tail.last_index))
        self.state = [entry for entry in state if entry.index <= index]


class Node:
    """A core with its disk; ``writing`` are Readies that are not durable yet."""

    def __init__(self, node_id: int, cluster: Cluster) -> None:
        self.node_id = node_id
        self.cluster = cluster
        self.disk = Disk()
        self.writing: list[Ready] = []
        self.up = False
        self.is_lost = False
        self.joined = cluster.membership
        self.now = 0.0
        if node_id in cluster.membership.voters:
            self.boot()

    def boot(self) -> None:
        self.applied = list(self.disk.state)
        self.writing = []
        self.core = Raft(
            RaftSettings(
                node_id=self.node_id,
                identity=self.disk.identity,
                append_bytes_max=64,
                in_flight_max=4,
                snapshot_chunk_bytes=100,
            ),
            self.disk.membership(self.joined),
            hard_state=self.disk.hard_state,
            log=LogTail(*self.disk.base, self.disk.entries),
            applied=self.disk.base[0],
            random=self.cluster.random,
            now=self.now,
        )
        self.up = True
        self.led_term = 0

    def is_lost_in(self, membership: Membership) -> bool:
        """Whether its disk is not the one that ``membership`` names."""
        member = membership.find(self.node_id)
        return member is not None and member.identity != self.disk.identity

    def crash(self) -> None:
        # A crash may lose all that is being written, or keep some of it: in order, as a log does.
        for ready in self.writing[: self.cluster.random.randrange(len(self.writing) + 1)]:
            self.disk.store(ready)
        self.up = False

    def lose_disk(self) -> None:
        self.up = False
        self.is_lost = True
        self.disk = Disk(identity=f"number {self.cluster.random.getrandbits(64)}")

    def join(self, membership: Membership) -> None:
        """A new disk has been added as a learner: the members that answered told it the configuration."""
        self.is_lost = False
        self.joined = membership
        self.boot()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        if self.up:
            self.core.tick(self.now)

    def persist_one(self) -> None:
        ready = self.writing.pop(0)
        self.disk.store(ready)
        if ready.snapshot is not None:
            self.applied = list(self.disk.state)
        self.core.persisted(ready.number)
        self.cluster.sent(self, ready.messages_after)

    def turn(self) -> None:
        rounds = 0
        while (ready := self.core.ready()) is not None:
            rounds += 1
            assert rounds < 100, "the core has something to do for ever"
            self.cluster.sent(self, ready.messages)
            self.cluster.check_entries(ready)
            if ready.must_persist or self.writing:
                self.writing.append(ready)
            else:
                self.cluster.sent(self, ready.messages_after)
            self.take_committed(ready)
            self.core.validate_state()
        self.core.validate_state()

    def take_committed(self, ready: Ready) -> None:
        for entry in ready.committed:
            assert entry.index == (self.applied[-1].index if self.applied else 0) + 1
            assert entry in self.disk.entries, "applied before it is durable"
            self.applied.append(entry)
            self.cluster.check_applied(entry)
        for read in ready.reads:
            self.cluster.check_read(read.context, read.index)
        if ready.snapshot_wanted and self.cluster.random.random() < 0.5:
            last = self.applied[-1]
            content = msgspec.msgpack.encode(self.applied)
            self.core.offer_snapshot(Snapshot(index=last.index, term=last.term, content=content))

    def compact(self) -> None:
        keep = self.cluster.random.randrange(4)
        index = min(self.applied[-1].index if self.applied else 0, self.disk.base[0] + len(self.disk.entries)) - keep
        if index > self.core.log.base_index and self.core.stable >= index and not self.writing:
            self.core.compact(index)
            self.disk.compact(index, self.applied)


class Cluster:
    """Nodes, messages on the way, and what must never change."""

    def __init__(self, seed: int, size: int = 3, *, changes: bool = False) -> None:
        self.random = random.Random(seed)
        self.changes = changes
        self.changed = 0
        self.one_clock = seed % 2 == 0
        self.membership = Membership.of(Member(node_id=number, identity="as founded") for number in range(1, size + 1))
        self.members = self.membership
        """The last configuration that was committed."""
        self.members_index = 0
        self.network: list[tuple[Message, str]] = []
        self.cut: set[tuple[int, int]] = set()
        self.contents: dict[tuple[int, int], tuple[bytes, int]] = {}
        self.committed: dict[int, Entry] = {}
        self.leaders: dict[int, int] = {}
        self.reads: dict[int, int] = {}
        self.proposed = 0
        self.nodes = {node_id: Node(node_id, self) for node_id in range(1, size + 1 + (2 if changes else 0))}

    @property
    def live(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.up]

    def sent(self, node: Node, messages: tuple[Message, ...]) -> None:
        self.network.extend((message, node.disk.identity) for message in messages)

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check_entries(self, ready: Ready) -> None:
        """Log matching: index and term identify content and, inductively, everything before it."""
        previous_term = ready.previous_term
        for entry in ready.entries:
            known = self.contents.setdefault((entry.index, entry.term), (entry.payload, previous_term))
            assert known == (entry.payload, previous_term), f"two entries at {entry.index}, term {entry.term}"
            previous_term = entry.term

    def check_applied(self, entry: Entry) -> None:
        """State machine safety."""
        assert self.committed.setdefault(entry.index, entry) == entry, f"two entries were committed at {entry.index}"
        if entry.kind is EntryKind.MEMBERS and entry.index > self.members_index:
            self.members_index, self.members = entry.index, decode_members(entry.payload)

    def check_read(self, context: int, index: int) -> None:
        """Linearizability: a read sees everything that was committed before it was asked for."""
        assert index >= self.reads.pop(context), "a stale read"

    def check_leader(self, node: Node) -> None:
        """Election safety and leader completeness."""
        if node.core.role is not Role.LEADER or node.led_term == node.core.term:
            return
        node.led_term = node.core.term
        assert self.leaders.setdefault(node.core.term, node.node_id) == node.node_id, "two leaders in one term"
        for index, entry in self.committed.items():
            assert index <= node.core.log.base_index or node.core.log.matches(index, entry.term), "a leader lacks an entry"

    def check_lease(self) -> None:
        """A leader with a lease knows that no node leads in a later term."""
        latest = max((node.core.term for node in self.live if node.core.is_leader), default=0)
        assert not self.one_clock or all(node.core.term == latest for node in self.live if node.core.has_lease), "a stale lease"

    # --- events ------------------------------------------------------------------------------------------------------

    def event(self) -> None:
        choice = self.random.random()
        if self.changes and self.random.random() < 0.06:
            self.change()
        elif choice < 0.50:
            for _ in range(4):
                self.deliver()
        elif choice < 0.75:
            self.persist()
        elif choice < 0.87:
            self.tick()
        elif choice < (0.993 if self.changes else 0.985):
            self.ask()
        else:
            self.harm()
        for node in self.live:
            node.turn()
            self.check_leader(node)
        self.check_lease()

    def deliver(self, *, hostile: bool = True) -> None:
        if not self.network:
            return
        # Reordered within a window: a network that shuffled everything would let nothing be agreed on.
        position = self.random.randrange(min(len(self.network), 8)) if hostile else 0
        message, identity = self.network[position]
        if not hostile or self.random.random() < 0.95:
            del self.network[position]
        receiver = self.nodes[message.receiver]
        lost = (message.sender, message.receiver) in self.cut or (hostile and self.random.random() < 0.03)
        if receiver.up and not lost:
            receiver.core.step(message, identity)

    def persist(self) -> None:
        writing = [node for node in self.live if node.writing]
        if writing:
            self.random.choice(writing).persist_one()

    def tick(self, *, hostile: bool = True) -> None:
        # Safety must not depend on clocks, but for leases: those need clocks that run at one pace.
        if self.one_clock:
            seconds = self.random.random() * 0.08
            for node in self.nodes.values():
                node.tick(seconds)
            return
        for node in self.live:
            if not hostile:
                node.tick(0.02)
            elif self.random.random() < 0.5:
                node.tick(self.random.random() * 0.15)

    def ask(self) -> None:
        leaders = [node for node in self.live if node.core.role is Role.LEADER]
        if not leaders:
            return
        leader = self.random.choice(leaders)
        try:
            if self.random.random() < 0.7:
                self.proposed += 1
                leader.core.propose([f"command {self.proposed}".encode()] * self.random.randrange(1, 4))
            else:
                context = len(self.reads) + 1_000_000 + self.random.getrandbits(40)
                self.reads[context] = max(self.committed, default=0)
                leader.core.read(context)
        except Retriable:
            pass

    def change(self) -> None:
        """Act as an operator: remove, add and replace nodes; sometimes a disk is lost."""
        leaders = [node for node in self.live if node.core.role is Role.LEADER]
        if not leaders:
            return
        leader = self.random.choice(leaders)
        known = leader.core.membership
        lost = [node_id for node_id in sorted(known.voters) if self.nodes[node_id].is_lost_in(known)]
        voters = sorted(known.voters)
        try:
            if lost:
                self.changed += leader.core.change_members(known.without(lost[0])) > 0
            elif self.random.random() < 0.15 and len(voters) > 2 and self.is_whole():
                self.nodes[self.random.choice(voters)].lose_disk()
            elif len(voters) > 1 and self.random.random() < 0.4:
                self.changed += leader.core.change_members(known.without(self.random.choice(voters))) > 0
            else:
                self.add(leader)
        except (Retriable, Conflict):
            pass

    def is_whole(self) -> bool:
        """Whether every member has its disk: no second one is lost before the first is replaced."""
        return not any(self.nodes[member.node_id].is_lost_in(self.members) for member in self.members.members)

    def add(self, leader: Node) -> None:
        known = leader.core.membership
        free = [
            node for node_id, node in self.nodes.items() if known.find(node_id) is None and self.members.find(node_id) is None
        ]
        if not free or leader.core.membership_index > leader.core.commit:
            return
        node = self.random.choice(free)
        node.lose_disk()
        member = Member(node_id=node.node_id, identity=node.disk.identity, address=str(node.node_id), voter=False)
        self.changed += leader.core.change_members(known.with_learner(member)) > 0
        node.join(leader.core.membership)

    def harm(self) -> None:
        leaders = [node for node in self.live if node.core.role is Role.LEADER]
        node = self.random.choice(leaders if leaders and self.random.random() < 0.3 else list(self.nodes.values()))
        match self.random.randrange(7):
            case 0 if node.up:
                node.crash()
            case 0 | 1 | 2 if not node.up and not node.is_lost:
                node.boot()
            case 2 if node.up:
                node.compact()
            case 3:
                others = self.membership.others(node.node_id)
                self.cut = {(node.node_id, other) for other in others if self.random.random() < 0.8}
                self.cut |= {(other, node.node_id) for other in others if self.random.random() < 0.8}
            case 4 if node.up and self.random.random() < 0.5:
                node.core.transfer_leadership()
            case 4 if node.up:
                for other in self.membership.others(node.node_id)[:1]:
                    node.core.unreachable(other)
            case _:
                self.cut = set()

    # --- recovery ----------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        self.cut = set()
        for node in self.nodes.values():
            if not node.up and not node.is_lost and node.node_id in self.members.voters:
                node.boot()

    def settled(self) -> bool:
        """One leader, all logs the same and applied."""
        present = [node for node in self.live if node.node_id in self.members.voters]
        leaders = [node for node in present if node.core.role is Role.LEADER]
        ends = {(node.core.log.last_index, node.core.log.last_term, node.core.handed) for node in present}
        return len(leaders) == 1 and len(ends) == 1 and ends == {(*next(iter(ends))[:2], next(iter(ends))[0])}

    def run_until_settled(self) -> None:
        for _ in range(20_000):
            self.deliver(hostile=False)
            self.persist()
            if not self.network and not any(node.writing for node in self.live):
                self.tick(hostile=False)
            for node in self.live:
                node.turn()
                self.check_leader(node)
            if self.settled() and not self.network:
                return
        raise AssertionError("the healed cluster does not settle")


def run_from_seed(seed: int, size: int, events: int, *, changes: bool = False) -> Cluster:
    cluster = Cluster(seed, size, changes=changes)
    for _ in range(events):
        cluster.event()
    cluster.heal()
    cluster.run_until_settled()
    leader = max((node for node in cluster.live if node.core.role is Role.LEADER), key=lambda node: node.core.term)
    index = leader.core.propose([b"after all"])
    cluster.run_until_settled()
    assert cluster.committed[index].payload == b"after all"
    present = [node for node in cluster.live if node.node_id in cluster.members.voters]
    states = {tuple((entry.index, entry.term) for entry in node.applied) for node in present}
    assert len(states) == 1
    return cluster


@pytest.mark.parametrize(("seed", "size"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 3), (6, 3), (7, 4), (8, 5), (9, 5)])
def test_raft_properties_hold_under_faults(seed: int, size: int) -> None:
    cluster = run_from_seed(seed, size, 15_000)
    assert cluster.committed


@pytest.mark.parametrize(("seed", "size"), [(11, 1), (12, 2), (13, 3), (14, 3), (15, 3), (16, 4)])
def test_raft_properties_hold_during_membership_changes(seed: int, size: int) -> None:
    cluster = run_from_seed(seed, size, 5_000, changes=True)
    assert cluster.changed


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1, 2, 3, 3, 4]), events=st.integers(1, 800))
def test_raft_properties_hold_during_membership_changes_from_any_seed(seed: int, size: int, events: int) -> None:
    run_from_seed(seed, size, events, changes=True)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([3, 3, 4, 5]), events=st.integers(1, 800))
def test_raft_properties_hold_from_any_seed(seed: int, size: int, events: int) -> None:
    run_from_seed(seed, size, events)


def test_a_seed_reproduces_its_history() -> None:
    first, second = run_from_seed(7, 3, 800), run_from_seed(7, 3, 800)
    assert first.committed == second.committed
    assert first.leaders == second.leaders
