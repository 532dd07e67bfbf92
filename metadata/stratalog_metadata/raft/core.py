"""The Raft core, without I/O: messages, ticks and proposals in; one :class:`~stratalog_metadata.raft.ready.Ready` out.

After Ongaro's dissertation: pre-vote (9.6), check-quorum and the voter's lease that makes it safe (6.2, 9.6), membership
changes of one node at a time (4.1, 4.2), read index (6.4), snapshots (5), leadership transfer (3.10), and the leader's disk
written in parallel with its followers' (10.2.1).

Always: entries of a term are committed by counting only by the leader of that term, whose first entry is a NO_OP; the
committed prefix is never truncated; a vote or acknowledgement is sent only after what it promises is durable
(``Ready.messages_after``). ``validate_state`` asserts the rest.

It knows neither the time (``tick``), nor the disk (``persisted``), nor the network, nor the meaning of commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from stratalog_core.errors import NotLeader, Retriable
from stratalog_core.ports import Random
from stratalog_metadata.raft.checking import MessageChecks
from stratalog_metadata.raft.configurations import Configurations
from stratalog_metadata.raft.durability import Durability
from stratalog_metadata.raft.elections import Elections, Role
from stratalog_metadata.raft.following import Accepted, Following
from stratalog_metadata.raft.membership import Membership, encode_members
from stratalog_metadata.raft.messages import (
    Append,
    AppendReply,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatReply,
    LeadersMessage,
    Message,
    Reply,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from stratalog_metadata.raft.outbox import Outbox
from stratalog_metadata.raft.progress import Progress
from stratalog_metadata.raft.ready import HardState, Ready, Snapshot
from stratalog_metadata.raft.replication import Replication
from stratalog_metadata.raft.settings import RaftSettings
from stratalog_metadata.raft.tail import LogTail


class Raft:
    """One node. Every public method may change what ``ready`` returns next.

    ``applied`` is the index of the state machine's last entry; ``log`` is durable. ``membership`` was in force at ``applied``
    since ``membership_index`` (0: from the beginning); later configurations in ``log`` replace it.
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
        membership_index: int = 0,
    ) -> None:
        assert log.base_index <= applied <= log.last_index, "the state machine stands within the log"
        self.settings = settings
        self.log = log
        self.commit = applied
        self.handed = applied
        self._now = now
        unapplied = log.between(applied + 1, log.last_index)
        self.configurations = Configurations(membership_index, membership, unapplied)
        self._elections = Elections(settings, self.membership, hard_state, random, now)
        self._durability = Durability(hard_state, log.last_index)
        self._following = Following(
            settings.node_id, log, self.configurations, self._durability, settings.snapshot_bytes_max
        )  # fmt: skip
        self._checks = MessageChecks(settings, log, self.configurations)
        self._leading: Replication | None = None
        self._next_number = 1
        self._out = Outbox()

    # --- what a shell asks -------------------------------------------------------------------------------------------

    @property
    def node_id(self) -> int:
        return self.settings.node_id

    @property
    def membership(self) -> Membership:
        """The configuration in force: the last one in the log, committed or not."""
        return self.configurations.current

    @property
    def membership_index(self) -> int:
        """Index of the entry that holds this configuration; it is committed once ``commit`` reaches it."""
        return self.configurations.current_index

    @property
    def role(self) -> Role:
        return self._elections.role

    @property
    def term(self) -> int:
        return self._elections.term

    @property
    def leader(self) -> int:
        """Node id of this term's leader; 0 while it is not known."""
        return self._elections.leader

    @property
    def is_leader(self) -> bool:
        return self._leading is not None

    @property
    def stable(self) -> int:
        """Last index up to which this node's own log is durable."""
        return self._durability.stable

    @property
    def first_index_of_term(self) -> int:
        """Index of this leader's NO_OP. Once it is applied, the state machine contains every entry that was ever committed."""
        assert self._leading is not None
        return self._leading.first_index

    @property
    def in_touch(self) -> bool:
        """Whether this node leads, or has heard from the leader within an election timeout."""
        return self._elections.in_touch

    @property
    def has_lease(self) -> bool:
        """Whether this node leads and, by the clocks of a quorum, no other can lead yet. Tick it first."""
        return self._leading is not None and self._leading.has_lease()

    def next_deadline(self) -> float:
        """Monotonic time in seconds at which ``tick`` must be called next."""
        return self._leading.next_deadline() if self._leading is not None else self._elections.due_at

    # --- events ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Advance the clock to ``now`` (monotonic seconds). May be called at any time."""
        self._now = max(self._now, now)
        self._elections.tick(self._now, self.log.last, self._out.messages_after, may_campaign=self._may_campaign)
        if self._leading is None:
            return
        if self._leading.has_lost_quorum(self._now):
            self._follow(self.term, 0)
        else:
            self._leading.tick(self._now, self.commit, self._out.messages)
            self._promote()

    def propose(self, payloads: Sequence[bytes]) -> int:
        """Append commands to the leader's log. The first gets the returned index, the others follow.

        Raises ``NotLeader`` (detail ``leader``: node id, or 0) or ``Overloaded``; then nothing was appended.
        """
        self._require_leading().check_room(self.commit, payloads)
        return self._append_own([(EntryKind.COMMAND, payload) for payload in payloads])

    def read(self, context: int) -> None:
        """Begin a linearizable read (6.4). ``Ready`` returns ``context`` later. Raises ``NotLeader`` or ``Overloaded``."""
        if self._leading is None:
            raise NotLeader(f"node {self.node_id} is not the leader", leader=self.leader)
        self._leading.read(context)

    def transfer_leadership(self) -> bool:
        """Transfer leadership to the first follower that has the whole log (dissertation, section 3.10), and take no proposals
        meanwhile. Returns whether one receives it.
        """
        begun = self._leading is not None and self._leading.begin_transfer(self._now)
        self._send_transfer()
        return begun

    def _send_transfer(self) -> None:
        if self._leading is not None and (transferee := self._leading.take_transferee()):
            self._out.messages.append(TimeoutNow(sender=self.node_id, receiver=transferee, term=self.term))

    def unreachable(self, node_id: int) -> None:
        """Record that messages to ``node_id`` were lost: stop pipelining until it answers."""
        if self._leading is not None:
            self._leading.unreachable(node_id)

    def offer_snapshot(self, snapshot: Snapshot) -> None:
        """Answer ``Ready.snapshot_wanted`` with the state machine's content at or after the log's base."""
        if self._leading is not None and snapshot.index >= self.log.base_index:
            self._leading.offer_snapshot(snapshot, self.configurations.at(snapshot.index), self._out.messages)

    def compact(self, index: int) -> None:
        """Drop entries up to ``index``. All are applied and durable in the state store."""
        assert index <= min(self.handed, self.stable)
        self.log.compact(index)
        self.configurations.compacted(index)

    def change_members(self, membership: Membership) -> int:
        """Append a configuration, which is in force immediately. Returns its index.

        One voter changes at a time (dissertation, section 4.1). Raises ``NotLeader``; ``Unavailable`` while no entry of this
        term or the change before is not committed, or if too few of the new voters answer; ``Invalid``.
        """
        self._require_leading().check_change(membership, is_pending=self.membership_index > self.commit)
        return self._append_own([(EntryKind.MEMBERS, encode_members(membership))])

    def followers(self) -> Mapping[int, Progress]:
        """Progress of the other members as this leader knows it; empty if it is not the leader. Read only."""
        return self._leading.followers if self._leading is not None else {}

    def step(self, message: Message, identity: str = "") -> None:
        """Process a message from a node whose disk has ``identity``.

        Requests are accepted from any node, because the sender may know a later configuration (dissertation, section 4.1).
        Replies count only from a member with the identity that this node knows: a replaced disk has not promised what its
        predecessor promised.

        Raises ``Invalid`` for a message that no correct peer sends; then nothing has changed.
        """
        begun = self._leading.reads.round if self._leading is not None else 0
        self._checks.check(message, term=self.term, leader=self.leader, commit=self.commit, round_begun=begun)
        if isinstance(message, Reply):
            member = self.membership.find(message.sender)
            if member is None or member.identity != identity:
                return
        if message.term > self.term:
            if isinstance(message, VoteRequest) and self._elections.ignores(message):
                return
            self._join_term(message)
        elif message.term < self.term:
            self._answer_stale(message)
            return
        self._dispatch(message)
        self._begin_leading()

    def persisted(self, number: int) -> None:
        """Record that the ``Ready`` with this number, and every one before it, is durable."""
        for vote_term in self._durability.settle(number, self.log):
            self._elections.own_vote_is_durable(vote_term)
        self._begin_leading()
        if self._leading is not None:
            self._leading.own_match(self.stable)
            self._advance_commit()

    def ready(self) -> Ready | None:
        """The next instruction, or None. Several may be outstanding; the shell carries them out in order."""
        if self._leading is not None:
            self._leading.send_pending(self.commit, self._out.messages)
            self._out.reads.extend(self._leading.confirmed_reads())
        committed = self._take_committed()
        hard_state = self._durability.changed(self.term, self._elections.voted_for)
        wanted = self._leading is not None and self._leading.take_snapshot_wanted()
        if not (hard_state or committed or wanted or self._out or self._durability.unsaved_from <= self.log.last_index):
            return None
        entries = self._durability.unsaved(self.log)
        previous_term = self.log.term_at(self._durability.unsaved_from - 1) or 0
        ready = self._out.ready(self._next_number, hard_state, entries, previous_term, committed, snapshot_wanted=wanted)
        self._handed_out(ready)
        return ready

    # --- ready, in steps ---------------------------------------------------------------------------------------------

    def _take_committed(self) -> tuple[Entry, ...]:
        last = min(self.commit, self.stable, self.handed + self.settings.committed_max)
        if last <= self.handed:
            return ()
        committed = self.log.between(self.handed + 1, last)
        self.handed = last
        return committed

    def _handed_out(self, ready: Ready) -> None:
        self._next_number += 1
        self._out.clear()
        if ready.must_persist:
            self._durability.handed_out(ready, self._elections.take_own_vote(), self.log.last_index)

    # --- terms and roles ---------------------------------------------------------------------------------------------

    def _may_campaign(self) -> bool:
        return self.configurations.let_campaign(self.node_id, self.settings.identity, self.commit)

    def _follow(self, term: int, leader: int) -> None:
        self._elections.follow(term, leader)
        if self._leading is not None:
            self._out.reads_lost.extend(self._leading.reads.lose_all())
            self._leading = None

    def _begin_leading(self) -> None:
        """Begin to lead if the election was won: append a NO_OP of the new term."""
        if self.role is Role.LEADER and self._leading is None:
            self._leading = Replication(self.settings, self.membership, self.log, self.term, self._now)
            self._leading.own_match(self.stable)
            self._append_own([(EntryKind.NO_OP, b"")])

    def _join_term(self, message: Message) -> None:
        """Adopt the term of a message from a later term, unless it is a pre-vote."""
        match message:
            case VoteRequest(pre=True) | VoteReply(pre=True, granted=True):
                return
        self._follow(message.term, message.sender if isinstance(message, LeadersMessage) else 0)

    def _answer_stale(self, message: Message) -> None:
        """Send our term to a sender in an earlier one, which may be waiting because of it."""
        if isinstance(message, LeadersMessage):
            self._out.messages_after.append(self._following.refuse(message, self.term))
        elif isinstance(message, VoteRequest) and message.pre:
            self._elections.reply(message, self.term, False, self._out.messages_after)

    def _dispatch(self, message: Message) -> None:
        match message:
            case VoteRequest():
                self._elections.on_request(message, self.log.last, self._out.messages_after)
            case VoteReply():
                self._elections.on_reply(message, self.log.last, self._out.messages_after)
            case Append() | Heartbeat() | SnapshotChunk():
                self._on_leaders_message(message)
            case TimeoutNow() if self._leading is None and self._may_campaign():
                self._elections.campaign(self.log.last, self._out.messages_after, pre=False, transfer=True)
            case AppendReply() | HeartbeatReply() | SnapshotReply() if self._leading is not None:
                if self._leading.on_reply(message, self._out.messages):
                    self._advance_commit()
                self._send_transfer()

    # --- leading -----------------------------------------------------------------------------------------------------

    def _require_leading(self) -> Replication:
        if self._leading is None or self._now < self._leading.transfer_until:
            raise NotLeader(f"node {self.node_id} is not the leader", leader=0 if self.is_leader else self.leader)
        return self._leading

    def _append_own(self, proposals: Sequence[tuple[EntryKind, bytes]]) -> int:
        first = self.log.last_index + 1
        entries = [Entry(first + i, self.term, kind, payload) for i, (kind, payload) in enumerate(proposals)]
        self.log.extend(entries)
        if self.configurations.appended(entries):
            self._adopt_members()
        return first

    def _adopt_members(self) -> None:
        """Adopt the configuration in force, which may have changed."""
        self._elections.membership = self.membership
        if self._leading is not None:
            self._leading.reconfigure(self.membership)

    def _promote(self) -> None:
        """Make a learner that has caught up a voter. If that is not possible now, a later tick tries again."""
        assert self._leading is not None
        learner = self._leading.learner_to_promote()
        if learner:
            with suppress(Retriable):
                self.change_members(self.membership.with_voter(learner))

    def step_down(self) -> None:
        """Let a follower lead: the configuration without this node is committed (dissertation, 4.2.2), or its disk hangs."""
        assert self._leading is not None
        self._leading.send_pending(self.commit, self._out.messages)
        self.transfer_leadership()
        self._follow(self.term, 0)

    def _advance_commit(self) -> None:
        assert self._leading is not None
        agreed = self._leading.agreed_index()
        if agreed > self.commit and self.log.term_at(agreed) == self.term:
            self.commit = agreed
            self._leading.may_read = True
            if self.commit >= self.membership_index and self.node_id not in self.membership.voters:
                self.step_down()

    # --- following ---------------------------------------------------------------------------------------------------

    def _on_leaders_message(self, message: LeadersMessage) -> None:
        self._elections.heard_from_leader(message.sender)
        match message:
            case Heartbeat():
                if message.identity == self.settings.identity:
                    self._commit_to(message.commit)
                self._send_when_promised(
                    HeartbeatReply(sender=self.node_id, receiver=message.sender, term=self.term, round=message.round)
                )
            case Append():
                self._take(self._following.append(message, self.commit))
            case SnapshotChunk():
                self._take(self._following.snapshot_chunk(message, self.commit))

    def _take(self, accepted: Accepted) -> None:
        if self._elections.membership is not self.membership:
            self._adopt_members()
        if accepted.snapshot is not None:
            self._out.snapshot = accepted.snapshot
            self.handed = accepted.snapshot.index
        self._commit_to(accepted.commit)
        if isinstance(accepted.reply, SnapshotReply):
            self._send_when_promised(accepted.reply)
        else:
            self._out.messages_after.append(accepted.reply)

    def _commit_to(self, index: int) -> None:
        assert index <= self.log.last_index, "the leader committed what this node does not have"
        self.commit = max(self.commit, index)

    def _send_when_promised(self, message: Message) -> None:
        """Send answers that promise only this node's term: at once if the term is durable."""
        (self._out.messages if self._durability.promises(self.term) else self._out.messages_after).append(message)

    def validate_state(self) -> None:
        """Assert the invariants of one node."""
        assert self.log.base_index <= self.handed <= self.commit <= self.log.last_index
        assert self.log.last_term <= self.term
        assert self.is_leader == (self.role is Role.LEADER)
        assert self._elections.membership is self.membership
        self.configurations.validate_state(self.log.last_index)
        self._elections.validate_state()
        self._durability.validate_state(self.log.last_index)
        if self._leading is not None:
            self._leading.validate_state(self.stable)
