"""DeleteTopics, versions 1–6 (by topic id too since v6).

A topic's records, hot and cold, are unreadable immediately; bookies and the object store are cleaned up later. Internal
topics cannot be deleted.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.topics import TopicCommands
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.durations import request_timeout_s
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.admin_errors import admin_error_code_of
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import DESCRIBE_TOPIC, Permissions, denial
from stratalog_core.errors import StratalogError

_ACCESS: Final = Access(Operation.DELETE, Resource.TOPIC)
_IDS_SINCE: Final = 6


async def handle(
    context: RequestContext,
    request: Any,
    *,
    partitions: Partitions,
    topic_commands: TopicCommands,
    permissions: Permissions,
) -> Any:
    timeout_s = request_timeout_s(request.timeout)
    if context.api_version < _IDS_SINCE:
        wanted = [(name, None) for name in request.topic_names]
    else:
        wanted = [(topic.name, topic.topic_id) for topic in request.topics]
    rows = []
    for name, topic_id in wanted:
        row = await _delete(context, partitions, topic_commands, permissions, name, topic_id, timeout_s)
        rows.append(context.new("DeletableTopicResult", **{"topic_id": topic_id, "error_message": None, **row}))
    return context.new("DeleteTopicsResponse", responses=tuple(rows))


async def _delete(
    context: RequestContext,
    partitions: Partitions,
    topic_commands: TopicCommands,
    permissions: Permissions,
    name: str | None,
    topic_id: Any,
    timeout_s: float,
) -> dict[str, Any]:
    """Delete one topic; return the fields of its row that its outcome decides."""
    if name is not None and topic_id is not None:
        text = f"both the name {name!r} and the id {topic_id} are given: choose one"
        return {"name": name, "error_code": ErrorCode.invalid_request, "error_message": text}
    is_named = name is not None
    try:
        if name is None:
            name = await _name_of(partitions, topic_commands, topic_id, timeout_s)
        if name is not None and not permissions.allows(context, _ACCESS, name):
            is_shown = is_named or permissions.allows(context, DESCRIBE_TOPIC, name)
            return _denied(context, name if is_shown else None)
        deleted = await topic_commands.delete(name, timeout_s) if name is not None else None
    except StratalogError as failure:
        return {"name": name, "error_code": admin_error_code_of(failure), "error_message": failure.message}
    if deleted is None:
        text = f"there is no topic with id {topic_id}"
        return {"name": None, "error_code": ErrorCode.unknown_topic_id, "error_message": text}
    return {"name": name, "error_code": ErrorCode.none, "topic_id": deleted.topic_id}


def _denied(context: RequestContext, name: str | None) -> dict[str, Any]:
    """Return the fields of a denied topic's row, without the name of a topic that the client may not describe."""
    text = denial(context, _ACCESS, name) if name is not None else None
    return {"name": name, "error_code": ErrorCode.topic_authorization_failed, "error_message": text}


async def _name_of(partitions: Partitions, topic_commands: TopicCommands, topic_id: Any, timeout_s: float) -> str | None:
    if topic_id is None:
        return None
    if partitions.topic_by_id(topic_id.bytes) is None:
        await topic_commands.refresh(timeout_s)
    topic = partitions.topic_by_id(topic_id.bytes)
    return topic.name if topic is not None else None


API: Final = HandlerInfo(key=20, min_version=1, max_version=6, handle=handle, access=_ACCESS)
