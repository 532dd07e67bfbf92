"""DeleteTopics, versions 1–6 (by topic id too since v6).

A topic's records, hot and cold, are unreadable immediately; bookies and the object store are cleaned up later. Internal
topics cannot be deleted.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.topics import TopicCommands
from stratalog_broker.coordination.group_topics import topic_by_id
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.durations import request_timeout_s
from stratalog_broker.protocol.errors import KafkaError, error_code_of
from stratalog_broker.requests.access import Access, Operation, Resource
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
    rows = [await _delete(context, partitions, topic_commands, name, topic_id, timeout_s) for name, topic_id in wanted]
    return context.new("DeleteTopicsResponse", responses=tuple(rows))


async def _delete(
    context: RequestContext,
    partitions: Partitions,
    topic_commands: TopicCommands,
    name: str | None,
    topic_id: Any,
    timeout_s: float,
) -> Any:
    error, message = ErrorCode.none, None
    try:
        if name is None:
            name = _name_of(partitions, topic_id)
        topic_id = (await topic_commands.delete(name, timeout_s)).topic_id
    except KafkaError as refused:
        error, message = refused.code, refused.message
    except StratalogError as failure:
        error, message = error_code_of(failure), failure.message
    return context.new("DeletableTopicResult", name=name, topic_id=topic_id, error_code=error, error_message=message)


def _name_of(partitions: Partitions, topic_id: Any) -> str:
    topic = topic_by_id(partitions, topic_id)
    if topic is None:
        raise KafkaError(ErrorCode.unknown_topic_id, f"there is no topic with id {topic_id}")
    return topic.name


API: Final = HandlerInfo(key=20, min_version=1, max_version=6, handle=handle, access=Access(Operation.DELETE, Resource.TOPIC))
