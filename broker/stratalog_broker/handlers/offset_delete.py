"""OffsetDelete, version 0: deletes offsets of topics to which no member subscribes (KIP-496)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo


async def handle(context: RequestContext, request: Any, *, groups: GroupService) -> Any:
    names = [(str(topic.name), row.partition_index) for topic in request.topics for row in topic.partitions]
    errors: list[ErrorCode] = []
    try:
        coordinator = groups.coordinator_of(request.group_id)
        error, errors = await coordinator.delete_offsets(request.group_id, names)
    except KafkaError as refused:
        error = refused.code
    topics = _topics(context, request, iter(errors)) if error is ErrorCode.none else ()
    return context.new("OffsetDeleteResponse", error_code=error, topics=topics)


def _topics(context: RequestContext, request: Any, errors: Iterator[ErrorCode]) -> tuple[Any, ...]:
    return tuple(
        context.new(
            "OffsetDeleteResponseTopic",
            name=topic.name,
            partitions=tuple(
                context.new("OffsetDeleteResponsePartition", partition_index=row.partition_index, error_code=next(errors))
                for row in topic.partitions
            ),
        )
        for topic in request.topics
    )


API: Final = HandlerInfo(key=47, min_version=0, max_version=0, handle=handle, access=Access(Operation.DELETE, Resource.GROUP))
