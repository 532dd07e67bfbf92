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
from stratalog_broker.requests.permissions import READ_TOPIC, Permissions

_ACCESS: Final = Access(Operation.DELETE, Resource.GROUP)


async def handle(context: RequestContext, request: Any, *, groups: GroupService, permissions: Permissions) -> Any:
    errors: list[ErrorCode] = []
    denied = permissions.denied(context, READ_TOPIC, (str(topic.name) for topic in request.topics))
    allowed = [topic for topic in request.topics if topic.name not in denied]
    names = [(str(topic.name), row.partition_index) for topic in allowed for row in topic.partitions]
    try:
        permissions.check_group(context, _ACCESS, request.group_id)
        coordinator = groups.coordinator_of(request.group_id)
        error, errors = await coordinator.delete_offsets(request.group_id, names)
    except KafkaError as refused:
        error = refused.code
    topics = _topics(context, request, denied, iter(errors)) if error is ErrorCode.none else ()
    return context.new("OffsetDeleteResponse", error_code=error, topics=topics)


def _topics(context: RequestContext, request: Any, denied: frozenset[str], errors: Iterator[ErrorCode]) -> tuple[Any, ...]:
    def code_of(topic: Any) -> ErrorCode:
        return ErrorCode.topic_authorization_failed if topic.name in denied else next(errors)

    return tuple(
        context.new(
            "OffsetDeleteResponseTopic",
            name=topic.name,
            partitions=tuple(
                context.new("OffsetDeleteResponsePartition", partition_index=row.partition_index, error_code=code_of(topic))
                for row in topic.partitions
            ),
        )
        for topic in request.topics
    )


API: Final = HandlerInfo(key=47, min_version=0, max_version=0, handle=handle, access=_ACCESS)
