"""OffsetDelete, version 0: deletes offsets of topics to which no member subscribes (KIP-496)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.group_topics import TopicName, refuse_topics, resolve_topic
from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import READ_TOPIC, Permissions
from stratalog_metadata.client.api import MetadataView

_ACCESS: Final = Access(Operation.DELETE, Resource.GROUP)


async def handle(
    context: RequestContext,
    request: Any,
    *,
    view: MetadataView,
    partitions: Partitions,
    groups: GroupService,
    permissions: Permissions,
) -> Any:
    errors: list[ErrorCode] = []
    denied = permissions.denied(context, READ_TOPIC, (str(topic.name) for topic in request.topics))
    topics = refuse_topics((resolve_topic(view, partitions, topic, by_id=False) for topic in request.topics), denied)
    names = [
        (str(topic.name), row.partition_index)
        for topic, resolved in zip(request.topics, topics, strict=True)
        for row in topic.partitions
        if resolved.error_of(row.partition_index) is ErrorCode.none
    ]
    try:
        permissions.check_group(context, _ACCESS, request.group_id)
        coordinator = groups.coordinator_of(request.group_id)
        error, errors = await coordinator.delete_offsets(request.group_id, names)
    except KafkaError as refused:
        error = refused.code
    rows = _rows(context, request, topics, iter(errors)) if error is ErrorCode.none else ()
    return context.new("OffsetDeleteResponse", error_code=error, topics=rows)


def _rows(context: RequestContext, request: Any, topics: Sequence[TopicName], errors: Iterator[ErrorCode]) -> tuple[Any, ...]:
    def code_of(topic: TopicName, partition: int) -> ErrorCode:
        refusal = topic.error_of(partition)
        return next(errors) if refusal is ErrorCode.none else refusal

    return tuple(
        context.new(
            "OffsetDeleteResponseTopic",
            name=topic.name,
            partitions=tuple(
                context.new(
                    "OffsetDeleteResponsePartition",
                    partition_index=row.partition_index,
                    error_code=code_of(resolved, row.partition_index),
                )
                for row in topic.partitions
            ),
        )
        for topic, resolved in zip(request.topics, topics, strict=True)
    )


API: Final = HandlerInfo(key=47, min_version=0, max_version=0, handle=handle, access=_ACCESS)
