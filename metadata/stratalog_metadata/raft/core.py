"""Raft, sans-IO: messages, ticks and proposals in; one :class:`~stratalog_metadata.raft.ready.Ready` out.

After Ongaro's dissertation, with pre-vote (9.6), check-quorum and the voter's lease that makes it safe (6.2, 9.6),
read index (6.4), snapshots (5), leadership transfer (3.10), and the leader's disk written in parallel with its
followers' (10.2.1).

Always: a term's entries are committed by counting only by the leader of that term, whose first entry is a NO_OP; the
committed prefix is never truncated; a vote or an acknowledgement leaves only after what it promises is durable
(``Ready.messages_after``). ``validate_state`` asserts the rest.

It does not know the time (``tick``), the disk (``persisted``), the network or what commands mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from stratalog_core.errors import NotLeader, Overloaded
from stratalog_core.ports import Random
from stratalog_metadata.raft.elections import Election
from stratalog_metadata.raft.membership import Membership
from stratalog_metadata.raft.messages import (
    Append,
    AppendReply,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatReply,
    Message,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from stratalog_metadata.raft.ready import HardState, ReadReady, Ready, Snapshot
from stratalog_metadata.raft.replication import Replication
from stratalog_metadata.raft.settings import RaftSettings
from stratalog_metadata.raft.snapshots import IncomingSnapshot
from stratalog_metadata.raft.tail import LogTail


class Role(Enum):
    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre_candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


@dataclass(frozen=True, slots=True)
class _Outstanding:
    """A Ready that is being written: what its durability will mean."""

    number: int
    snapshot_index: int
    last_index: int
    last_term: int
    vote_term: int


class Raft:
    """One node. Every public method may change what ``ready`` hands out next.

    ``applied`` is where the state machine stands that comes with ``log``; all of ``log`` is durable.
    """

    def __init__(
        self,
        settings: RaftSettings,
        membership: Membership,
        *,
        hard_state: HardState,
        log: LogTail,
        applied: int,
        random: Random,
        now: float,
    ) -> None:
        assert settings.node_id in membership.voters, "a node votes in its own cluster"
        assert log.base_index <= applied <= log.last_index, "the state machine stands within the log"
        self.settings = settings
        self.membership = membership
        self.log = log
        self.role = Role.FOLLOWER
        self.term = hard_state.term
        self.voted_for = hard_state.voted_for
        self.leader = 0
        self.commit = applied
        self.handed = applied
        self.stable = log.last_index
        self._random = random
        self._now = now
        self._heard_at = now
        self._election: Election | None = None
        self._leading: Replication | None = None
        self._incoming = IncomingSnapshot()
        self._saved = hard_state
        self._unsaved_from = log.last_index + 1
        self._snapshot: Snapshot | None = None
        self._outstanding: deque[_Outstanding] = deque()
        self._next_number = 1
        self._messages: list[Message] = []
        self._messages_after: list[Message] = []
        self._reads: list[ReadReady] = []
        self._reads_lost: list[int] = []
        self._own_vote_term = 0
        self._election_at = now if self._is_alone else now + self._first_election_timeout()

    # --- what a shell asks -------------------------------------------------------------------------------------------

    @property
    def node_id(self) -> int:
        return self.settings.node_id

    @property
    def is_leader(self) -> bool:
        return self.role is Role.LEADER

    @property
    def first_index_of_term(self) -> int:
        """Index of this leader's NO_OP: once it is applied, the state machine holds all that was ever committed."""
        assert self._leading is not None
        return self._leading.first_index

    @property
    def in_touch(self) -> bool:
        """Whether this node leads, or has heard from the leader within an election timeout."""
        return self.is_leader or (self.leader != 0 and self._now < self._heard_at + self.settings.election_timeout_s)

    def next_deadline(self) -> float:
        """When ``tick`` has something to do."""
        return self._leading.next_deadline() if self._leading is not None else self._election_at

    # --- events ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time is now ``now`` (monotonic seconds). May be called at any time."""
        self._now = max(self._now, now)
        if self._leading is None:
            if self._now >= self._election_at:
                self._campaign(pre=not self._is_alone)
        elif self._leading.has_lost_quorum(self._now):
            self._follow(self.term, 0)
        else:
            self._leading.tick(self._now, self.commit, self._messages)

    def propose(self, payloads: Sequence[bytes]) -> int:
        """Append commands to the leader's log; the first gets the returned index, the others follow.

        Raises ``NotLeader`` (detail ``leader``: node id, or 0) or ``Overloaded``; then nothing was appended.
        """
        if self._leading is None or self._now < self._leading.transfer_until:
            raise NotLeader(f"node {self.node_id} does not lead", leader=0 if self.is_leader else self.leader)
        self._check_uncommitted(payloads)
        return self._append_own([(EntryKind.COMMAND, payload) for payload in payloads])

    def read(self, context: int) -> None:
        """Ask for a linearizable read; its ``context`` comes back in ``Ready.reads`` or ``Ready.reads_lost``.

        Raises ``NotLeader`` or ``Overloaded``.
        """
        if self._leading is None:
            raise NotLeader(f"node {self.node_id} does not lead", leader=self.leader)
        self._leading.read(context)

    def transfer_leadership(self) -> bool:
        """Hand over to a follower that has everything; says whether there is one. No proposals are taken meanwhile."""
        if self._leading is None:
            return False
        heir = self._leading.begin_transfer(self._now)
        if heir:
            self._messages.append(TimeoutNow(sender=self.node_id, receiver=heir, term=self.term))
        return heir != 0

    def unreachable(self, node_id: int) -> None:
        """Messages to ``node_id`` were lost: stop pipelining until it answers."""
        if self._leading is not None:
            self._leading.unreachable(node_id)

    def offer_snapshot(self, snapshot: Snapshot) -> None:
        """The answer to ``Ready.snapshot_wanted``: the state machine's content at or after the log's base."""
        if self._leading is not None and snapshot.index >= self.log.base_index:
            self._leading.offer_snapshot(snapshot, self._messages)

    def compact(self, index: int) -> None:
        """Forget entries up to ``index``, all applied and durably part of the state machine."""
        assert index <= min(self.handed, self.stable)
        self.log.compact(index)

    def step(self, message: Message) -> None:
        """A message has arrived."""
        assert message.receiver == self.node_id
        if message.sender not in self.membership.voters:
            return
        if message.term > self.term:
            if not self._accept_higher_term(message):
                return
        elif message.term < self.term:
            self._answer_stale(message)
            return
        self._dispatch(message)

    def persisted(self, number: int) -> None:
        """The Ready of this number, and so every one before it, is durable."""
        while self._outstanding and self._outstanding[0].number <= number:
            self._settle(self._outstanding.popleft())

    def ready(self) -> Ready | None:
        """What is to be done now; None if nothing. Several may be outstanding; they are carried out in order."""
        if self._leading is not None:
            self._leading.send_pending(self.commit, self._messages)
            if self._is_alone:
                self._reads.extend(self._leading.confirmed_reads())
        committed = self._take_committed()
        hard_state = self._changed_hard_state()
        wanted = self._leading is not None and self._leading.take_snapshot_wanted()
        if not (hard_state or committed or wanted or self._has_output()):
            return None
        ready = Ready(
            number=self._next_number,
            snapshot=self._snapshot,
            hard_state=hard_state,
            entries=self.log.between(self._unsaved_from, self.log.last_index) if self._has_unsaved() else (),
            previous_term=self.log.term_at(self._unsaved_from - 1) or 0,
            messages=tuple(self._messages),
            messages_after=tuple(self._messages_after),
            committed=committed,
            reads=tuple(self._reads),
            reads_lost=tuple(self._reads_lost),
            snapshot_wanted=wanted,
        )
        self._handed_out(ready)
        return ready

    # --- ready, in steps ---------------------------------------------------------------------------------------------

    def _has_unsaved(self) -> bool:
        return self._unsaved_from <= self.log.last_index

    def _has_output(self) -> bool:
        return bool(
            self._messages
            or self._messages_after
            or self._reads
            or self._reads_lost
            or self._snapshot is not None
            or self._has_unsaved()
        )

    def _take_committed(self) -> tuple[Entry, ...]:
        last = min(self.commit, self.stable, self.handed + self.settings.committed_max)
        if last <= self.handed:
            return ()
        committed = self.log.between(self.handed + 1, last)
        self.handed = last
        return committed

    def _changed_hard_state(self) -> HardState | None:
        hard_state = HardState(term=self.term, voted_for=self.voted_for)
        return hard_state if hard_state != self._saved else None

    def _handed_out(self, ready: Ready) -> None:
        self._next_number += 1
        self._messages.clear()
        self._messages_after.clear()
        self._reads.clear()
        self._reads_lost.clear()
        if not ready.must_persist:
            return
        last = ready.entries[-1] if ready.entries else None
        self._outstanding.append(
            _Outstanding(
                ready.number,
                ready.snapshot.index if ready.snapshot else 0,
                last.index if last else 0,
                last.term if last else 0,
                self._own_vote_term,
            )
        )
        self._own_vote_term = 0
        self._snapshot = None
        self._saved = ready.hard_state or self._saved
        self._unsaved_from = self.log.last_index + 1

    def _settle(self, done: _Outstanding) -> None:
        if done.snapshot_index and self.log.base_index >= done.snapshot_index:
            self.stable = max(self.stable, done.snapshot_index)
        if done.last_index and self.log.matches(done.last_index, done.last_term):
            self.stable = max(self.stable, done.last_index)
        if done.vote_term == self.term and self.role is Role.CANDIDATE:
            self._count_vote(self.node_id, True)
        if self._leading is not None:
            self._leading.own_match(self.stable)
            self._advance_commit()

    # --- terms and roles ---------------------------------------------------------------------------------------------

    @property
    def _is_alone(self) -> bool:
        return len(self.membership.voters) == 1

    def _election_timeout(self) -> float:
        return self.settings.election_timeout_s * (1.0 + self._random.random())

    def _first_election_timeout(self) -> float:
        """Shorter after a start: a live leader is heard of within a heartbeat, and pre-vote keeps the hasty harmless."""
        return self.settings.heartbeat_s * 2 + self.settings.election_timeout_s * self._random.random()

    def _follow(self, term: int, leader: int) -> None:
        assert term >= self.term
        if term > self.term:
            self.term = term
            self.voted_for = 0
        if self._leading is not None:
            self._reads_lost.extend(self._leading.reads.lose_all())
        self.role = Role.FOLLOWER
        self.leader = leader
        self._leading = None
        self._election = None
        self._rest_election_timer()

    def _rest_election_timer(self) -> None:
        self._election_at = self._now + self._election_timeout()

    def _accept_higher_term(self, message: Message) -> bool:
        """Whether to look at a message of a later term; usually it is joined first."""
        if isinstance(message, VoteRequest):
            if self.in_touch and not message.transfer:
                # A voter that hears its leader helps nobody to depose it (dissertation, 4.2.3).
                return False
            if not message.pre:
                self._follow(message.term, 0)
            return True
        if isinstance(message, VoteReply) and message.pre and message.granted:
            return True
        from_leader = isinstance(message, Append | Heartbeat | SnapshotChunk)
        self._follow(message.term, message.sender if from_leader else 0)
        return True

    def _answer_stale(self, message: Message) -> None:
        """Tell a sender of an earlier term, whom our own term may hold up, what the term is."""
        if isinstance(message, Append | Heartbeat | SnapshotChunk):
            self._after(AppendReply(sender=self.node_id, receiver=message.sender, term=self.term, index=0, rejected=True))
        elif isinstance(message, VoteRequest) and message.pre:
            self._reply_vote(message, self.term, False)

    def _dispatch(self, message: Message) -> None:
        match message:
            case VoteRequest():
                self._on_vote_request(message)
            case VoteReply():
                self._on_vote_reply(message)
            case Append() | Heartbeat() | SnapshotChunk():
                self._on_leaders_message(message)
            case TimeoutNow():
                if self._leading is None:
                    self._campaign(pre=False, transfer=True)
            case AppendReply() | HeartbeatReply() | SnapshotReply():
                self._on_followers_reply(message)

    # --- elections ---------------------------------------------------------------------------------------------------

    def _campaign(self, *, pre: bool, transfer: bool = False) -> None:
        self.role = Role.PRE_CANDIDATE if pre else Role.CANDIDATE
        self.leader = 0
        self._election = Election()
        self._rest_election_timer()
        if not pre:
            self.term += 1
            self.voted_for = self.node_id
            self._own_vote_term = self.term
        for other in self.membership.others(self.node_id):
            self._after(
                VoteRequest(
                    sender=self.node_id,
                    receiver=other,
                    term=self.term + 1 if pre else self.term,
                    last_index=self.log.last_index,
                    last_term=self.log.last_term,
                    pre=pre,
                    transfer=transfer,
                )
            )
        if pre:
            self._count_vote(self.node_id, True)

    def _on_vote_request(self, request: VoteRequest) -> None:
        free = self.voted_for == request.sender or (self.voted_for == 0 and self.leader == 0)
        free = free or (request.pre and request.term > self.term)
        granted = free and (request.last_term, request.last_index) >= (self.log.last_term, self.log.last_index)
        if granted and not request.pre:
            self.voted_for = request.sender
            self._rest_election_timer()
        self._reply_vote(request, request.term if granted else self.term, granted)

    def _reply_vote(self, request: VoteRequest, term: int, granted: bool) -> None:
        self._after(VoteReply(sender=self.node_id, receiver=request.sender, term=term, granted=granted, pre=request.pre))

    def _on_vote_reply(self, reply: VoteReply) -> None:
        expected = Role.PRE_CANDIDATE if reply.pre else Role.CANDIDATE
        if self.role is not expected or (reply.pre and reply.granted and reply.term != self.term + 1):
            return
        self._count_vote(reply.sender, reply.granted)

    def _count_vote(self, voter: int, granted: bool) -> None:
        assert self._election is not None
        self._election.count(voter, granted)
        if self._election.is_won(self.membership):
            if self.role is Role.PRE_CANDIDATE:
                self._campaign(pre=False)
            else:
                self._lead()
        elif self._election.is_lost(self.membership):
            self._follow(self.term, 0)

    def _lead(self) -> None:
        assert self.voted_for == self.node_id
        self.role = Role.LEADER
        self.leader = self.node_id
        self._election = None
        self._leading = Replication(self.settings, self.membership, self.log, self.term, self._now)
        self._leading.own_match(self.stable)
        self._append_own([(EntryKind.NO_OP, b"")])

    # --- leading -----------------------------------------------------------------------------------------------------

    def _check_uncommitted(self, payloads: Sequence[bytes]) -> None:
        waiting = self.log.last_index - self.commit
        if waiting + len(payloads) > self.settings.uncommitted_entries_max:
            raise Overloaded(f"{waiting} proposals are not committed yet; the most is {self.settings.uncommitted_entries_max}")
        if not waiting:
            return
        waiting_bytes = sum(len(entry.payload) for entry in self.log.between(self.commit + 1, self.log.last_index))
        if waiting_bytes + sum(map(len, payloads)) > self.settings.uncommitted_bytes_max:
            raise Overloaded(f"{waiting_bytes} proposed bytes are not committed yet")

    def _append_own(self, proposals: Sequence[tuple[EntryKind, bytes]]) -> int:
        first = self.log.last_index + 1
        self.log.extend([Entry(first + i, self.term, kind, payload) for i, (kind, payload) in enumerate(proposals)])
        return first

    def _on_followers_reply(self, reply: AppendReply | HeartbeatReply | SnapshotReply) -> None:
        if self._leading is None:
            return
        match reply:
            case AppendReply():
                if self._leading.on_append_reply(reply):
                    self._advance_commit()
            case HeartbeatReply():
                self._reads.extend(self._leading.on_heartbeat_reply(reply, self._messages))
            case SnapshotReply():
                self._leading.on_snapshot_reply(reply, self._messages)

    def _advance_commit(self) -> None:
        assert self._leading is not None
        agreed = self._leading.agreed_index()
        if agreed > self.commit and self.log.term_at(agreed) == self.term:
            self.commit = agreed
            self._leading.may_read = True

    # --- following ---------------------------------------------------------------------------------------------------

    def _on_leaders_message(self, message: Append | Heartbeat | SnapshotChunk) -> None:
        assert self.role is not Role.LEADER, "two leaders in one term"
        if self.role is not Role.FOLLOWER:
            self._follow(self.term, message.sender)
        self.leader = message.sender
        self._heard_at = self._now
        self._rest_election_timer()
        match message:
            case Append():
                self._on_append(message)
            case Heartbeat():
                self._commit_to(message.commit)
                self._now_or_after(
                    HeartbeatReply(sender=self.node_id, receiver=message.sender, term=self.term, round=message.round)
                )
            case SnapshotChunk():
                self._on_snapshot_chunk(message)

    def _on_append(self, append: Append) -> None:
        if append.previous_index < self.commit and append.previous_index < self.log.base_index:
            self._reply_append(append, self.commit)
            return
        if not self.log.matches(append.previous_index, append.previous_term):
            self._reject(append)
            return
        conflict = self.log.conflict(append.entries)
        if conflict is not None:
            assert conflict > self.commit, "a committed entry would be overwritten"
            self._replace_suffix(conflict, append.entries)
        last = append.previous_index + len(append.entries)
        self._commit_to(min(append.commit, last))
        self._reply_append(append, last)

    def _replace_suffix(self, first: int, entries: Sequence[Entry]) -> None:
        self.log.truncate_after(first - 1)
        self.stable = min(self.stable, first - 1)
        self._unsaved_from = min(self._unsaved_from, first)
        self.log.extend([entry for entry in entries if entry.index >= first])

    def _reply_append(self, append: Append, index: int) -> None:
        self._after(AppendReply(sender=self.node_id, receiver=append.sender, term=self.term, index=index))

    def _reject(self, append: Append) -> None:
        hint_index, hint_term = self.log.last_not_after(append.previous_index, append.previous_term)
        self._after(
            AppendReply(
                sender=self.node_id,
                receiver=append.sender,
                term=self.term,
                index=append.previous_index,
                rejected=True,
                hint_index=hint_index,
                hint_term=hint_term,
            )
        )

    def _commit_to(self, index: int) -> None:
        assert index <= self.log.last_index, "the leader committed what this node does not have"
        self.commit = max(self.commit, index)

    def _on_snapshot_chunk(self, chunk: SnapshotChunk) -> None:
        if chunk.index <= self.commit or self.log.matches(chunk.index, chunk.index_term):
            self._commit_to(max(self.commit, chunk.index) if chunk.index > self.commit else self.commit)
            self._after(AppendReply(sender=self.node_id, receiver=chunk.sender, term=self.term, index=self.commit))
            return
        assert chunk.total_bytes <= self.settings.snapshot_bytes_max, "a snapshot beyond the limit"
        whole = self._incoming.add(chunk)
        if whole is None:
            reply = SnapshotReply(
                sender=self.node_id,
                receiver=chunk.sender,
                term=self.term,
                index=chunk.index,
                position=self._incoming.position,
            )
            self._now_or_after(reply)
            return
        self._restore(whole)
        self._after(AppendReply(sender=self.node_id, receiver=chunk.sender, term=self.term, index=whole.index))

    def _restore(self, snapshot: Snapshot) -> None:
        self.log.reset(snapshot.index, snapshot.term)
        self.commit = self.handed = snapshot.index
        self.stable = 0
        self._unsaved_from = snapshot.index + 1
        self._snapshot = snapshot

    # --- sending -----------------------------------------------------------------------------------------------------

    def _after(self, message: Message) -> None:
        self._messages_after.append(message)

    def _now_or_after(self, message: Message) -> None:
        """Answers that promise only this node's term: they may leave at once if that is durable."""
        if self._saved.term == self.term and not self._outstanding:
            self._messages.append(message)
        else:
            self._messages_after.append(message)

    # --- assertions --------------------------------------------------------------------------------------------------

    def validate_state(self) -> None:
        """Assert what must always hold within one node."""
        assert self.log.base_index <= self.handed <= self.commit <= self.log.last_index
        assert self.stable <= self.log.last_index
        assert self.log.last_term <= self.term
        assert self.voted_for == 0 or self.voted_for in self.membership.voters
        assert (self._leading is not None) == (self.role is Role.LEADER)
        assert (self._election is not None) == (self.role in (Role.CANDIDATE, Role.PRE_CANDIDATE))
        assert self.role is not Role.LEADER or (self.leader == self.node_id and self.voted_for == self.node_id)
        assert self.role is Role.LEADER or self.leader != self.node_id
        assert all(earlier.number < later.number for earlier, later in pairwise(self._outstanding))
        if self._leading is not None:
            self._leading.validate_state(self.stable)
