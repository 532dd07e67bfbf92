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
from stratalog_core.errors import StratalogError

_IDS_SINCE: Final = 6


async def handle(context: RequestContext, request: Any, *, partitions: Partitions, topic_commands: TopicCommands) -> Any:
    timeout_s = request_timeout_s(request.timeout)
    if context.api_version < _IDS_SINCE:
        wanted = [(name, None) for name in request.topic_names]
    else:
        wanted = [(topic.name, topic.topic_id) for topic in request.topics]
    rows = []
    for name, topic_id in wanted:
        known = _name_of(partitions, topic_id) if name is None else name
        row = await _delete(topic_commands, known, topic_id, timeout_s)
        rows.append(context.new("DeletableTopicResult", **{"name": known, "topic_id": topic_id, "error_message": None, **row}))
    return context.new("DeleteTopicsResponse", responses=tuple(rows))


def _name_of(partitions: Partitions, topic_id: Any) -> str | None:
    topic = partitions.topic_by_id(topic_id.bytes) if topic_id is not None else None
    return topic.name if topic is not None else None


async def _delete(topic_commands: TopicCommands, name: str | None, topic_id: Any, timeout_s: float) -> dict[str, Any]:
    """Delete one topic; return the fields of its row that its outcome decides."""
    if name is None:
        return {"error_code": ErrorCode.unknown_topic_id, "error_message": f"there is no topic with id {topic_id}"}
    try:
        deleted = await topic_commands.delete(name, timeout_s)
    except StratalogError as failure:
        return {"error_code": admin_error_code_of(failure), "error_message": failure.message}
    return {"error_code": ErrorCode.none, "topic_id": deleted.topic_id}


API: Final = HandlerInfo(key=20, min_version=1, max_version=6, handle=handle, access=Access(Operation.DELETE, Resource.TOPIC))
