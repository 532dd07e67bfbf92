"""Golden conversations of Raft nodes: tests/golden/metadata/raft/*.txt.

A line that begins with ``>`` is a command, the lines below it are all that it brings about; what a command behind ``-`` brings
about is not shown. Commands::

    > nodes 1 2 3              begin with these nodes, all followers in term 0
    > tick 1 0.6               0.6 s pass on node 1
    > propose 1 a b            two commands on node 1
    > read 1 7                 a linearizable read with context 7
    > deliver 2                what is on the way to node 2 arrives there (without number: everything, until all is quiet)
    > drop 2                   what is on the way to node 2 is lost
    > hold 1 / > persist 1     node 1's writes do not get durable / they are now, and are again at once
    > crash 1 / > boot 1       node 1 forgets what is not durable / comes back
    > compact 1 5              node 1's log begins behind entry 5
    > transfer 1               node 1 hands over
    > log 1                    shows node 1's log
    > lease 1                  shows whether node 1 knows that nobody else leads
    > new 4                    a new disk for node 4, which begins with the members that the leader has
    > add 1 4                  node 1 adds node 4 as a learner
    > remove 1 2               node 1 removes node 2
    > members 1                shows the configuration that is in force on node 1

STRATALOG_GOLDEN=write rewrites the files from what happens now; look at the difference before you commit it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratalog_core.errors import NotLeader, StratalogError
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
    Snapshot,
)
from stratalog_metadata.raft.membership import decode_members
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

GOLDEN = Path(__file__).parents[3] / "golden" / "metadata" / "raft"


class FixedRandom(random.Random):
    """Random values by which node 1 has the shortest election timeout."""

    def __init__(self, node_id: int) -> None:
        super().__init__(node_id)
        self._value = (node_id - 1) / 10

    def random(self) -> float:
        return self._value


class Conversation:
    def __init__(self) -> None:
        self.cores: dict[int, Raft] = {}
        self.disks: dict[int, tuple[HardState, LogTail]] = {}
        self.writing: dict[int, list[Ready]] = {}
        self.held: set[int] = set()
        self.clocks: dict[int, float] = {}
        self.network: list[tuple[Message, str]] = []
        self.identities: dict[int, str] = {}
        self.joined: dict[int, Membership] = {}
        self.roles: dict[int, str] = {}
        self.lines: list[str] = []

    def run(self, command: str) -> list[str]:
        self.lines = []
        name, *arguments = command.split()
        getattr(self, f"do_{name}")(*arguments)
        self.turn_all()
        return self.lines

    # --- commands ----------------------------------------------------------------------------------------------------

    def do_nodes(self, *names: str) -> None:
        founders = Membership.of_voters(map(int, names))
        for node_id in map(int, names):
            self.disks[node_id] = (HardState(), LogTail())
            self.identities[node_id] = ""
            self.joined[node_id] = founders
            self.writing[node_id] = []
            self.clocks[node_id] = 0.0
        for node_id in self.disks:
            self.do_boot(str(node_id))

    def do_boot(self, name: str) -> None:
        node_id = int(name)
        hard_state, log = self.disks[node_id]
        self.cores[node_id] = Raft(
            RaftSettings(
                node_id=node_id,
                identity=self.identities[node_id],
                append_bytes_max=100,
                in_flight_max=2,
                snapshot_chunk_bytes=10,
            ),
            self.joined[node_id],
            hard_state=hard_state,
            log=LogTail(log.base_index, log.base_term, log.between(log.base_index + 1, log.last_index)),
            applied=log.base_index,
            random=FixedRandom(node_id),
            now=self.clocks[node_id],
        )
        self.roles[node_id] = "follower"

    def do_crash(self, name: str) -> None:
        del self.cores[int(name)]
        self.writing[int(name)] = []
        self.held.discard(int(name))

    def do_tick(self, name: str, seconds: str) -> None:
        node_id = int(name)
        self.clocks[node_id] = round(self.clocks[node_id] + float(seconds), 6)
        self.cores[node_id].tick(self.clocks[node_id])

    def do_propose(self, name: str, *payloads: str) -> None:
        try:
            self.cores[int(name)].propose([payload.encode() for payload in payloads])
        except NotLeader as refused:
            self.lines.append(f"{name} refuses: the leader is {refused.detail['leader']}")

    def do_new(self, name: str) -> None:
        node_id = int(name)
        leader = next(core for core in self.cores.values() if core.is_leader)
        self.disks[node_id] = (HardState(), LogTail())
        self.writing[node_id] = []
        self.identities[node_id] = self.identities[node_id] + "'" if node_id in self.identities else ""
        self.clocks.setdefault(node_id, self.clocks[leader.node_id])
        self.joined[node_id] = leader.membership
        self.do_boot(name)

    def do_add(self, name: str, added: str) -> None:
        member = Member(node_id=int(added), identity=self.identities[int(added)], address=added)
        self.change(name, lambda membership: membership.with_learner(member))

    def do_remove(self, name: str, removed: str) -> None:
        self.change(name, lambda membership: membership.without(int(removed)))

    def change(self, name: str, changed: Callable[[Membership], Membership]) -> None:
        core = self.cores[int(name)]
        try:
            core.change_members(changed(core.membership))
        except NotLeader as refused:
            self.lines.append(f"{name} refuses: the leader is {refused.detail['leader']}")
        except StratalogError as refused:
            self.lines.append(f"{name} refuses: {refused.message}")

    def do_members(self, name: str) -> None:
        core = self.cores[int(name)]
        self.lines.append(f"{name} members since {core.membership_index}: {show_members(core.membership)}")

    def do_read(self, name: str, context: str) -> None:
        self.cores[int(name)].read(int(context))

    def do_deliver(self, name: str = "") -> None:
        while self.deliver_batch(int(name or 0)) and not name:
            self.turn_all()

    def deliver_batch(self, node_id: int) -> bool:
        arriving = [sent for sent in self.network if node_id in (0, sent[0].receiver)]
        self.network = [sent for sent in self.network if sent not in arriving]
        for message, identity in arriving:
            if message.receiver in self.cores:
                self.cores[message.receiver].step(message, identity)
                self.turn(message.receiver)
        return bool(arriving)

    def do_drop(self, name: str) -> None:
        self.network = [sent for sent in self.network if sent[0].receiver != int(name)]

    def do_hold(self, name: str) -> None:
        self.held.add(int(name))

    def do_persist(self, name: str) -> None:
        node_id = int(name)
        self.held.discard(node_id)
        writing, self.writing[node_id] = self.writing[node_id], []
        for ready in writing:
            self.finish(node_id, ready)

    def do_compact(self, name: str, index: str) -> None:
        self.cores[int(name)].compact(int(index))
        self.disks[int(name)][1].compact(int(index))

    def do_transfer(self, name: str) -> None:
        if not self.cores[int(name)].transfer_leadership():
            self.lines.append(f"{name} has nobody to hand over to")

    def do_log(self, name: str) -> None:
        core = self.cores[int(name)]
        entries = core.log.between(core.log.base_index + 1, core.log.last_index)
        self.lines.append(f"{name} log after {core.log.base_index}: {show(entries)}; commit {core.commit}")

    def do_lease(self, name: str) -> None:
        self.lines.append(f"{name} {'has a' if self.cores[int(name)].has_lease else 'has no'} lease")

    # --- what happens ------------------------------------------------------------------------------------------------

    def turn_all(self) -> None:
        for node_id in list(self.cores):
            self.turn(node_id)

    def turn(self, node_id: int) -> None:
        core = self.cores[node_id]
        while (ready := core.ready()) is not None:
            self.note_role(node_id)
            self.send(ready.messages)
            self.carry_out(node_id, ready)
        core.validate_state()
        self.note_role(node_id)

    def carry_out(self, node_id: int, ready: Ready) -> None:
        if node_id in self.held and (ready.must_persist or self.writing[node_id]):
            self.writing[node_id].append(ready)
        else:
            self.finish(node_id, ready)
        if ready.committed:
            self.lines.append(f"{node_id} applies {show(ready.committed)}")
        self.lines.extend(f"{node_id} may serve read {read.context} at {read.index}" for read in ready.reads)
        self.lines.extend(f"{node_id} gives up read {context}" for context in ready.reads_lost)
        if ready.snapshot_wanted:
            core = self.cores[node_id]
            term = core.log.term_at(core.handed)
            assert term is not None
            core.offer_snapshot(Snapshot(index=core.handed, term=term, content=f"all up to {core.handed:02d}".encode()))

    def finish(self, node_id: int, ready: Ready) -> None:
        hard_state, log = self.disks[node_id]
        if ready.hard_state is not None:
            hard_state = ready.hard_state
            self.lines.append(f"{node_id} stores term {hard_state.term}, vote {hard_state.voted_for or 'nobody'}")
        if ready.snapshot is not None:
            self.lines.append(f"{node_id} stores snapshot at {ready.snapshot.index}: {ready.snapshot.content.decode()}")
            log.reset(ready.snapshot.index, ready.snapshot.term)
        if ready.entries:
            self.lines.append(f"{node_id} stores {show(ready.entries)}")
            log.truncate_after(ready.entries[0].index - 1)
            log.extend(ready.entries)
        self.disks[node_id] = (hard_state, log)
        self.cores[node_id].persisted(ready.number)
        self.send(ready.messages_after)

    def note_role(self, node_id: int) -> None:
        core = self.cores[node_id]
        role = f"{core.role.value} in term {core.term}"
        if core.role.value != self.roles[node_id].split()[0]:
            self.lines.append(f"{node_id} is {role}")
        self.roles[node_id] = role

    def send(self, messages: tuple[Message, ...]) -> None:
        self.network.extend((message, self.identities[message.sender]) for message in messages)
        self.lines.extend(f"  {message.sender} > {message.receiver}  {describe(message)}" for message in messages)


def show(entries: tuple[Entry, ...]) -> str:
    return " ".join(f"{entry.index}@{entry.term}{show_content(entry)}" for entry in entries) or "nothing"


def show_content(entry: Entry) -> str:
    match entry.kind:
        case EntryKind.NO_OP:
            return ""
        case EntryKind.MEMBERS:
            return f"=[{show_members(decode_members(entry.payload))}]"
        case EntryKind.COMMAND:
            return f"={entry.payload.decode()}"


def show_members(membership: Membership) -> str:
    members = membership.members
    return " ".join(f"{member.node_id}{member.identity}{'' if member.voter else ' learns'}" for member in members)


def describe(message: Message) -> str:
    match message:
        case VoteRequest() | VoteReply() | TimeoutNow():
            return describe_vote(message)
        case Append():
            entries = show(message.entries)
            return f"append {entries} after {message.previous_index}@{message.previous_term}, commit {message.commit}"
        case AppendReply() if message.rejected:
            return f"no match at {message.index}, perhaps at {message.hint_index}@{message.hint_term}, term {message.term}"
        case AppendReply():
            return f"durable up to {message.index}"
        case Heartbeat():
            return f"heartbeat, commit {message.commit}, round {message.round}, term {message.term}"
        case HeartbeatReply():
            return f"heard, round {message.round}"
        case SnapshotChunk():
            return f"snapshot at {message.index}, bytes from {message.position} of {message.total_bytes}"
        case SnapshotReply():
            return f"snapshot at {message.index}: go on at {message.position}"


def describe_vote(message: VoteRequest | VoteReply | TimeoutNow) -> str:
    if isinstance(message, TimeoutNow):
        return "take over"
    kind = "pre-vote" if message.pre else "vote"
    if isinstance(message, VoteReply):
        return f"{kind} {'granted' if message.granted else 'refused'}, term {message.term}"
    kind += " (transfer)" if message.transfer else ""
    return f"{kind}? term {message.term}, last {message.last_index}@{message.last_term}"


def replay(text: str) -> Iterator[str]:
    conversation = Conversation()
    for line in text.splitlines():
        if line.startswith("> "):
            yield line
            yield from conversation.run(line[2:])
        elif line.startswith("- "):
            yield line
            conversation.run(line[2:])
        elif not line or line.startswith("#"):
            yield line


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_conversation(path: Path) -> None:
    text = path.read_text()
    happened = "\n".join(replay(text)) + "\n"
    if os.environ.get("STRATALOG_GOLDEN") == "write":
        path.write_text(happened)
    assert happened == text


def test_there_are_conversations() -> None:
    assert len(list(GOLDEN.glob("*.txt"))) >= 8
