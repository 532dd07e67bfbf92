"""CreatePartitions, versions 0–3: increases the number of a topic's partitions.

Differences from Apache Kafka: an assignment is an order of preferred owners (see ``create_topics.py``); internal topics
are refused, because the number of partitions determines which one a group belongs to.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.topics import TopicCommands
from stratalog_broker.protocol.durations import request_timeout_s
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.admin_errors import outcome_of
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions, denial

_ACCESS: Final = Access(Operation.ALTER, Resource.TOPIC)


async def handle(context: RequestContext, request: Any, *, topic_commands: TopicCommands, permissions: Permissions) -> Any:
    timeout_s = request_timeout_s(request.timeout)
    denied = permissions.denied(context, _ACCESS, (wish.name for wish in request.topics))
    created, rows = 0, []
    for wish in request.topics:
        if wish.name in denied:
            rows.append(_row(context, wish, ErrorCode.topic_authorization_failed, denial(context, _ACCESS, wish.name)))
            continue
        assigned = None if wish.assignments is None else [tuple(row.broker_ids) for row in wish.assignments]
        created += topic_commands.added_partitions(wish.name, wish.count)
        error, message = await outcome_of(
            topic_commands.grow(
                wish.name, wish.count, timeout_s,
                assigned=assigned, request_partitions=created, validate_only=request.validate_only,
            )
        )  # fmt: skip
        rows.append(_row(context, wish, error, message))
    return context.new("CreatePartitionsResponse", results=tuple(rows))


def _row(context: RequestContext, wish: Any, error: ErrorCode, message: str | None) -> Any:
    return context.new("CreatePartitionsTopicResult", name=wish.name, error_code=error, error_message=message)


API: Final = HandlerInfo(key=37, min_version=0, max_version=3, handle=handle, access=_ACCESS)
