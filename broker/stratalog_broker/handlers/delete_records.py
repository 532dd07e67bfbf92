"""DeleteRecords, versions 0–2: raises the first readable offset of partitions that this broker owns.

Records below it are unreadable immediately; retention removes the ledgers and segments later. Offset -1 means everything
below the high watermark. A topic with ``cleanup.policy=compact`` answers POLICY_VIOLATION.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.record_deletion import delete_records
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.durations import request_timeout_s
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.admin_errors import admin_error_code_of
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions
from stratalog_core.errors import StratalogError
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient
from stratalog_tiering.cold.reader import ColdReader

_ACCESS: Final = Access(Operation.DELETE, Resource.TOPIC)


async def handle(
    context: RequestContext,
    request: Any,
    *,
    metadata: MetadataClient,
    partitions: Partitions,
    cold: ColdReader,
    clock: Clock,
    permissions: Permissions,
) -> Any:
    def delete(topic: str, row: Any) -> Awaitable[int]:
        return delete_records(metadata, partitions, cold, clock, topic, row.partition_index, row.offset, timeout_s)

    timeout_s = request_timeout_s(request.timeout)
    denied = permissions.denied(context, _ACCESS, (topic.name for topic in request.topics))
    topics = []
    for topic in request.topics:
        if topic.name in denied:
            rows = [_row(context, row, ErrorCode.topic_authorization_failed) for row in topic.partitions]
        else:
            rows = [await _delete(context, row, delete(topic.name, row)) for row in topic.partitions]
        topics.append(context.new("DeleteRecordsTopicResult", name=topic.name, partitions=tuple(rows)))
    return context.new("DeleteRecordsResponse", topics=tuple(topics))


async def _delete(context: RequestContext, row: Any, deletion: Awaitable[int]) -> Any:
    error, low_watermark = ErrorCode.none, -1
    try:
        low_watermark = await deletion
    except StratalogError as failure:
        error = admin_error_code_of(failure)
    return _row(context, row, error, low_watermark)


def _row(context: RequestContext, row: Any, error: ErrorCode, low_watermark: int = -1) -> Any:
    return context.new(
        "DeleteRecordsPartitionResult", partition_index=row.partition_index, low_watermark=low_watermark, error_code=error
    )


API: Final = HandlerInfo(key=21, min_version=0, max_version=2, handle=handle, access=_ACCESS)
