"""The leader's side of replication: followers' progress, heartbeats, reads, snapshots in transfer, and its quorum.

Messages are appended to the list that is passed in. All of them may leave before anything is durable on the leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stratalog_core.errors import Overloaded
from stratalog_metadata.raft.membership import Membership, check_change
from stratalog_metadata.raft.messages import (
    Append,
    AppendReply,
    Heartbeat,
    HeartbeatReply,
    Message,
    SnapshotReply,
)
from stratalog_metadata.raft.progress import Flow, Progress
from stratalog_metadata.raft.reads import ReadQueue
from stratalog_metadata.raft.ready import ReadReady, Snapshot
from stratalog_metadata.raft.settings import RaftSettings
from stratalog_metadata.raft.snapshots import OutgoingSnapshot
from stratalog_metadata.raft.tail import LogTail

ROUNDS_KEPT: Final = 1_000
"""Rounds of heartbeats whose start time is kept; an answer to an older round does not extend the lease."""


class CatchUp:
    """Decides when a learner has caught up far enough to vote (``done``). Times are monotonic seconds.

    Ongaro's dissertation, section 4.2.1: the leader replicates in rounds, each up to the end of the log at the beginning of
    the round. After a round that took no longer than an election timeout the learner can vote without delaying commits.
    """

    __slots__ = ("_begun_at", "_round_s_max", "_target", "done")

    def __init__(self, last_index: int, now: float, round_s_max: float) -> None:
        self.done = False
        self._target = last_index
        self._begun_at = now
        self._round_s_max = round_s_max

    def acknowledged(self, match: int, last_index: int, now: float) -> None:
        """Record that the learner stores all entries up to ``match``; the leader's log ends at ``last_index``."""
        if match < self._target:
            return
        self.done = now - self._begun_at <= self._round_s_max or match >= last_index
        self._target = last_index
        self._begun_at = now


class Replication:
    """One leader's term. ``first_index`` is the index of its NO_OP; reads may start once it is committed (``may_read``).
    Until ``transfer_until`` no proposals are taken, because a follower is taking over.
    """

    def __init__(self, settings: RaftSettings, membership: Membership, log: LogTail, term: int, now: float) -> None:
        self.reads = ReadQueue()
        self.may_read = False
        self.transfer_until = now
        self.first_index = log.last_index + 1
        self._settings = settings
        self._log = log
        self._term = term
        self._own_match = 0
        self.followers: dict[int, Progress] = {}
        self._catching_up: dict[int, CatchUp] = {}
        self._rounds: dict[int, int] = {}
        self._now = now
        self.reconfigure(membership)
        self._begun_at: dict[int, float] = {}
        self._gave_up_lease = False
        self._is_transferring = False
        self._heartbeat_at = now
        self._quorum_at = now + settings.election_timeout_s
        self._outgoing: OutgoingSnapshot | None = None
        self._snapshot_wanted = False

    # --- members ----------------------------------------------------------------------------------------------------

    def reconfigure(self, membership: Membership) -> None:
        """Adopt ``membership`` as the configuration in force."""
        self._membership = membership
        others, learners = membership.others(self._settings.node_id), membership.learners
        for gone in self.followers.keys() - set(others):
            del self.followers[gone]
            self._rounds.pop(gone, None)
        for other in others:
            if other not in self.followers:
                self.followers[other] = Progress(self._log.last_index + 1, self._settings.in_flight_max)
        self._catching_up = {
            learner: self._catching_up.get(learner)
            or CatchUp(self._log.last_index, self._now, self._settings.election_timeout_s)
            for learner in learners
        }

    def heard_lately(self) -> set[int]:
        """Node ids that answered within an election timeout, the leader's included."""
        since = self._now - self._settings.election_timeout_s
        heard = {node_id for node_id, known in self.followers.items() if known.heard_at is not None and known.heard_at >= since}
        return heard | {self._settings.node_id}

    def learner_to_promote(self) -> int:
        """Node id of a learner that has caught up and answers; 0 if there is none."""
        if not self._catching_up:
            return 0
        heard = self.heard_lately()
        return next((learner for learner, rounds in self._catching_up.items() if rounds.done and learner in heard), 0)

    def check_change(self, membership: Membership, *, is_pending: bool) -> None:
        """Raises ``Unavailable`` or ``Invalid`` if ``membership`` cannot be appended now."""
        check_change(
            before=self._membership,
            after=membership,
            term_has_committed=self.may_read,
            is_pending=is_pending,
            heard=self.heard_lately(),
        )

    # --- time --------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        return min(self._heartbeat_at, self._quorum_at)

    def has_lost_quorum(self, now: float) -> bool:
        """Check once per election timeout whether fewer than a quorum have answered since the last check."""
        if now < self._quorum_at:
            return False
        self._quorum_at = now + self._settings.election_timeout_s
        active = {node_id for node_id, follower in self.followers.items() if follower.active} | {self._settings.node_id}
        for follower in self.followers.values():
            follower.active = False
        return not self._membership.is_quorum(active)

    def tick(self, now: float, commit: int, out: list[Message]) -> None:
        self._now = now
        if now >= self._heartbeat_at:
            self._begin_round(commit, out)

    def _begin_round(self, commit: int, out: list[Message]) -> None:
        """Send heartbeats to all members. They keep followers from starting elections, and their replies confirm
        leadership.
        """
        self._heartbeat_at = self._now + self._settings.heartbeat_s
        number = self.reads.begin_round(commit, may_read=self.may_read)
        self._begun_at[number] = self._now
        self._begun_at.pop(number - ROUNDS_KEPT, None)
        for member in self._membership.members:
            if member.node_id == self._settings.node_id:
                continue
            out.append(
                Heartbeat(
                    sender=self._settings.node_id,
                    receiver=member.node_id,
                    term=self._term,
                    commit=min(self.followers[member.node_id].match, commit),
                    round=self.reads.round,
                    identity=member.identity,
                )
            )

    def has_lease(self) -> bool:
        """Whether no other node can lead yet: voters that heard a heartbeat elect nobody for an election timeout.

        Measured from the start of the last round that a quorum has answered. A leader that transfers leadership has no lease.
        """
        if self._gave_up_lease:
            return False
        confirmed = self._membership.agreed({**self._rounds, self._settings.node_id: self.reads.round})
        begun_at = self._begun_at.get(confirmed)
        alone = self._membership.voters == {self._settings.node_id}
        return alone or (begun_at is not None and self._now < begun_at + self._settings.election_timeout_s)

    # --- proposals ---------------------------------------------------------------------------------------------------

    def check_room(self, commit: int, payloads: Sequence[bytes]) -> None:
        """Raises ``Overloaded`` if too many entries or bytes would wait to be committed."""
        settings, log = self._settings, self._log
        waiting = log.last_index - commit
        if waiting + len(payloads) > settings.uncommitted_entries_max:
            raise Overloaded(f"{waiting} proposals are not committed yet; maximum is {settings.uncommitted_entries_max}")
        if not waiting:
            return
        waiting_bytes = sum(len(entry.payload) for entry in log.between(commit + 1, log.last_index))
        if waiting_bytes + sum(map(len, payloads)) > settings.uncommitted_bytes_max:
            raise Overloaded(
                f"{waiting_bytes} proposed bytes are not committed yet; maximum is {settings.uncommitted_bytes_max}"
            )

    def on_reply(self, reply: AppendReply | HeartbeatReply | SnapshotReply, out: list[Message]) -> bool:
        """Process a reply. Returns whether the commit index may have moved."""
        match reply:
            case AppendReply():
                return self._on_append_reply(reply)
            case HeartbeatReply():
                self._on_heartbeat_reply(reply, out)
            case SnapshotReply():
                self._on_snapshot_reply(reply, out)
        return False

    # --- commit ------------------------------------------------------------------------------------------------------

    def own_match(self, index: int) -> None:
        """Entries up to ``index`` are durable on the leader itself."""
        self._own_match = index

    def agreed_index(self) -> int:
        matches = {node_id: follower.match for node_id, follower in self.followers.items()}
        return self._membership.agreed({**matches, self._settings.node_id: self._own_match})

    # --- appends -----------------------------------------------------------------------------------------------------

    def send_pending(self, commit: int, out: list[Message]) -> None:
        """Begin a round for waiting reads, and send each follower what it can take."""
        if self.reads.waiting and self.may_read:
            self._begin_round(commit, out)
        for node_id, follower in self.followers.items():
            self._send_appends(node_id, follower, commit, out)

    def _send_appends(self, node_id: int, follower: Progress, commit: int, out: list[Message]) -> None:
        while follower.flow is not Flow.SNAPSHOT and follower.may_send():
            if follower.next <= self._log.base_index:
                self._begin_snapshot(node_id, follower, out)
                return
            entries = self._log.batch(follower.next, self._settings.append_bytes_max)
            news = follower.flow is Flow.REPLICATE and follower.commit_sent < commit
            if not entries and not news and follower.flow is Flow.REPLICATE:
                return
            previous_index = follower.next - 1
            previous_term = self._log.term_at(previous_index)
            assert previous_term is not None
            out.append(
                Append(
                    sender=self._settings.node_id,
                    receiver=node_id,
                    term=self._term,
                    previous_index=previous_index,
                    previous_term=previous_term,
                    commit=commit,
                    entries=entries,
                )
            )
            follower.commit_sent = commit
            if not entries:
                follower.paused = follower.flow is Flow.PROBE
                return
            follower.sent(entries[-1].index)

    def _on_append_reply(self, reply: AppendReply) -> bool:
        follower = self.followers[reply.sender]
        follower.heard(self._now)
        if not reply.rejected:
            news = follower.acknowledged(min(reply.index, self._log.last_index))
            self._forget_snapshot()
            if (rounds := self._catching_up.get(reply.sender)) is not None:
                rounds.acknowledged(follower.match, self._log.last_index, self._now)
            return news
        next_index, _ = self._log.last_not_after(reply.hint_index, reply.hint_term)
        follower.rejected(reply.index, next_index + 1)
        return False

    def unreachable(self, node_id: int) -> None:
        follower = self.followers.get(node_id)
        if follower is not None and follower.flow is Flow.REPLICATE:
            follower.probe()
            follower.paused = True

    # --- reads -------------------------------------------------------------------------------------------------------

    def read(self, context: int) -> None:
        if len(self.reads.waiting) + len(self.reads.confirming) >= self._settings.reads_max:
            raise Overloaded(f"{self._settings.reads_max} reads are waiting, which is the maximum: retry later")
        self.reads.waiting.append(context)

    def _on_heartbeat_reply(self, reply: HeartbeatReply, out: list[Message]) -> None:
        follower = self.followers[reply.sender]
        stuck = follower.flow is Flow.SNAPSHOT and not follower.paused
        follower.heard(self._now)
        follower.heard_heartbeat()
        if stuck:
            self._send_chunk(reply.sender, follower, max(follower.snapshot_position, 0), out)
        self._rounds[reply.sender] = max(reply.round, self._rounds.get(reply.sender, 0))

    def confirmed_reads(self) -> list[ReadReady]:
        if not self.reads.confirming:
            return []
        return self.reads.confirmed(self._membership, {**self._rounds, self._settings.node_id: self.reads.round})

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def _begin_snapshot(self, node_id: int, follower: Progress, out: list[Message]) -> None:
        if self._outgoing is None or self._outgoing.snapshot.index < self._log.base_index:
            self._outgoing = None
            self._snapshot_wanted = True
            # The log may have been compacted past what it has: send nothing until it answers.
            follower.probe()
            follower.paused = True
            return
        follower.await_snapshot(self._outgoing.snapshot.index)
        self._send_chunk(node_id, follower, 0, out)

    def take_snapshot_wanted(self) -> bool:
        wanted, self._snapshot_wanted = self._snapshot_wanted, False
        return wanted

    def offer_snapshot(self, snapshot: Snapshot, membership: Membership, out: list[Message]) -> None:
        """Offer a snapshot; ``membership`` was in force at its index."""
        self._outgoing = OutgoingSnapshot(snapshot, membership)
        for node_id, follower in self.followers.items():
            if follower.next <= self._log.base_index and follower.flow is not Flow.SNAPSHOT:
                self._begin_snapshot(node_id, follower, out)

    def _forget_snapshot(self) -> None:
        if self._outgoing is not None and not any(f.flow is Flow.SNAPSHOT for f in self.followers.values()):
            self._outgoing = None

    def _send_chunk(self, node_id: int, follower: Progress, position: int, out: list[Message]) -> None:
        if self._outgoing is None or self._outgoing.snapshot.index != follower.snapshot_index:
            follower.probe()
            return
        follower.snapshot_position = position
        follower.paused = True
        out.append(
            self._outgoing.chunk(self._settings.node_id, node_id, self._term, position, self._settings.snapshot_chunk_bytes)
        )

    def _on_snapshot_reply(self, reply: SnapshotReply, out: list[Message]) -> None:
        follower = self.followers[reply.sender]
        follower.heard(self._now)
        if follower.chunk_wanted(reply.index, reply.position):
            self._send_chunk(reply.sender, follower, reply.position, out)

    # --- transfer ----------------------------------------------------------------------------------------------------

    def begin_transfer(self, now: float) -> bool:
        """Take no proposals for an election timeout, so that a voter catches up. Returns whether there is one to wait for."""
        self._is_transferring = any(self._is_replicating(node_id) for node_id in self.followers)
        if self._is_transferring:
            self.transfer_until = now + self._settings.election_timeout_s
            self._gave_up_lease = True
        return self._is_transferring

    def take_transferee(self) -> int:
        """Node id of a voter that has the whole log and is to take over, once in a transfer; else 0."""
        if not self._is_transferring or self._now >= self.transfer_until:
            return 0
        for node_id, follower in self.followers.items():
            if self._is_replicating(node_id) and follower.match == self._log.last_index:
                self._is_transferring = False
                return node_id
        return 0

    def _is_replicating(self, node_id: int) -> bool:
        return node_id in self._membership.voters and self.followers[node_id].flow is Flow.REPLICATE

    # --- assertions --------------------------------------------------------------------------------------------------

    def validate_state(self, stable: int) -> None:
        assert self._own_match <= stable <= self._log.last_index
        for follower in self.followers.values():
            assert follower.match < follower.next, "what matches is not sent again"
            assert follower.match <= self._log.last_index
            assert len(follower.in_flight) <= follower.in_flight_max
