"""One consumer group of the classic protocol, as a state machine that does no I/O.

Each public method is one event; it takes the time and returns instructions. It serves JoinGroup v0–9, SyncGroup v0–5,
Heartbeat v0–4 and LeaveGroup v0–5; fields that older versions lack have defaults. Clients compute the assignment, so eager
and cooperative assignors need no distinction here.

Differences from Apache Kafka: when a member repeats JoinGroup or SyncGroup, the earlier request is answered with
REBALANCE_IN_PROGRESS instead of never; an absent static member is not dropped at the sync time-out.
"""

from __future__ import annotations

from collections.abc import Mapping

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.deadlines import Deadlines
from stratalog_broker.coordination.groups.core.instruction_queue import InstructionQueue
from stratalog_broker.coordination.groups.core.joining import Joining
from stratalog_broker.coordination.groups.core.membership import Membership
from stratalog_broker.coordination.groups.core.messages import (
    GroupImage,
    GroupLimits,
    Instructions,
    JoinRequest,
    LeavingMember,
    SyncAnswer,
    SyncRequest,
)
from stratalog_broker.coordination.groups.core.rebalance import GroupState, Rebalance
from stratalog_broker.coordination.wake_times import Instant


class Group:
    """Handles the requests of one group. Not thread-safe; no call blocks."""

    def __init__(self, group_id: str, limits: GroupLimits, state_since_ms: int) -> None:
        self.membership = Membership()
        self._deadlines = Deadlines()
        self._instructions = InstructionQueue(self.membership)
        shared = self.membership, self._deadlines, self._instructions
        self._rebalance = Rebalance(group_id, limits, state_since_ms, *shared)
        self._joining = Joining(limits, *shared, self._rebalance)

    @classmethod
    def from_image(cls, image: GroupImage, limits: GroupLimits, now: Instant) -> Group:
        """Return the group stored as ``image``. Its members' sessions start at ``now``."""
        group = cls(image.group_id, limits, image.state_since_ms)
        group._rebalance.restore(image, now)
        return group

    # -- for reading

    @property
    def state(self) -> GroupState:
        return self._rebalance.state

    @property
    def state_since_ms(self) -> int:
        """Wall time of the last change of state, in milliseconds."""
        return self._rebalance.state_since_ms

    @property
    def generation(self) -> int:
        return self._rebalance.generation

    @property
    def protocol_type(self) -> str:
        return self._rebalance.protocol_type

    @property
    def protocol_name(self) -> str | None:
        return self._rebalance.protocol_name

    @property
    def pending_members(self) -> Mapping[str, int]:
        return self._rebalance.pending_members

    @property
    def wake_at_ms(self) -> int:
        """The earliest monotonic time at which :meth:`tick` may have work, in milliseconds."""
        return self._deadlines.wake_at_ms

    def image(self) -> GroupImage:
        return self._rebalance.image()

    # -- JoinGroup, SyncGroup

    def join(self, request: JoinRequest, now: Instant) -> Instructions:
        """Join or rejoin; the answer may follow only after a rebalance."""
        self._joining.join(request, now)
        return self._instructions.drain()

    def sync(self, request: SyncRequest, now: Instant) -> Instructions:
        """Submit the assignment of a generation (leader) and request one's own part (all members)."""
        error = self._check_sync(request)
        if error is not ErrorCode.none:
            self._instructions.answer(request.ticket, SyncAnswer(error=error))
            return self._instructions.drain()
        member = self.membership.members[request.member_id]
        self._rebalance.member_synced(member.member_id)
        if self.state is GroupState.STABLE:
            self._deadlines.expect_heartbeat(member, now)
            self._instructions.answer(request.ticket, self._rebalance.sync_answer(member))
        else:
            self._instructions.answer_sync(member, SyncAnswer(error=ErrorCode.rebalance_in_progress))
            member.sync_ticket = request.ticket
            if member.member_id == self.membership.leader:
                self._rebalance.assign(dict(request.assignments), now)
        return self._instructions.drain()

    def _check_sync(self, request: SyncRequest) -> ErrorCode:
        error = self._check_member(request.member_id, request.group_instance_id, request.generation)
        if error is not ErrorCode.none:
            return error
        if self.state is GroupState.PREPARING_REBALANCE:  # before the protocol: a downgraded group may have chosen another
            return ErrorCode.rebalance_in_progress
        if request.protocol_type not in (None, self.protocol_type) or request.protocol_name not in (None, self.protocol_name):
            return ErrorCode.inconsistent_group_protocol
        return ErrorCode.none

    def on_persisted(self, token: int, error: ErrorCode, now: Instant) -> Instructions:
        """Process the outcome of a ``Persist``: ``none`` if the image is durably in the log, else failed or unknown."""
        self._joining.on_persisted(token, error)
        self._rebalance.on_persisted(token, error, now)
        return self._instructions.drain()

    # -- Heartbeat, LeaveGroup, time, deletion

    def heartbeat(self, member_id: str, group_instance_id: str | None, generation: int, now: Instant) -> ErrorCode:
        """Extend a member's session; return REBALANCE_IN_PROGRESS if it has to rejoin."""
        error = self._check_member(member_id, group_instance_id, generation)
        if error is not ErrorCode.none:
            return error
        self._deadlines.expect_heartbeat(self.membership.members[member_id], now)
        return ErrorCode.rebalance_in_progress if self.state is GroupState.PREPARING_REBALANCE else ErrorCode.none

    def leave(self, leaving: LeavingMember, now: Instant) -> tuple[ErrorCode, Instructions]:
        """Remove a member immediately, instead of after its session time-out."""
        error = self._leave(leaving, now)
        return error, self._instructions.drain()

    def _leave(self, leaving: LeavingMember, now: Instant) -> ErrorCode:
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        member_id = self.membership.find(leaving.member_id, leaving.group_instance_id)
        if member_id is None:
            return ErrorCode.unknown_member_id
        pending = member_id in self.pending_members
        error = ErrorCode.none if pending else self.membership.validate(member_id, leaving.group_instance_id)
        if error is ErrorCode.none:
            self._rebalance.remove(member_id, now)
        return error

    def tick(self, now: Instant) -> Instructions:
        """End phases and sessions whose deadline has passed. Call it at ``wake_at_ms`` or at any other time."""
        self._rebalance.tick(now)
        return self._instructions.drain()

    def delete(self, now: Instant) -> ErrorCode:
        """DeleteGroups: move a group without members to DEAD; return NON_EMPTY_GROUP if it has members."""
        if self.state is GroupState.DEAD:
            return ErrorCode.group_id_not_found
        if self.state is not GroupState.EMPTY:
            return ErrorCode.non_empty_group
        self._rebalance.end(now)
        return ErrorCode.none

    def dissolve(self) -> Instructions:
        """Make all waiting members join again, because the group goes on in the consumer protocol. Call nothing after it."""
        self._rebalance.dissolve(ErrorCode.rebalance_in_progress)
        return self._instructions.drain()

    # -- OffsetCommit

    def check_commit(
        self, member_id: str, group_instance_id: str | None, generation: int, now: Instant, *, transactional: bool = False
    ) -> ErrorCode:
        """Return whether a commit is allowed, as a code, and extend the member's session.

        Members of this generation may commit; clients without a generation may commit while the group is empty. In a
        transaction both may commit at any time; a client that says its generation must have the present one (KIP-447).
        """
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        is_anonymous = generation < 0 and not member_id and group_instance_id is None
        if (generation < 0 and self.state is GroupState.EMPTY) or (transactional and is_anonymous):
            return ErrorCode.none
        error = self._check_member(member_id, group_instance_id, generation)
        if error is not ErrorCode.none or transactional:
            return error
        self._deadlines.expect_heartbeat(self.membership.members[member_id], now)
        return ErrorCode.rebalance_in_progress if self.state is GroupState.COMPLETING_REBALANCE else ErrorCode.none

    def _check_member(self, member_id: str, group_instance_id: str | None, generation: int) -> ErrorCode:
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        error = self.membership.validate(member_id, group_instance_id)
        if error is not ErrorCode.none:
            return error
        return ErrorCode.none if generation == self.generation else ErrorCode.illegal_generation

    def validate_state(self) -> None:
        """Assert the invariants."""
        self._rebalance.validate_state()
        self._joining.validate_state()
