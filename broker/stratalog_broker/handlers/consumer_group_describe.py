"""ConsumerGroupDescribe, versions 0–1: groups of the consumer protocol (KIP-848), their members and assignments.

A group that does not exist or is a classic one is answered with GROUP_ID_NOT_FOUND. A group that subscribes to a topic which
the client may not describe is answered with TOPIC_AUTHORIZATION_FAILED, as in Kafka. UNSUPPORTED_VERSION below level 1 of
``group.version``.

Difference from Apache Kafka: a group that the request repeats is answered INVALID_REQUEST from the second time on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.consumer.group import ConsumerGroup
from stratalog_broker.coordination.groups.core.consumer.model import Partition
from stratalog_broker.coordination.groups.service import GroupService, check_group_version
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import DESCRIBE_TOPIC, Permissions
from stratalog_broker.requests.repeated_names import first_or_repeated
from stratalog_metadata.client.api import MetadataView

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.GROUP)
_CLASSIC_MEMBER: Final = 0
_CONSUMER_MEMBER: Final = 1
_TOPICS_DENIED: Final = "The group has described topic(s) that the client is not authorized to describe."
_Names = dict[UUID, str]


async def handle(
    context: RequestContext,
    request: Any,
    *,
    view: MetadataView,
    groups: GroupService,
    partitions: Partitions,
    permissions: Permissions,
) -> Any:
    try:
        check_group_version(view)
    except KafkaError as refused:
        rows = tuple(_row(context, group_id, error=refused.code) for group_id in request.group_ids)
        return context.new("ConsumerGroupDescribeResponse", groups=rows)
    rows = tuple(
        _row(context, group_id, error=ErrorCode.invalid_request)
        if is_repeated
        else _describe(context, groups, partitions, permissions, group_id)
        for group_id, is_repeated in first_or_repeated(request.group_ids)
    )
    return context.new("ConsumerGroupDescribeResponse", groups=rows)


def _describe(
    context: RequestContext, groups: GroupService, partitions: Partitions, permissions: Permissions, group_id: str
) -> Any:
    try:
        permissions.check_group(context, _ACCESS, group_id)
        table = groups.coordinator_of(group_id).coordinator.table
    except KafkaError as refused:
        return _row(context, group_id, error=refused.code)
    group = table.consumers.find(group_id)
    if group is None:
        what = "is not a consumer group" if table.exists(group_id) else "not found"
        return _row(context, group_id, error=ErrorCode.group_id_not_found, message=f"Group {group_id} {what}.")
    names = _names_of(partitions, group)
    subscribed = {name for member in group.state.members.values() for name in member.topic_names}
    if permissions.denied(context, DESCRIBE_TOPIC, {*subscribed, *names.values()}):
        return _row(context, group_id, error=ErrorCode.topic_authorization_failed, message=_TOPICS_DENIED)
    return _row(
        context, group_id, group_state=str(group.phase), group_epoch=group.state.epoch,
        assignment_epoch=group.state.assignment_epoch, assignor_name=group.assignor,
        members=tuple(_member(context, group, member_id, names) for member_id in group.state.members),
    )  # fmt: skip


def _names_of(partitions: Partitions, group: ConsumerGroup) -> _Names:
    """Return the names of the assigned topics that still exist."""
    assigned = (
        (*group.state.target_of(member_id), *group.state.current_of(member_id).assigned) for member_id in group.state.members
    )
    topic_ids = {topic_id for of_member in assigned for topic_id, _ in of_member}
    found = {topic_id: partitions.topic_by_id(topic_id.bytes) for topic_id in topic_ids}
    return {topic_id: topic.name for topic_id, topic in found.items() if topic is not None}


def _member(context: RequestContext, group: ConsumerGroup, member_id: str, names: _Names) -> Any:
    member, current = group.state.members[member_id], group.state.current_of(member_id)
    member_type = _CONSUMER_MEMBER if member.classic is None else _CLASSIC_MEMBER
    return context.new(
        "Member",
        member_id=member_id, instance_id=member.instance_id, rack_id=member.rack_id, member_epoch=current.member_epoch,
        client_id=member.client_id, client_host=member.client_host, subscribed_topic_names=member.topic_names,
        subscribed_topic_regex=member.topic_pattern or None, member_type=member_type,
        assignment=_assignment(context, current.assigned, names),
        target_assignment=_assignment(context, group.state.target_of(member_id), names),
    )  # fmt: skip


def _assignment(context: RequestContext, partitions: Iterable[Partition], names: _Names) -> Any:
    by_topic: dict[UUID, list[int]] = {}
    for topic_id, index in sorted(partitions):
        by_topic.setdefault(topic_id, []).append(index)
    rows = tuple(
        context.new("TopicPartitions", topic_id=topic_id, topic_name=names[topic_id], partitions=tuple(indexes))
        for topic_id, indexes in by_topic.items()
        if topic_id in names
    )
    return context.new("Assignment", topic_partitions=rows)


def _row(
    context: RequestContext, group_id: str, *, error: ErrorCode = ErrorCode.none, message: str | None = None,
    group_state: str = "", group_epoch: int = 0, assignment_epoch: int = 0, assignor_name: str = "",
    members: tuple[Any, ...] = (),
) -> Any:  # fmt: skip
    return context.new(
        "DescribedGroup",
        error_code=error, error_message=message, group_id=group_id, group_state=group_state, group_epoch=group_epoch,
        assignment_epoch=assignment_epoch, assignor_name=assignor_name, members=members,
    )  # fmt: skip


API: Final = HandlerInfo(key=69, min_version=0, max_version=1, handle=handle, access=_ACCESS)
