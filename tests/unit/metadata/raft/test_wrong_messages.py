"""Any message in any state of a node is accepted, or refused with the declared error, and the node keeps its promises."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from stratalog_core.errors import Invalid, Retriable
from stratalog_metadata.raft import Entry, EntryKind, HardState, LogTail, Member, Membership, Message, Raft, RaftSettings, Role
from stratalog_metadata.raft.membership import encode_members
from stratalog_metadata.raft.messages import (
    Append,
    AppendReply,
    Heartbeat,
    HeartbeatReply,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from stratalog_metadata.raft.ready import Ready, Snapshot

OWN = 1
LEADER = 2
MEMBERS = Membership.of_voters((1, 2, 3))
WHOLE = crc32c(b"whole")
PAYLOADS = [
    b"",
    b"\xff",
    b"\x90",
    encode_members(MEMBERS),
    encode_members(Membership.of_voters((1, 2, 3, 4))),
    encode_members(Membership.of_voters((7, 8, 9))),
    encode_members(MEMBERS.with_learner(Member(node_id=4, identity="new", address="h:4"))),
]


def core_of(applied: int = 2, last: int = 4, term: int = 3, nodes: tuple[int, ...] = (1, 2, 3)) -> Raft:
    """A node of three that was started anew: ``last`` entries of term 2, of which ``applied`` are committed."""
    entries = [Entry(index, 2, EntryKind.COMMAND, b"old") for index in range(applied + 1, last + 1)]
    return Raft(
        RaftSettings(node_id=OWN, snapshot_bytes_max=100, snapshot_chunk_bytes=4, in_flight_max=2, reads_max=3),
        Membership.of_voters(nodes),
        hard_state=HardState(term=term),
        log=LogTail(applied, 2 if applied else 0, entries),
        applied=applied,
        random=random.Random(1),
        now=0.0,
    )


class Watched:
    """A core driven by hand. After every event its earlier promises must still hold."""

    def __init__(self, core: Raft) -> None:
        self.core = core
        self.now = 0.0
        self.writing: list[Ready] = []
        self.applied = core.handed
        self.term = core.term
        self.commit = core.commit
        self.committed: dict[int, Entry] = {}
        self.votes: dict[int, int] = {}
        self.refused = 0

    def step(self, message: Message) -> None:
        before = self.state()
        try:
            self.core.step(message)
        except Invalid:
            self.refused += 1
            assert self.state() == before, "a refused message changes nothing"
        self.check()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)
        self.check()

    def turn(self, *, persist: bool) -> None:
        """Do what a shell does at the end of a turn."""
        ready = self.core.ready()
        if ready is not None:
            self.take(ready)
        if persist and self.writing:
            self.core.persisted(self.writing[-1].number)
            self.writing.clear()
        self.check()

    def take(self, ready: Ready) -> None:
        self.writing.append(ready)
        if ready.snapshot is not None:
            assert ready.snapshot.index > self.applied
            self.applied = ready.snapshot.index
        for entry in ready.committed:
            assert entry.index == self.applied + 1
            self.applied = entry.index
            assert self.committed.setdefault(entry.index, entry) == entry
        for message in (*ready.messages, *ready.messages_after):
            if isinstance(message, VoteReply) and message.granted and not message.pre:
                self.vote(message.term, message.receiver)
        if ready.hard_state is not None and ready.hard_state.voted_for:
            self.vote(ready.hard_state.term, ready.hard_state.voted_for)
        if ready.snapshot_wanted:
            self.core.offer_snapshot(Snapshot(index=self.core.commit, term=self.core.term, content=b"whole"))

    def vote(self, term: int, candidate: int) -> None:
        assert self.votes.setdefault(term, candidate) == candidate, "one vote for each term"

    def check(self) -> None:
        core = self.core
        core.validate_state()
        assert core.term >= self.term, "the term never falls"
        assert core.commit >= self.commit, "what is committed stays committed"
        self.term, self.commit = core.term, core.commit
        for index, entry in self.committed.items():
            assert core.log.term_at(index) in (None, entry.term), "a committed entry is never replaced"

    def state(self) -> tuple[Any, ...]:
        core = self.core
        log = core.log
        entries = log.between(log.base_index + 1, log.last_index)
        return (
            core.term,
            core.role,
            core.leader,
            core._elections.voted_for,
            core.commit,
            core.membership,
            log.base_index,
            entries,
        )


@st.composite
def messages(draw: st.DrawFn, core: Raft) -> Message:
    """Messages mostly close to the core's position, where their content matters."""
    near = st.sampled_from([-2, -1, 0, 0, 0, 1, 2, 5])
    extreme = st.sampled_from([0, 1, 2**62, 2**63, -1])

    def number(around: int) -> int:
        return draw(extreme) if draw(st.integers(0, 15)) == 0 else around + draw(near)

    term = number(core.term)
    index = number(draw(st.sampled_from([core.log.base_index, core.commit, core.log.last_index])))
    way = {
        "sender": draw(st.sampled_from([0, 1, 2, 2, 2, 3, 3, 4])),
        "receiver": draw(st.sampled_from([1] * 12 + [2])),
        "term": term,
    }
    last_term = draw(st.sampled_from([core.log.term_at(index), number(core.log.last_term)])) or 0
    match draw(st.integers(0, 9)):
        case 0:
            pre, transfer = draw(st.booleans()), draw(st.booleans())
            return VoteRequest(**way, last_index=index, last_term=last_term, pre=pre, transfer=transfer)
        case 1:
            return VoteReply(**way, granted=draw(st.booleans()), pre=draw(st.booleans()))
        case 2 | 3:
            entries = draw(appended(index, last_term, term))
            return Append(**way, previous_index=index, previous_term=last_term, commit=number(core.commit), entries=entries)
        case 4:
            rejected = draw(st.booleans())
            hint = number(core.log.base_index)
            return AppendReply(**way, index=index, rejected=rejected, hint_index=hint, hint_term=number(core.term))
        case 5:
            return Heartbeat(**way, commit=index, round=number(3), identity=draw(st.sampled_from(["", "", "other"])))
        case 6:
            return HeartbeatReply(**way, round=number(3))
        case 7:
            return draw(pieces(way, index, last_term))
        case 8:
            return SnapshotReply(**way, index=index, position=number(2))
    return TimeoutNow(**way)


@st.composite
def appended(draw: st.DrawFn, index: int, term: int, last_term: int) -> tuple[Entry, ...]:
    entries = []
    for number in range(draw(st.integers(0, 4))):
        term = max(term, draw(st.sampled_from([term, term + 1, last_term]))) if draw(st.integers(0, 9)) else term - 1
        following = index + number + (1 if draw(st.integers(0, 15)) else 2)
        kind = draw(st.sampled_from(EntryKind))
        entries.append(Entry(following, term, kind, draw(st.sampled_from(PAYLOADS))))
    return tuple(entries)


@st.composite
def pieces(draw: st.DrawFn, way: dict[str, int], index: int, term: int) -> SnapshotChunk:
    content = draw(st.sampled_from([b"", b"whole", b"who", b"x" * 200]))
    members = draw(st.sampled_from([(), MEMBERS.members, (Member(node_id=0),), (Member(node_id=4, voter=False),)]))
    total = draw(st.sampled_from([len(content), len(content), 5, 1000]))
    checksum = draw(st.sampled_from([0, WHOLE, WHOLE]))
    position = draw(st.sampled_from([0, 0, 3, 7]))
    return SnapshotChunk(
        **way,
        index=index,
        index_term=term,
        total_bytes=total,
        checksum=checksum,
        position=position,
        content=content,
        members=members,
    )


def act(data: st.DataObject, node: Watched) -> None:
    core = node.core
    match data.draw(st.integers(0, 9)):
        case 0:
            node.tick(data.draw(st.sampled_from([0.0, 0.1, 0.6, 2.0])))
        case 1 | 2:
            node.turn(persist=data.draw(st.booleans()))
        case 3:
            proposes = data.draw(st.booleans())
            with suppress(Retriable):
                core.propose([b"new"]) if proposes else core.read(data.draw(st.integers(1, 5)))
            node.check()
        case 4:
            core.unreachable(data.draw(st.integers(0, 4)))
            core.compact(min(core.handed, core.stable) if data.draw(st.booleans()) else core.log.base_index)
            node.check()
        case _:
            node.step(data.draw(messages(core)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_message_ends_a_node_or_breaks_a_promise(data: st.DataObject) -> None:
    applied = data.draw(st.sampled_from([0, 2]))
    nodes = data.draw(st.sampled_from([(1, 2, 3), (1, 2), (2, 3)]))
    node = Watched(core_of(applied, applied + data.draw(st.integers(0, 2)), nodes=nodes))
    for _ in range(data.draw(st.integers(1, 25))):
        act(data, node)


# --- one by one ------------------------------------------------------------------------------------------------------


def follower() -> Watched:
    """Of node 2 in term 3: entries 1 … 4, all committed."""
    node = Watched(core_of())
    node.core.step(Append(sender=LEADER, receiver=OWN, term=3, previous_index=4, previous_term=2, commit=4))
    node.turn(persist=True)
    return node


def leader() -> Watched:
    node = Watched(core_of())
    node.tick(5.0)
    for pre in (True, False):
        node.step(VoteReply(sender=LEADER, receiver=OWN, term=4, granted=True, pre=pre))
        node.turn(persist=True)
    assert node.core.role is Role.LEADER
    return node


def refuse(node: Watched, message: Message, reason: str) -> None:
    before = node.state()
    with pytest.raises(Invalid, match=reason):
        node.core.step(message)
    assert node.state() == before
    node.check()


def to(kind: Any, term: int = 3, sender: int = LEADER, **fields: Any) -> Any:
    return kind(sender=sender, receiver=OWN, term=term, **fields)


def test_a_heartbeat_that_knows_of_entries_that_are_gone_is_refused_and_says_what_that_means() -> None:
    refuse(follower(), to(Heartbeat, commit=9, round=1), "its log ends at 4.*older copy: then stop it and replace it")


def test_a_second_leader_of_a_term_is_refused() -> None:
    refuse(follower(), to(Heartbeat, sender=3, commit=0, round=1), "node 3 leads term 3, which node 2 leads")
    refuse(leader(), to(Append, term=4, previous_index=4, previous_term=2, commit=0), "node 2 leads term 4, which node 1 leads")


def test_a_committed_entry_is_not_replaced() -> None:
    entry = Entry(4, 3, EntryKind.COMMAND, b"other")
    refuse(follower(), to(Append, previous_index=3, previous_term=2, commit=4, entries=(entry,)), "would replace entry 4")


def test_entries_that_do_not_follow_each_other_are_refused() -> None:
    for index, term in ((7, 3), (6, 1), (6, 4)):
        entries = (Entry(5, 3, EntryKind.NO_OP), Entry(index, term, EntryKind.NO_OP))
        refuse(follower(), to(Append, previous_index=4, previous_term=2, commit=4, entries=entries), "follows")


@pytest.mark.parametrize("payload", [*PAYLOADS[:3], PAYLOADS[5]])
def test_impossible_configurations_are_refused(payload: bytes) -> None:
    first = Entry(5, 3, EntryKind.MEMBERS, PAYLOADS[3])
    entries = (first, Entry(6, 3, EntryKind.MEMBERS, payload))
    append = to(Append, previous_index=4, previous_term=2, commit=4, entries=entries)
    refuse(follower(), append, "malformed members|are not a quorum|at once")


def test_messages_from_this_node_and_from_unknown_nodes_are_refused() -> None:
    for sender in (0, OWN):
        refuse(leader(), to(AppendReply, term=4, sender=sender, index=4), "a raft message from node")


def test_an_unknown_round_confirms_nothing() -> None:
    refuse(leader(), to(HeartbeatReply, term=4, round=2**40), "answers round")


def test_a_snapshot_beyond_the_limit_is_refused() -> None:
    chunk = to(SnapshotChunk, index=9, index_term=3, total_bytes=1000, checksum=0, position=0, content=b"x")
    refuse(follower(), chunk, "maximum is 100")
