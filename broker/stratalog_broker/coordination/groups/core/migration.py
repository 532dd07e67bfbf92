"""Conversion of a group with members from one protocol to the other (KIP-848, "Online migration"). Does no I/O.

A classic group becomes a consumer group with the first member of the consumer protocol. It keeps its generation as its epoch,
and each member the partitions that it may still read. A consumer group becomes a classic one when only classic members are
left; it keeps its epoch as its generation and begins with a rebalance, which also its next coordinator begins (``GroupImage``).
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from stratalog_broker.coordination.groups.core.consumer.classic_members import encoded
from stratalog_broker.coordination.groups.core.consumer.embedded_protocol import (
    PROTOCOL_TYPE,
    NamedPartitions,
    decode_assignment,
    decode_subscription,
)
from stratalog_broker.coordination.groups.core.consumer.group import ConsumerGroup
from stratalog_broker.coordination.groups.core.consumer.model import (
    ClassicJoin,
    ConsumerGroupState,
    CurrentAssignment,
    MemberMetadata,
    Partition,
)
from stratalog_broker.coordination.groups.core.consumer.settings import ConsumerLimits
from stratalog_broker.coordination.groups.core.group import Group
from stratalog_broker.coordination.groups.core.membership import Member
from stratalog_broker.coordination.groups.core.messages import GroupImage, MemberImage
from stratalog_broker.coordination.wake_times import Instant
from stratalog_core.errors import Corrupt, Invalid

TopicIdOf = Callable[[str], UUID | None]


def check_upgrade(group_id: str, group: Group, limits: ConsumerLimits) -> None:
    """Raise ``Invalid`` if a classic group with members must not become a consumer group."""
    members = group.membership.members.values()
    reason = ""
    if not limits.migration.upgrades:
        reason = "online upgrade is disabled."
    elif group.protocol_type != PROTOCOL_TYPE:
        reason = "the group does not use the consumer embedded protocol."
    elif len(members) > limits.members_max:
        reason = "the group size exceeds the consumer group maximum size."
    elif sum(len(metadata) for member in members for _, metadata in member.protocols) > limits.migration_bytes_max:
        reason = f"its members have more than {limits.migration_bytes_max} bytes of metadata."
    if reason:
        raise Invalid(f"Cannot upgrade classic group {group_id} to consumer group because {reason}")


def upgraded(group_id: str, group: Group, topic_id_of: TopicIdOf) -> ConsumerGroupState:
    """Return a classic group as a consumer group. Raises ``Invalid`` if what a member sent cannot be read.

    A partition belongs to the member that has it assigned, else to one that said with its last JoinGroup that it still owns
    it: so nobody else gets it before it is given up.
    """
    state = ConsumerGroupState(epoch=group.generation, assignment_epoch=group.generation)
    try:
        claims = [(member, _claimed(group_id, member)) for member in group.membership.members.values()]
        for member, _ in claims:
            state.members[member.member_id] = _metadata(group, member)
    except Corrupt as malformed:
        text = f"Cannot upgrade classic group {group_id} to consumer group because the embedded consumer protocol is malformed."
        raise Invalid(text) from malformed
    taken = set[Partition]()
    owned: dict[str, list[Partition]] = {member.member_id: [] for member, _ in claims}
    for rank in range(2):
        for member, of_member in claims:
            found = [each for each in _by_id(of_member[rank], topic_id_of) if each not in taken]
            taken.update(found)
            owned[member.member_id] += found
    for member_id, partitions in owned.items():
        state.targets[member_id] = frozenset(partitions)
        state.current[member_id] = CurrentAssignment(
            member_epoch=group.generation, previous_epoch=group.generation,
            assigned=dict.fromkeys(partitions, group.generation),
        )  # fmt: skip
    return state


def _claimed(group_id: str, member: Member) -> tuple[NamedPartitions, NamedPartitions]:
    """Return what a member has assigned, and what it said that it owns."""
    assignment = decode_assignment(member.assignment)
    if assignment.has_user_data:
        text = f"Cannot upgrade classic group {group_id} to consumer group because an unsupported custom assignor is in use."
        raise Invalid(text)
    return assignment.partitions, decode_subscription(member.protocols[0][1]).owned


def _by_id(partitions: NamedPartitions, topic_id_of: TopicIdOf) -> list[Partition]:
    """Return partitions once each; those of topics that are gone are left out."""
    found: dict[Partition, None] = {}
    for name, indexes in partitions.items():
        topic_id = topic_id_of(name)
        if topic_id is not None:
            found.update(((topic_id, index), None) for index in indexes)
    return list(found)


def _metadata(group: Group, member: Member) -> MemberMetadata:
    content = member.metadata_for(group.protocol_name) or member.protocols[0][1]
    subscription = decode_subscription(content)
    return MemberMetadata(
        instance_id=member.group_instance_id, rack_id=subscription.rack_id, client_id=member.client_id,
        client_host=member.client_host, topic_names=tuple(sorted(set(subscription.topics))),
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        classic=ClassicJoin(session_timeout_ms=member.session_timeout_ms, protocols=member.protocols),
    )  # fmt: skip


def downgraded(group: ConsumerGroup, now: Instant) -> GroupImage:
    """Return a consumer group whose members are all of the classic protocol as a classic group that has to rebalance."""
    candidates = group.state.classic.supported_by_all()
    votes = [
        next(name for name, _ in member.classic.protocols if name in candidates)
        for member in group.state.members.values()
        if member.classic is not None
    ]
    protocol_name = max(votes, key=votes.count)
    members = (_image(group, member_id, protocol_name) for member_id in group.state.members)
    return GroupImage(
        group_id=group.group_id, protocol_type=PROTOCOL_TYPE, generation=group.state.epoch, protocol_name=protocol_name,
        leader=None, state_since_ms=now.wall_ms, members=tuple(members),
    )  # fmt: skip


def _image(group: ConsumerGroup, member_id: str, protocol_name: str) -> MemberImage:
    member = group.state.members[member_id]
    assert member.classic is not None, "all members are of the classic protocol"
    owned = group.state.current_of(member_id).owned
    return MemberImage(
        member_id=member_id, group_instance_id=member.instance_id, client_id=member.client_id,
        client_host=member.client_host, rebalance_timeout_ms=member.rebalance_timeout_ms,
        session_timeout_ms=member.classic.session_timeout_ms, subscription=dict(member.classic.protocols)[protocol_name],
        assignment=encoded(owned, group.names_of(member_id), member.classic),
    )  # fmt: skip
