"""DeleteRecords, versions 0–2: raises the first readable offset of partitions that this broker owns.

Records below it are unreadable immediately; retention removes the ledgers and segments later. Offset -1 means everything
below the high watermark.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.durations import request_timeout_s
from stratalog_broker.protocol.errors import KafkaError, error_code_of
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_core.errors import Conflict, StratalogError
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Log
from stratalog_metadata.state.commands import Command, Put, VersionIs

ALL: Final = -1
ATTEMPTS_MAX: Final = 5


async def handle(context: RequestContext, request: Any, *, metadata: MetadataClient, partitions: Partitions) -> Any:
    timeout_s = request_timeout_s(request.timeout)
    topics = []
    for topic in request.topics:
        rows = [await _delete(context, metadata, partitions, topic.name, row, timeout_s) for row in topic.partitions]
        topics.append(context.new("DeleteRecordsTopicResult", name=topic.name, partitions=tuple(rows)))
    return context.new("DeleteRecordsResponse", topics=tuple(topics))


async def _delete(
    context: RequestContext, metadata: MetadataClient, partitions: Partitions, topic: str, row: Any, timeout_s: float
) -> Any:
    error, low_watermark = ErrorCode.none, -1
    try:
        log = _owned(partitions, topic, row.partition_index)
        low_watermark = await _raise_start(metadata, log, row.offset, timeout_s)
    except KafkaError as refused:
        error = refused.code
    except StratalogError as failure:
        error = error_code_of(failure)
    return context.new(
        "DeleteRecordsPartitionResult", partition_index=row.partition_index, low_watermark=low_watermark, error_code=error
    )


def _owned(partitions: Partitions, topic: str, index: int) -> PartitionLog:
    log = partitions.find_by_name(topic.encode(), index)
    if log is not None and not log.topic.internal:
        return log
    known = partitions.topic_by_name(topic.encode())
    if known is None or not 0 <= index < known.partition_count:
        raise KafkaError(ErrorCode.unknown_topic_or_partition)
    raise KafkaError(ErrorCode.invalid_topic_exception if known.internal else ErrorCode.not_leader_or_follower)


async def _raise_start(metadata: MetadataClient, log: PartitionLog, offset: int, timeout_s: float) -> int:
    """Raise the log's start by compare-and-set; return the first offset that is readable afterwards."""
    key = Log(topic_id=log.topic_partition.topic_id, index=log.topic_partition.partition).key()
    for _ in range(ATTEMPTS_MAX):
        wanted = log.core.high_watermark if offset == ALL else offset
        if not 0 <= wanted <= log.core.high_watermark:
            raise KafkaError(ErrorCode.offset_out_of_range)
        stored = metadata.view.get(key)
        if stored is None or not isinstance(stored.record, Log):
            raise KafkaError(ErrorCode.unknown_topic_or_partition)
        record = stored.record
        if wanted <= record.log_start_offset:
            return record.log_start_offset
        changed = Log(topic_id=record.topic_id, index=record.index, ledgers=record.ledgers, log_start_offset=wanted)
        requirements = (log.requirement, VersionIs(key=key, version=stored.version))
        try:
            await metadata.propose(Command(updates=(Put(record=changed),), requirements=requirements), timeout_s)
            return wanted
        except Conflict:
            continue  # the list of ledgers changed concurrently
    raise KafkaError(ErrorCode.request_timed_out)


API: Final = HandlerInfo(key=21, min_version=0, max_version=2, handle=handle, access=Access(Operation.DELETE, Resource.TOPIC))
