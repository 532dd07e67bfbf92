"""OffsetForLeaderEpoch (key 23), versions 2–4: the end offset of a leader epoch (KIP-101, KIP-320).

Consumers send it after a leader change to detect truncation below their position. Acknowledged records are never truncated
here, but the result must still be correct.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.leadership import leader_epoch_error, why_not_here
from stratalog_broker.requests.permissions import Permissions

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.TOPIC)
_KEY: Final = 23


async def handle(context: RequestContext, request: Any, *, partitions: Partitions, permissions: Permissions) -> Any:
    """Return the end offset for each partition from the owner's memory."""
    denied = permissions.denied(context, _ACCESS, (topic.topic for topic in request.topics))
    topics = tuple(
        context.new(
            "OffsetForLeaderTopicResult",
            topic=topic.topic,
            partitions=tuple(
                _refused(context, one, ErrorCode.topic_authorization_failed)
                if topic.topic in denied
                else _end_of_epoch(context, partitions, topic.topic, one)
                for one in topic.partitions
            ),
        )
        for topic in request.topics
    )
    return context.new("OffsetForLeaderEpochResponse", topics=topics)


def _end_of_epoch(context: RequestContext, partitions: Partitions, topic: str, wanted: Any) -> Any:
    log = partitions.find_by_name(topic.encode(), wanted.partition)
    code = why_not_here(partitions, topic, wanted.partition) if log is None else leader_epoch_error(log, wanted)
    if log is None or code is not ErrorCode.none:
        return _refused(context, wanted, code)
    epoch, end_offset = log.core.end_of_epoch(wanted.leader_epoch)
    return context.new(
        "EpochEndOffset", error_code=ErrorCode.none, partition=wanted.partition, leader_epoch=epoch, end_offset=end_offset
    )


def _refused(context: RequestContext, wanted: Any, code: ErrorCode) -> Any:
    return context.new("EpochEndOffset", error_code=code, partition=wanted.partition)


API: Final = HandlerInfo(key=_KEY, min_version=2, max_version=4, handle=handle, access=_ACCESS)
