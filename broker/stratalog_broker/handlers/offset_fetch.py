"""OffsetFetch, versions 1–10 (all topics since v2, several groups since v8, topic ids since v10).

A group, topic or partition without a committed offset returns offset -1 and no error. A client that requires stable offsets
(v7) gets UNSTABLE_OFFSET_COMMIT while an undecided transaction may change one. Member id and epoch (v9) are checked in groups
of the consumer protocol.

Difference from Apache Kafka: a group that the request repeats is answered INVALID_REQUEST from the second time on, and so is a
partition that it repeats for a group, if its offset has metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.group_topics import TopicName, topic_by_id
from stratalog_broker.coordination.groups.core.records import CommittedOffset
from stratalog_broker.coordination.groups.core.store import TopicPartitionName
from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.protocol.offset_fetch import CommittedRow, FetchedGroup, FetchedTopic, encode_offset_fetch
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import DESCRIBE_TOPIC, Permissions
from stratalog_broker.requests.repeated_names import first_or_repeated
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Topic, topic_key

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.GROUP)
_GROUPS_SINCE: Final = 8
_TOPIC_IDS_SINCE: Final = 10
_NOTHING: Final = CommittedOffset(offset=-1, leader_epoch=-1, metadata="", committed_at_ms=-1)
_UNSTABLE: Final = CommittedOffset(offset=-2, leader_epoch=-1, metadata="", committed_at_ms=-1)
"""Stands for an offset that an undecided transaction may change."""
Offsets = Mapping[TopicPartitionName, CommittedOffset]
Wanted = list[tuple[TopicName, Iterable[int]]]


async def handle(
    context: RequestContext,
    request: Any,
    *,
    view: MetadataView,
    partitions: Partitions,
    groups: GroupService,
    permissions: Permissions,
) -> bytes:
    if context.api_version >= _GROUPS_SINCE:
        is_stable = _requires_stable(request)
        found = [
            FetchedGroup(group.group_id, [], ErrorCode.invalid_request)
            if is_repeated
            else _group(context, view, partitions, groups, permissions, group, is_stable=is_stable)
            for group, (_, is_repeated) in zip(
                request.groups, first_or_repeated(group.group_id for group in request.groups), strict=True
            )
        ]
        return encode_offset_fetch(context.new, context.api_version, found)
    offsets, error = _offsets(context, groups, permissions, request.group_id, is_stable=_requires_stable(request))
    # v1 has no field for the group's error, so each partition carries it.
    topics = _topics(context, view, partitions, permissions, request.topics, offsets, error)
    return encode_offset_fetch(context.new, context.api_version, [FetchedGroup(request.group_id, topics, error)])


def _group(
    context: RequestContext,
    view: MetadataView,
    partitions: Partitions,
    groups: GroupService,
    permissions: Permissions,
    group: Any,
    *,
    is_stable: bool,
) -> FetchedGroup:
    member_id, epoch = getattr(group, "member_id", None), getattr(group, "member_epoch", -1)
    offsets, error = _offsets(context, groups, permissions, group.group_id, member_id, epoch, is_stable=is_stable)
    # Kafka returns no topics with a group error; clients check the group's code first.
    if error is not ErrorCode.none:
        return FetchedGroup(group.group_id, [], error)
    topics = _topics(context, view, partitions, permissions, group.topics, offsets, error)
    return FetchedGroup(group.group_id, topics, error)


def _requires_stable(request: Any) -> bool:
    """Whether the client waits for undecided transactions (v7, KIP-447)."""
    return bool(getattr(request, "require_stable", False))


def _offsets(
    context: RequestContext,
    groups: GroupService,
    permissions: Permissions,
    group_id: str,
    member_id: str | None = None,
    member_epoch: int = -1,
    *,
    is_stable: bool,
) -> tuple[Offsets, ErrorCode]:
    try:
        permissions.check_group(context, _ACCESS, group_id)
        coordinator = groups.coordinator_of(group_id).coordinator
    except KafkaError as refused:
        return {}, refused.code
    error = coordinator.table.consumers.check_fetch(group_id, member_id, member_epoch)
    offsets = coordinator.table.store.offsets_of(group_id)
    unstable = coordinator.commits.unstable_of(group_id) if is_stable else ()
    return {**offsets, **dict.fromkeys(unstable, _UNSTABLE)} if unstable else offsets, error


def _topics(
    context: RequestContext,
    view: MetadataView,
    partitions: Partitions,
    permissions: Permissions,
    wanted: Any,
    offsets: Offsets,
    error: ErrorCode,
) -> list[FetchedTopic]:
    found = (
        _all_of(context, view, offsets) if wanted is None else [_wanted(context, view, partitions, topic) for topic in wanted]
    )
    denied = permissions.denied(context, DESCRIBE_TOPIC, (topic.name for topic, _ in found if topic.name))
    if denied:
        found = [(topic, indexes) for topic, indexes in found if topic.name not in denied or wanted is not None]
    shown = set[TopicPartitionName]()
    return [
        FetchedTopic(topic.name, topic.topic_id, list(_rows(offsets, topic, indexes, _first(topic.error, error), shown)))
        if topic.name not in denied
        else FetchedTopic(topic.name, topic.topic_id, list(_denied_rows(indexes, error)))
        for topic, indexes in found
    ]


def _denied_rows(indexes: Iterable[int], error: ErrorCode) -> Iterator[CommittedRow]:
    code = _first(error, ErrorCode.topic_authorization_failed).value
    return (CommittedRow(index, -1, -1, "", code) for index in indexes)


def _rows(
    offsets: Offsets, topic: TopicName, indexes: Iterable[int], error: ErrorCode, shown: set[TopicPartitionName]
) -> Iterator[CommittedRow]:
    """Yield the topic's rows. ``shown``: the partitions whose metadata is in the response already."""
    code = error.value
    for index in indexes:
        found = _committed(offsets, topic, index)
        if found is _UNSTABLE:
            yield CommittedRow(index, -1, -1, "", _first(error, ErrorCode.unstable_offset_commit).value)
            continue
        if found.metadata:
            name = (topic.name, index)
            if name in shown:
                yield CommittedRow(index, -1, -1, "", ErrorCode.invalid_request.value)
                continue
            shown.add(name)
        yield CommittedRow(index, found.offset, found.leader_epoch, found.metadata, code)


def _committed(offsets: Offsets, topic: TopicName, index: int) -> CommittedOffset:
    """Return the offset committed for this topic, ignoring one of a deleted topic with the same name."""
    found = offsets.get((topic.name, index), _NOTHING)
    if found.topic_id is None or topic.topic_id is None or found.topic_id == topic.topic_id:
        return found
    return _NOTHING


def _first(error: ErrorCode, otherwise: ErrorCode) -> ErrorCode:
    return error if error is not ErrorCode.none else otherwise


def _wanted(context: RequestContext, view: MetadataView, partitions: Partitions, topic: Any) -> tuple[TopicName, Iterable[int]]:
    if context.api_version < _TOPIC_IDS_SINCE:
        # An unknown topic is not an error; it has no offsets.
        return TopicName(topic.name, _id_of(view, topic.name)), topic.partition_indexes
    known = topic_by_id(partitions, topic.topic_id)
    error = ErrorCode.none if known is not None else ErrorCode.unknown_topic_id
    return TopicName(known.name if known is not None else "", topic.topic_id, error), topic.partition_indexes


def _all_of(context: RequestContext, view: MetadataView, offsets: Offsets) -> Wanted:
    """Return all topics with committed offsets; since v10, only topics that still exist."""
    partitions: dict[str, list[int]] = {}
    for topic, index in sorted(offsets):
        partitions.setdefault(topic, []).append(index)
    rows: Wanted = []
    for name, indexes in partitions.items():
        known = TopicName(name, _id_of(view, name))
        if known.topic_id is not None or context.api_version < _TOPIC_IDS_SINCE:
            rows.append((known, [index for index in indexes if _committed(offsets, known, index) is not _NOTHING]))
    return rows


def _id_of(view: MetadataView, name: str) -> UUID | None:
    topic = view.find(Topic, topic_key(name))
    return topic.topic_id if topic is not None else None


API: Final = HandlerInfo(key=9, min_version=1, max_version=10, handle=handle, access=_ACCESS)
