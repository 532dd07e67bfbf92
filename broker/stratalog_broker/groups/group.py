"""One consumer group of the classic protocol: the requests, as a sans-IO state machine.

Each public method is one event; it takes the time and returns what to do. JoinGroup v0–9, SyncGroup v0–5, Heartbeat v0–4
and LeaveGroup v0–5 are all served by it: what older versions lack is a default of the request. Assignment happens in
the clients, so eager and cooperative assignors are alike here.

Where it differs from Apache Kafka: a repeated JoinGroup or SyncGroup of one member answers the earlier one with
REBALANCE_IN_PROGRESS instead of never; an absent static member is not dropped at the sync time-out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kio.schema.errors import ErrorCode

from stratalog_broker.groups.membership import Member
from stratalog_broker.groups.messages import (
    NO_MEMBER,
    GroupImage,
    GroupLimits,
    Instant,
    Instruction,
    JoinAnswer,
    JoinRequest,
    LeavingMember,
    SyncAnswer,
    SyncRequest,
)
from stratalog_broker.groups.rebalance import NEVER_MS, GroupState, Rebalance

Instructions = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replacement:
    old_id: str
    new_id: str
    ticket: int
    can_skip: bool


class Group(Rebalance):
    """Requests to one group. Not thread-safe; every call returns at once."""

    def __init__(self, group_id: str, limits: GroupLimits, state_since_ms: int) -> None:
        super().__init__(group_id, limits, state_since_ms)
        self._replacements: dict[int, _Replacement] = {}
        """Static members whose replacement is being persisted, by token."""

    # -- JoinGroup

    def join(self, request: JoinRequest, now: Instant) -> Instructions:
        """Join or rejoin; the answer may come only after a rebalance."""
        error = self._check_join(request)
        if error is not ErrorCode.none:
            self._refuse(request, error)
        elif request.member_id == NO_MEMBER:
            self._join_unknown(request, now)
        else:
            self._join_known(request, now)
        return self._drain()

    def _check_join(self, request: JoinRequest) -> ErrorCode:
        limits = self.limits
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        if not limits.session_timeout_ms_min <= request.session_timeout_ms <= limits.session_timeout_ms_max:
            return ErrorCode.invalid_session_timeout
        if not self._speaks(request):
            return ErrorCode.inconsistent_group_protocol
        if sum(len(metadata) for _, metadata in request.protocols) > limits.member_metadata_bytes_max:
            return ErrorCode.message_too_large
        return ErrorCode.none if self._has_room(request) else ErrorCode.group_max_size_reached

    def _speaks(self, request: JoinRequest) -> bool:
        """Whether the member has a protocol in common with all the others, of the same type."""
        if not request.protocol_type or not 0 < len(request.protocols) <= self.limits.protocols_max:
            return False
        if not self.membership.members:
            return True
        return request.protocol_type == self.protocol_type and self.membership.can_work_with(request.protocols)

    def _has_room(self, request: JoinRequest) -> bool:
        known = request.member_id in self.membership.members or request.member_id in self.pending_members
        returning = request.group_instance_id in self.membership.instances
        return known or returning or len(self.membership) + len(self.pending_members) < self.limits.members_max

    def _refuse(self, request: JoinRequest, error: ErrorCode) -> None:
        self._answer(request.ticket, JoinAnswer(error=error, member_id=request.member_id))

    def _join_unknown(self, request: JoinRequest, now: Instant) -> None:
        if request.group_instance_id is not None:
            current_id = self.membership.instances.get(request.group_instance_id)
            if current_id is None:
                self._add(request, request.fresh_member_id, now)
            else:
                self._replace_static(request, self.membership.members[current_id], now)
        elif request.requires_known_member:
            at_ms = now.monotonic_ms + request.session_timeout_ms
            self.pending_members[request.fresh_member_id] = at_ms
            self.wake_at_ms = min(self.wake_at_ms, at_ms)
            answer = JoinAnswer(error=ErrorCode.member_id_required, member_id=request.fresh_member_id)
            self._answer(request.ticket, answer)
        else:
            self._add(request, request.fresh_member_id, now)

    def _join_known(self, request: JoinRequest, now: Instant) -> None:
        if request.member_id in self.pending_members and request.group_instance_id is None:
            self._add(request, request.member_id, now)
            return
        error = self.membership.validate(request.member_id, request.group_instance_id)
        if error is not ErrorCode.none:
            self._refuse(request, error)
            return
        member = self.membership.members[request.member_id]
        if self._may_keep_generation(member, request):
            self._expect_heartbeat(member, now)
            self._answer(request.ticket, self._join_answer(member))
        else:
            self._update(member, request)
            self._rebalance_or_complete_join(now)

    def _may_keep_generation(self, member: Member, request: JoinRequest) -> bool:
        """A member that repeats its join unchanged gets the running generation; a stable group's leader forces a new one.

        The leader rejoins when it saw the topics' metadata change, which its own metadata does not show.
        """
        if member.protocols != request.protocols:
            return False
        if self.state is GroupState.COMPLETING_REBALANCE:
            return True
        return self.state is GroupState.STABLE and member.member_id != self.membership.leader

    def _add(self, request: JoinRequest, member_id: str, now: Instant) -> None:
        member = Member(
            member_id=member_id, group_instance_id=request.group_instance_id, client_id=request.client_id,
            client_host=request.client_host, session_timeout_ms=request.session_timeout_ms,
            rebalance_timeout_ms=request.rebalance_timeout_ms, protocols=request.protocols, is_new=True,
        )  # fmt: skip
        self.pending_members.pop(member_id, None)
        if not self.membership.members:
            self.protocol_type = request.protocol_type
        self.membership.add(member, request.ticket)
        self._expect_heartbeat(member, now, self.limits.new_member_timeout_ms)
        self._member_came = True
        self._rebalance_or_complete_join(now)

    def _update(self, member: Member, request: JoinRequest) -> None:
        self._answer_join(member, JoinAnswer(error=ErrorCode.rebalance_in_progress, member_id=member.member_id))
        self.membership.set_protocols(member, request.protocols)
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        self.membership.set_join_ticket(member, request.ticket)

    def _replace_static(self, request: JoinRequest, member: Member, now: Instant) -> None:
        """A static member restarted: it takes its old place, in a stable group without a rebalance (KIP-345)."""
        old_id = member.member_id
        self._answer_join(member, JoinAnswer(error=ErrorCode.fenced_instance_id, member_id=old_id))
        self._answer_sync(member, SyncAnswer(error=ErrorCode.fenced_instance_id))
        self.membership.rename(member, request.fresh_member_id)
        if old_id in self.unsynced:
            self.unsynced.remove(old_id)
            self.unsynced.add(member.member_id)
        self._update(member, request)
        self._expect_heartbeat(member, now)
        if self.state is GroupState.STABLE and self.membership.choose_protocol() == self.protocol_name:
            token = self._persist()
            self._replacements[token] = _Replacement(
                old_id=old_id, new_id=member.member_id, ticket=request.ticket, can_skip=request.can_skip_assignment
            )
        else:
            self._rebalance_or_complete_join(now)

    # -- SyncGroup

    def sync(self, request: SyncRequest, now: Instant) -> Instructions:
        """Hand in (leader) and get (all) the assignment of a generation."""
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
        """Persist what the leader assigned; members hear of it only once it is in the log."""
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

    # -- what became of a Persist

    def on_persisted(self, token: int, error: ErrorCode, now: Instant) -> Instructions:
        """``none``: the image is in the log for good. Any other error: it is not, or nobody knows."""
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

    def _finish_replacement(self, replaced: _Replacement, error: ErrorCode) -> None:
        """Answer a returning static member. Without KIP-814 it is told the old leader id, lest it assign anew."""
        member = self.membership.members.get(replaced.new_id)
        if member is None or member.join_ticket != replaced.ticket or self.state is not GroupState.STABLE:
            return  # a rebalance, or the member's next restart, has taken the request over
        if error is not ErrorCode.none:
            self._answer_join(member, JoinAnswer(error=error))
            self.membership.rename(member, replaced.old_id)
            return
        answer = self._join_answer(member)
        if answer.members and replaced.can_skip:
            answer = dataclasses.replace(answer, skip_assignment=True)
        elif answer.members:
            answer = dataclasses.replace(answer, members=(), leader=replaced.old_id)
        self._answer_join(member, answer)

    # -- Heartbeat, LeaveGroup, time, deletion

    def heartbeat(self, member_id: str, group_instance_id: str | None, generation: int, now: Instant) -> ErrorCode:
        """Stay in the group; REBALANCE_IN_PROGRESS calls the member back to join."""
        error = self._check_member(member_id, group_instance_id, generation)
        if error is not ErrorCode.none:
            return error
        self._expect_heartbeat(self.membership.members[member_id], now)
        return ErrorCode.rebalance_in_progress if self.state is GroupState.PREPARING_REBALANCE else ErrorCode.none

    def leave(self, leaving: LeavingMember, now: Instant) -> tuple[ErrorCode, Instructions]:
        """Go at once, instead of after the session time-out."""
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
        """Let time pass: phases and sessions whose deadline is over. Call it at ``wake_at_ms``, or any time."""
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
        """DeleteGroups: only a group without members may go."""
        if self.state is GroupState.DEAD:
            return ErrorCode.group_id_not_found
        if self.state is not GroupState.EMPTY:
            return ErrorCode.non_empty_group
        self._move_to(GroupState.DEAD, now)
        return ErrorCode.none

    # -- OffsetCommit

    def check_commit(self, member_id: str, group_instance_id: str | None, generation: int, now: Instant) -> ErrorCode:
        """Who may commit: members of this generation, and anybody without a generation while the group is empty."""
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

    # -- checks

    def validate_state(self) -> None:
        """Assert what always holds."""
        super().validate_state()
        if self.state is GroupState.STABLE:
            assert self.membership.joining <= len(self._replacements)

    # -- loading

    @classmethod
    def from_image(cls, image: GroupImage, limits: GroupLimits, now: Instant) -> Group:
        """A group as the log has it. Its members get a whole session time-out from now on."""
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
