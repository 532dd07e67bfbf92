"""OffsetCommit, versions 2–10 (topic ids instead of names since v10). Responds when the ack quorum has the offsets.

Difference from Apache Kafka: ``retention_time`` of v2–v4 is ignored; the broker's retention applies (KIP-211).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.group_topics import TopicName, refuse_topics, resolve_topic
from stratalog_broker.coordination.groups.core.messages import NO_GENERATION
from stratalog_broker.coordination.groups.core.offset_rows import Commit
from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.protocol.offset_commit import CommittedTopic, encode_offset_commit
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import READ_TOPIC, Permissions
from stratalog_metadata.client.api import MetadataView

_ACCESS: Final = Access(Operation.READ, Resource.GROUP)
_MEMBER_EPOCHS_SINCE: Final = 9
_TOPIC_IDS_SINCE: Final = 10


async def handle(
    context: RequestContext,
    request: Any,
    *,
    view: MetadataView,
    partitions: Partitions,
    groups: GroupService,
    permissions: Permissions,
) -> bytes:
    topics = [resolve_topic(view, partitions, topic, by_id=context.api_version >= _TOPIC_IDS_SINCE) for topic in request.topics]
    denied = permissions.denied(context, READ_TOPIC, (topic.name for topic in topics if topic.name))
    if not permissions.allows(context, _ACCESS, request.group_id):
        topics = [replace(topic, error=ErrorCode.group_authorization_failed) for topic in topics]
        return _response(context, request, topics, iter(()))
    topics = refuse_topics(topics, denied)
    commits = list(_commits(request, topics))
    try:
        coordinator = groups.coordinator_of(request.group_id)
        is_old = context.api_version < _MEMBER_EPOCHS_SINCE
        if is_old and coordinator.coordinator.table.consumers.has_consumer_member(request.group_id, request.member_id):
            raise KafkaError(ErrorCode.unsupported_version)
        is_of_member = _generation(request) > NO_GENERATION
        if not is_old and is_of_member and not coordinator.coordinator.table.exists(request.group_id):
            raise KafkaError(ErrorCode.group_id_not_found)
        errors = await coordinator.commit(
            request.group_id, request.member_id, getattr(request, "group_instance_id", None), _generation(request), commits
        )
    except KafkaError as refused:
        errors = [refused.code] * len(commits)
    return _response(context, request, topics, iter(errors))


def _generation(request: Any) -> int:
    return int(request.generation_id_or_member_epoch)


def _commits(request: Any, topics: list[TopicName]) -> Iterator[Commit]:
    for topic, resolved in zip(request.topics, topics, strict=True):
        for row in topic.partitions:
            if resolved.error_of(row.partition_index) is not ErrorCode.none:
                continue
            epoch = getattr(row, "committed_leader_epoch", -1)
            metadata = row.committed_metadata or ""
            yield Commit(resolved.name, row.partition_index, row.committed_offset, epoch, metadata, resolved.topic_id)


def _response(context: RequestContext, request: Any, topics: list[TopicName], errors: Iterator[ErrorCode]) -> bytes:
    answers = []
    for topic, resolved in zip(request.topics, topics, strict=True):
        indexes = [row.partition_index for row in topic.partitions]
        refusals = [resolved.error_of(index) for index in indexes]
        codes = [(next(errors) if refusal is ErrorCode.none else refusal).value for refusal in refusals]
        answers.append(CommittedTopic(resolved.name, resolved.topic_id, indexes, codes))
    return encode_offset_commit(context.new, context.api_version, answers)


API: Final = HandlerInfo(key=8, min_version=2, max_version=10, handle=handle, access=_ACCESS)
