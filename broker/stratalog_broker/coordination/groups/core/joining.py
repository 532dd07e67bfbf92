"""JoinGroup of the classic protocol: new, known and returning static members. Does no I/O.

A new dynamic member first gets its id and joins again with it (KIP-394). A static member keeps its membership across a
restart (KIP-345) and, as leader, may skip an unnecessary assignment (KIP-814).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.deadlines import Deadlines
from stratalog_broker.coordination.groups.core.instruction_queue import InstructionQueue
from stratalog_broker.coordination.groups.core.membership import Member, Membership
from stratalog_broker.coordination.groups.core.messages import (
    NO_MEMBER,
    GroupLimits,
    JoinAnswer,
    JoinRequest,
    SyncAnswer,
)
from stratalog_broker.coordination.groups.core.rebalance import GroupState, Rebalance
from stratalog_broker.coordination.wake_times import Instant


def check_join(request: JoinRequest, limits: GroupLimits) -> ErrorCode:
    """Return the code for a JoinGroup that is wrong whatever the group's members."""
    if not limits.session_timeout_ms_min <= request.session_timeout_ms <= limits.session_timeout_ms_max:
        return ErrorCode.invalid_session_timeout
    if not request.protocol_type or not 0 < len(request.protocols) <= limits.protocols_max:
        return ErrorCode.inconsistent_group_protocol
    if sum(len(metadata) for _, metadata in request.protocols) > limits.member_metadata_bytes_max:
        return ErrorCode.message_too_large
    return ErrorCode.none


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replacement:
    old_id: str
    new_id: str
    ticket: int
    can_skip: bool


class Joining:
    """Handles JoinGroup for one group. It owns the replacements of static members; phases are the ``Rebalance``'s."""

    def __init__(
        self,
        limits: GroupLimits,
        membership: Membership,
        deadlines: Deadlines,
        instructions: InstructionQueue,
        rebalance: Rebalance,
    ) -> None:
        self._limits = limits
        self._membership = membership
        self._deadlines = deadlines
        self._instructions = instructions
        self._rebalance = rebalance
        self._replacements: dict[int, _Replacement] = {}
        """Returning static members whose new id is being persisted, by token."""

    def join(self, request: JoinRequest, now: Instant) -> None:
        """Join or rejoin; the answer may follow only after a rebalance."""
        error = self._check_join(request)
        if error is not ErrorCode.none:
            self._refuse(request, error)
        elif request.member_id == NO_MEMBER:
            self._join_unknown(request, now)
        else:
            self._join_known(request, now)

    def on_persisted(self, token: int, error: ErrorCode) -> None:
        """Answer the static member whose replacement was persisted with this token, if there is one."""
        replaced = self._replacements.pop(token, None)
        if replaced is not None:
            self._finish_replacement(replaced, error)

    def _check_join(self, request: JoinRequest) -> ErrorCode:
        if self._rebalance.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        error = check_join(request, self._limits)
        if error is ErrorCode.none and not self._speaks(request):
            error = ErrorCode.inconsistent_group_protocol
        if error is not ErrorCode.none:
            return error
        return ErrorCode.none if self._has_room(request) else ErrorCode.group_max_size_reached

    def _speaks(self, request: JoinRequest) -> bool:
        """Return whether the member shares the group's protocol type and supports a protocol that all members support."""
        if not self._membership.members:
            return True
        return request.protocol_type == self._rebalance.protocol_type and self._membership.can_work_with(request.protocols)

    def _has_room(self, request: JoinRequest) -> bool:
        known = request.member_id in self._membership.members or request.member_id in self._rebalance.pending_members
        returning = request.group_instance_id in self._membership.instances
        return known or returning or len(self._membership) + len(self._rebalance.pending_members) < self._limits.members_max

    def _refuse(self, request: JoinRequest, error: ErrorCode) -> None:
        self._instructions.answer(request.ticket, JoinAnswer(error=error, member_id=request.member_id))

    def _join_unknown(self, request: JoinRequest, now: Instant) -> None:
        if request.group_instance_id is not None:
            current_id = self._membership.instances.get(request.group_instance_id)
            if current_id is None:
                self._add(request, request.fresh_member_id, now)
            else:
                self._replace_static(request, self._membership.members[current_id], now)
        elif request.must_get_id_first:
            self._rebalance.add_pending(request.fresh_member_id, now.monotonic_ms + request.session_timeout_ms)
            answer = JoinAnswer(error=ErrorCode.member_id_required, member_id=request.fresh_member_id)
            self._instructions.answer(request.ticket, answer)
        else:
            self._add(request, request.fresh_member_id, now)

    def _join_known(self, request: JoinRequest, now: Instant) -> None:
        if request.member_id in self._rebalance.pending_members and request.group_instance_id is None:
            self._add(request, request.member_id, now)
            return
        error = self._membership.validate(request.member_id, request.group_instance_id)
        if error is not ErrorCode.none:
            self._refuse(request, error)
            return
        member = self._membership.members[request.member_id]
        if self._may_keep_generation(member, request):
            self._deadlines.expect_heartbeat(member, now)
            self._instructions.answer(request.ticket, self._rebalance.join_answer(member))
        else:
            self._update(member, request)
            self._rebalance.member_joined(now)

    def _may_keep_generation(self, member: Member, request: JoinRequest) -> bool:
        """Return whether a rejoin is answered with the current generation: if unchanged, except from a stable group's leader.

        A leader rejoins when topic metadata changed, which is not visible in its own metadata, so it forces a rebalance.
        """
        if member.protocols != request.protocols:
            return False
        if self._rebalance.state is GroupState.COMPLETING_REBALANCE:
            return True
        return self._rebalance.state is GroupState.STABLE and member.member_id != self._membership.leader

    def _add(self, request: JoinRequest, member_id: str, now: Instant) -> None:
        member = Member(
            member_id=member_id, group_instance_id=request.group_instance_id, client_id=request.client_id,
            client_host=request.client_host, session_timeout_ms=request.session_timeout_ms,
            rebalance_timeout_ms=request.rebalance_timeout_ms, protocols=request.protocols, is_new=True,
        )  # fmt: skip
        self._rebalance.add(member, request.protocol_type, request.ticket, now)

    def _update(self, member: Member, request: JoinRequest) -> None:
        self._instructions.answer_join(member, JoinAnswer(error=ErrorCode.rebalance_in_progress, member_id=member.member_id))
        self._membership.set_protocols(member, request.protocols)
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        self._membership.set_join_ticket(member, request.ticket)

    def _replace_static(self, request: JoinRequest, member: Member, now: Instant) -> None:
        """Give a restarted static member its old membership, without a rebalance if the group is stable (KIP-345)."""
        old_id = member.member_id
        self._instructions.answer_join(member, JoinAnswer(error=ErrorCode.fenced_instance_id, member_id=old_id))
        self._instructions.answer_sync(member, SyncAnswer(error=ErrorCode.fenced_instance_id))
        self._rebalance.rename(member, request.fresh_member_id)
        self._update(member, request)
        self._deadlines.expect_heartbeat(member, now)
        if self._rebalance.state is GroupState.STABLE and self._membership.choose_protocol() == self._rebalance.protocol_name:
            token = self._rebalance.persist()
            self._replacements[token] = _Replacement(
                old_id=old_id, new_id=member.member_id, ticket=request.ticket, can_skip=request.can_skip_assignment
            )
        else:
            self._rebalance.member_joined(now)

    def _finish_replacement(self, replaced: _Replacement, error: ErrorCode) -> None:
        """Answer a returning static member. Without KIP-814 a leader gets its old id as leader, so that it does not assign."""
        member = self._membership.members.get(replaced.new_id)
        if member is None or member.join_ticket != replaced.ticket or self._rebalance.state is not GroupState.STABLE:
            return  # a rebalance or another restart of the member now answers the request
        if error is not ErrorCode.none:
            self._instructions.answer_join(member, JoinAnswer(error=error))
            self._rebalance.rename(member, replaced.old_id)
            return
        answer = self._rebalance.join_answer(member)
        if answer.members and replaced.can_skip:
            answer = dataclasses.replace(answer, skip_assignment=True)
        elif answer.members:
            answer = dataclasses.replace(answer, members=(), leader=replaced.old_id)
        self._instructions.answer_join(member, answer)

    def validate_state(self) -> None:
        """Assert the invariants."""
        if self._rebalance.state is GroupState.STABLE:
            assert self._membership.joining <= len(self._replacements)
