"""Members that speak the classic protocol in a group of the consumer protocol (KIP-848, "Online migration"). Does no I/O.

JoinGroup is their heartbeat of a member that joins, or that says what it still owns: the answer's generation is the member's
epoch. SyncGroup fetches the assignment, and Heartbeat says when to join again. None of them leads: the server assigns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from uuid import UUID

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.consumer.embedded_protocol import (
    PROTOCOL_TYPE,
    Subscription,
    decode_subscription,
    encode_assignment,
)
from stratalog_broker.coordination.groups.core.consumer.model import (
    ClassicJoin,
    MemberMetadata,
    MemberState,
    Partition,
    Partitions,
)
from stratalog_broker.coordination.groups.core.consumer.requests import HeartbeatRefused
from stratalog_broker.coordination.groups.core.consumer.senders import Sender
from stratalog_broker.coordination.groups.core.consumer.tracked_state import TrackedState
from stratalog_broker.coordination.groups.core.messages import JoinRequest, LeavingMember, SyncAnswer, SyncRequest
from stratalog_core.errors import Corrupt


def subscription_of(request: JoinRequest) -> Subscription:
    """Return what a member subscribes to; all its protocols have the same. Raises ``HeartbeatRefused``."""
    try:
        return decode_subscription(request.protocols[0][1])
    except Corrupt as malformed:
        raise HeartbeatRefused(ErrorCode.inconsistent_group_protocol, malformed.message) from malformed


def classic_sender_of(state: TrackedState, request: JoinRequest, members_max: int) -> Sender:
    """Return the sender of a JoinGroup, which may be new. Raises ``HeartbeatRefused`` if it may not join."""
    if request.member_id not in state.members and len(state.members) >= members_max:
        raise HeartbeatRefused(ErrorCode.group_max_size_reached, f"The group has {members_max} members.")
    if request.protocol_type != PROTOCOL_TYPE or not state.classic.can_work_with(request.protocols):
        raise HeartbeatRefused(ErrorCode.inconsistent_group_protocol, f"Protocol of {request.member_id} is not supported.")
    if request.must_get_id_first:
        raise HeartbeatRefused(ErrorCode.member_id_required, "Join again with this id.")
    if request.group_instance_id is None:
        return Sender(request.member_id or request.fresh_member_id)
    holder = state.instances.get(request.group_instance_id)
    if not request.member_id:
        return Sender(request.fresh_member_id, holder)
    error = identify(state, request.member_id, request.group_instance_id)
    if error is not ErrorCode.none:
        raise HeartbeatRefused(error, f"Instance id {request.group_instance_id} belongs to {holder}.")
    return Sender(request.member_id)


def joined(before: MemberMetadata, request: JoinRequest, subscription: Subscription) -> MemberMetadata:
    """Return a member's metadata after JoinGroup. A pattern that it had with the other protocol is gone."""
    return MemberMetadata(
        client_id=request.client_id, client_host=request.client_host,
        instance_id=before.instance_id if request.group_instance_id is None else request.group_instance_id,
        rack_id=before.rack_id if subscription.rack_id is None else subscription.rack_id,
        topic_names=tuple(sorted(set(subscription.topics))), topic_pattern="",
        rebalance_timeout_ms=request.rebalance_timeout_ms, assignor=before.assignor,
        classic=ClassicJoin(session_timeout_ms=request.session_timeout_ms, protocols=request.protocols),
    )  # fmt: skip


def owned_partitions(subscription: Subscription, topic_id_of: Callable[[str], UUID | None]) -> Partitions:
    """Return the partitions that a member still owns; those of topics that are gone do not count."""
    found = set[Partition]()
    for name, indexes in subscription.owned.items():
        topic_id = topic_id_of(name)
        if topic_id is not None:
            found |= {(topic_id, index) for index in indexes}
    return frozenset(found)


def identify(state: TrackedState, member_id: str, instance_id: str | None) -> ErrorCode:
    """Check a sender's identity; an instance id that belongs to another member id is fenced."""
    if instance_id is None:
        return ErrorCode.none if member_id in state.members else ErrorCode.unknown_member_id
    holder = state.instances.get(instance_id)
    if holder is None:
        return ErrorCode.unknown_member_id
    return ErrorCode.none if holder == member_id else ErrorCode.fenced_instance_id


def check_generation(state: TrackedState, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
    """Return the code for a request of a classic member, which says its epoch as its generation."""
    error = identify(state, member_id, instance_id)
    if error is not ErrorCode.none:
        return error
    if state.members[member_id].classic is None:
        return ErrorCode.unknown_member_id
    return ErrorCode.none if generation == state.current_of(member_id).member_epoch else ErrorCode.illegal_generation


def must_join_again(state: TrackedState, member_id: str) -> bool:
    """Return whether a member has to rejoin: for a new target, to revoke partitions, or because those it waits for are free."""
    current = state.current_of(member_id)
    if current.member_epoch < state.assignment_epoch or current.state is MemberState.UNREVOKED_PARTITIONS:
        return True
    missing = state.target_of(member_id) - current.assigned.keys()
    return current.state is MemberState.UNRELEASED_PARTITIONS and all(map(state.is_free, missing))


def check_sync(state: TrackedState, request: SyncRequest) -> ErrorCode:
    """Return whether a member may have its assignment. One that has to revoke partitions gets the rest of them.

    A member that has to join again is told so even if it names another protocol: it may have joined the classic group before.
    """
    error = check_generation(state, request.member_id, request.group_instance_id, request.generation)
    if error is not ErrorCode.none:
        return error
    classic, current = state.members[request.member_id].classic, state.current_of(request.member_id)
    assert classic is not None, "checked with the generation"
    if current.member_epoch < state.assignment_epoch and current.state is not MemberState.UNREVOKED_PARTITIONS:
        return ErrorCode.rebalance_in_progress
    if request.protocol_type not in (None, PROTOCOL_TYPE) or request.protocol_name not in (None, classic.protocol_name):
        return ErrorCode.inconsistent_group_protocol
    return ErrorCode.none


def sync_answer(state: TrackedState, request: SyncRequest, names: Mapping[UUID, str]) -> SyncAnswer:
    """Return a member's assignment in the version of its subscription; ``names`` are those of its topics."""
    classic = state.members[request.member_id].classic
    assert classic is not None, "checked with the generation"
    return SyncAnswer(
        protocol_type=request.protocol_type, protocol_name=request.protocol_name,
        assignment=encoded(state.current_of(request.member_id).assigned, names, classic),
    )  # fmt: skip


def encoded(partitions: Iterable[Partition], names: Mapping[UUID, str], classic: ClassicJoin) -> bytes:
    """Return partitions as a classic member reads them; those of topics that are gone are left out."""
    by_topic: dict[str, list[int]] = {}
    for topic_id, index in sorted(partitions):
        if topic_id in names:
            by_topic.setdefault(names[topic_id], []).append(index)
    return encode_assignment(by_topic, decode_subscription(classic.protocols[0][1]).version)


def leaving_classically(state: TrackedState, leaving: LeavingMember) -> tuple[ErrorCode, str]:
    """Return the code for one member of LeaveGroup, and its id. An instance id alone identifies a member, too."""
    member_id = leaving.member_id or state.instances.get(leaving.group_instance_id or "", "")
    return identify(state, member_id, leaving.group_instance_id), member_id
