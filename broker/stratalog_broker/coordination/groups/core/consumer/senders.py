"""Identifies the sender of a heartbeat: a known, new, returning or fenced member (KIP-848; static members: KIP-345)."""

from __future__ import annotations

from dataclasses import dataclass

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.consumer.model import LEAVE_STATIC_EPOCH, CurrentAssignment
from stratalog_broker.coordination.groups.core.consumer.requests import HeartbeatRefused, HeartbeatRequest
from stratalog_broker.coordination.groups.core.consumer.tracked_state import TrackedState


@dataclass(frozen=True, slots=True)
class Sender:
    """``replaced_id`` is the earlier id of a static member that returns under a new one."""

    member_id: str
    replaced_id: str | None = None


def sender_of(state: TrackedState, request: HeartbeatRequest, members_max: int) -> Sender:
    """Return the sender, which may be new. Raises ``HeartbeatRefused`` if it may not send this."""
    if not request.is_joining:
        member_id = _known(state, request)
        _check_epoch(state.current_of(member_id), request)
        return Sender(member_id)
    earlier_id = _instance_holder(state, request)
    known = state.members.get(request.member_id)
    if known is not None and request.instance_id not in (None, known.instance_id):
        raise HeartbeatRefused(ErrorCode.invalid_request, f"Member id {request.member_id} belongs to another instance id.")
    if earlier_id is not None and earlier_id != request.member_id:
        is_classic = state.members[earlier_id].classic is not None  # such members do not say that they return
        if not is_classic and state.current_of(earlier_id).member_epoch != LEAVE_STATIC_EPOCH:
            text = f"Instance id {request.instance_id} is in use by member {earlier_id}, which has not left."
            raise HeartbeatRefused(ErrorCode.unreleased_instance_id, text)
        return Sender(request.member_id, earlier_id)
    if known is None and len(state.members) >= members_max:
        text = f"The group has {members_max} members, which is the maximum."
        raise HeartbeatRefused(ErrorCode.group_max_size_reached, text)
    return Sender(request.member_id)


def leaving_member(state: TrackedState, request: HeartbeatRequest) -> str:
    """Return the id of a member that leaves. Raises ``HeartbeatRefused`` if there is no such member."""
    return _known(state, request)


def _instance_holder(state: TrackedState, request: HeartbeatRequest) -> str | None:
    return None if request.instance_id is None else state.instances.get(request.instance_id)


def _known(state: TrackedState, request: HeartbeatRequest) -> str:
    if request.instance_id is None:
        if request.member_id not in state.members:
            raise _unknown(f"Member {request.member_id}", state.group_id)
        return request.member_id
    holder = _instance_holder(state, request)
    if holder is None:
        raise _unknown(f"Instance id {request.instance_id}", state.group_id)
    if holder != request.member_id:
        text = f"Static member {request.member_id} with instance id {request.instance_id} was fenced by member {holder}."
        raise HeartbeatRefused(ErrorCode.fenced_instance_id, text)
    return holder


def _unknown(who: str, group_id: str) -> HeartbeatRefused:
    return HeartbeatRefused(ErrorCode.unknown_member_id, f"{who} is not a member of group {group_id}.")


def _check_epoch(current: CurrentAssignment, request: HeartbeatRequest) -> None:
    """Refuse a wrong epoch. The previous one is right if the answer with the new epoch may have been lost."""
    epoch = request.member_epoch
    if epoch == current.member_epoch:
        return
    is_behind = epoch == current.previous_epoch and request.owned is not None and request.owned <= current.assigned.keys()
    if not is_behind or epoch > current.member_epoch:
        text = f"The member's epoch is {epoch}; expected {current.member_epoch}. It must give up its partitions and rejoin."
        raise HeartbeatRefused(ErrorCode.fenced_member_epoch, text)
