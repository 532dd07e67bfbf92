"""One consumer group of the classic protocol, as a state machine that does no I/O.

Each public method is one event; it takes the time and returns instructions. It serves JoinGroup v0–9, SyncGroup v0–5,
Heartbeat v0–4 and LeaveGroup v0–5; fields that older versions lack have defaults. Clients compute the assignment, so eager
and cooperative assignors need no distinction here.

Differences from Apache Kafka: when a member repeats JoinGroup or SyncGroup, the earlier request is answered with
REBALANCE_IN_PROGRESS instead of never; an absent static member is not dropped at the sync time-out.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.joining import Instructions, JoiningGroup
from stratalog_broker.coordination.groups.core.membership import Member
from stratalog_broker.coordination.groups.core.messages import (
    GroupImage,
    GroupLimits,
    Instant,
    LeavingMember,
    SyncAnswer,
    SyncRequest,
)
from stratalog_broker.coordination.groups.core.rebalance import NEVER_MS, GroupState


class Group(JoiningGroup):
    """Handles the requests of one group. Not thread-safe; no call blocks."""

    # -- SyncGroup

    def sync(self, request: SyncRequest, now: Instant) -> Instructions:
        """Submit the assignment of a generation (leader) and request one's own part (all members)."""
        error = self._check_sync(request)
        if error is not ErrorCode.none:
            self._answer(request.ticket, SyncAnswer(error=error))
            return self._drain()
        member = self.membership.members[request.member_id]
        self.unsynced.discard(member.member_id)
        if self.state is GroupState.STABLE:
            self._expect_heartbeat(member, now)
            self._answer(request.ticket, self._sync_answer(member))
        else:
            self._answer_sync(member, SyncAnswer(error=ErrorCode.rebalance_in_progress))
            member.sync_ticket = request.ticket
            if member.member_id == self.membership.leader:
                self._assign(dict(request.assignments), now)
        return self._drain()

    def _check_sync(self, request: SyncRequest) -> ErrorCode:
        error = self._check_member(request.member_id, request.group_instance_id, request.generation)
        if error is not ErrorCode.none:
            return error
        if request.protocol_type not in (None, self.protocol_type) or request.protocol_name not in (None, self.protocol_name):
            return ErrorCode.inconsistent_group_protocol
        return ErrorCode.rebalance_in_progress if self.state is GroupState.PREPARING_REBALANCE else ErrorCode.none

    def _assign(self, assignments: dict[str, bytes], now: Instant) -> None:
        """Persist the leader's assignment; members get it only once it is in the log."""
        if self._assigning is not None:
            return
        members = self.membership.members.values()
        stored = sum(len(m.metadata_for(self.protocol_name)) + len(assignments.get(m.member_id, b"")) for m in members)
        if stored > self.limits.group_bytes_max:
            self._fail_assignment(ErrorCode.message_too_large, now)
            return
        for member in members:
            member.assignment = assignments.get(member.member_id, b"")
        self._assigning = self._persist()

    def _fail_assignment(self, error: ErrorCode, now: Instant) -> None:
        self._abort_sync(error)
        self._start_rebalance(now)

    # -- outcome of a Persist

    def on_persisted(self, token: int, error: ErrorCode, now: Instant) -> Instructions:
        """Process the outcome of a ``Persist``: ``none`` if the image is durably in the log, else failed or unknown."""
        replaced = self._replacements.pop(token, None)
        if replaced is not None:
            self._finish_replacement(replaced, error)
        elif token == self._assigning:
            self._assigning = None
            if error is ErrorCode.none:
                self._complete_sync(now)
            else:
                self._fail_assignment(error, now)
        return self._drain()

    # -- Heartbeat, LeaveGroup, time, deletion

    def heartbeat(self, member_id: str, group_instance_id: str | None, generation: int, now: Instant) -> ErrorCode:
        """Extend a member's session; return REBALANCE_IN_PROGRESS if it has to rejoin."""
        error = self._check_member(member_id, group_instance_id, generation)
        if error is not ErrorCode.none:
            return error
        self._expect_heartbeat(self.membership.members[member_id], now)
        return ErrorCode.rebalance_in_progress if self.state is GroupState.PREPARING_REBALANCE else ErrorCode.none

    def leave(self, leaving: LeavingMember, now: Instant) -> tuple[ErrorCode, Instructions]:
        """Remove a member immediately, instead of after its session time-out."""
        error = self._leave(leaving, now)
        return error, self._drain()

    def _leave(self, leaving: LeavingMember, now: Instant) -> ErrorCode:
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        member_id = self.membership.find(leaving.member_id, leaving.group_instance_id)
        if member_id is None:
            return ErrorCode.unknown_member_id
        if self.pending_members.pop(member_id, None) is not None:
            self._maybe_complete_join(now)
            return ErrorCode.none
        error = self.membership.validate(member_id, leaving.group_instance_id)
        if error is ErrorCode.none:
            self._remove(member_id, now)
        return error

    def tick(self, now: Instant) -> Instructions:
        """End phases and sessions whose deadline has passed. Call it at ``wake_at_ms`` or at any other time."""
        if now.monotonic_ms >= self._phase_deadline_ms:
            if self.state is GroupState.PREPARING_REBALANCE:
                self._join_deadline(now)
            else:
                self._sync_deadline(now)
        self._expire_members(now)
        deadlines = [member.session_deadline_ms for member in self.membership.members.values()]
        self.wake_at_ms = min([self._phase_deadline_ms, *self.pending_members.values(), *deadlines], default=NEVER_MS)
        return self._drain()

    def delete(self, now: Instant) -> ErrorCode:
        """DeleteGroups: move a group without members to DEAD; return NON_EMPTY_GROUP if it has members."""
        if self.state is GroupState.DEAD:
            return ErrorCode.group_id_not_found
        if self.state is not GroupState.EMPTY:
            return ErrorCode.non_empty_group
        self._move_to(GroupState.DEAD, now)
        return ErrorCode.none

    # -- OffsetCommit

    def check_commit(self, member_id: str, group_instance_id: str | None, generation: int, now: Instant) -> ErrorCode:
        """Return whether a commit is allowed, as a code, and extend the member's session.

        Members of this generation may commit; clients without a generation may commit while the group is empty.
        """
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        if generation < 0 and self.state is GroupState.EMPTY:
            return ErrorCode.none
        error = self._check_member(member_id, group_instance_id, generation)
        if error is not ErrorCode.none:
            return error
        self._expect_heartbeat(self.membership.members[member_id], now)
        return ErrorCode.rebalance_in_progress if self.state is GroupState.COMPLETING_REBALANCE else ErrorCode.none

    def _check_member(self, member_id: str, group_instance_id: str | None, generation: int) -> ErrorCode:
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        error = self.membership.validate(member_id, group_instance_id)
        if error is not ErrorCode.none:
            return error
        return ErrorCode.none if generation == self.generation else ErrorCode.illegal_generation

    # -- loading

    @classmethod
    def from_image(cls, image: GroupImage, limits: GroupLimits, now: Instant) -> Group:
        """Return the group stored as ``image``. Its members' sessions start at ``now``."""
        group = cls(image.group_id, limits, image.state_since_ms)
        group.generation = image.generation
        group.protocol_type = image.protocol_type
        group.protocol_name = image.protocol_name
        group.state = GroupState.STABLE if image.members else GroupState.EMPTY
        for stored in image.members:
            member = Member(
                member_id=stored.member_id, group_instance_id=stored.group_instance_id, client_id=stored.client_id,
                client_host=stored.client_host, session_timeout_ms=stored.session_timeout_ms,
                rebalance_timeout_ms=stored.rebalance_timeout_ms, assignment=stored.assignment,
                protocols=((image.protocol_name or "", stored.subscription),),
            )  # fmt: skip
            group.membership.add(member)
            group._expect_heartbeat(member, now)
        if image.leader in group.membership.members:
            group.membership.leader = image.leader
        return group
