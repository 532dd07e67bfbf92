"""OffsetCommit, versions 2–10 (topic ids instead of names from v10 on). Answered when the quorum has the offsets.

Where it differs from Apache Kafka: ``retention_time`` of v2–v4 is ignored; the broker's retention holds (KIP-211).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.context import RequestContext
from stratalog_broker.groups.coordinator import Commit
from stratalog_broker.handlers.group_topics import TopicName, resolve_topic
from stratalog_broker.handlers.info import HandlerInfo
from stratalog_broker.protocol.errors import KafkaError

_TOPIC_IDS_SINCE: Final = 10


async def handle(context: RequestContext, request: Any) -> Any:
    topics = [resolve_topic(context, topic, by_id=context.api_version >= _TOPIC_IDS_SINCE) for topic in request.topics]
    commits = list(_commits(request, topics))
    try:
        coordinator = context.services.groups.coordinator_of(request.group_id)
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
        if resolved.error is not ErrorCode.none:
            continue
        for row in topic.partitions:
            yield Commit(
                topic=resolved.name, partition=row.partition_index, offset=row.committed_offset,
                leader_epoch=getattr(row, "committed_leader_epoch", -1), metadata=row.committed_metadata or "",
                topic_id=resolved.topic_id,
            )  # fmt: skip


def _response(context: RequestContext, request: Any, topics: list[TopicName], errors: Iterator[ErrorCode]) -> Any:
    rows = []
    for topic, resolved in zip(request.topics, topics, strict=True):
        partitions = tuple(
            context.new(
                "OffsetCommitResponsePartition",
                partition_index=row.partition_index,
                error_code=next(errors) if resolved.error is ErrorCode.none else resolved.error,
            )
            for row in topic.partitions
        )
        rows.append(
            context.new("OffsetCommitResponseTopic", name=resolved.name, topic_id=resolved.topic_id, partitions=partitions)
        )
    return context.new("OffsetCommitResponse", topics=tuple(rows))


API: Final = HandlerInfo(key=8, min_version=2, max_version=10, handle=handle)
