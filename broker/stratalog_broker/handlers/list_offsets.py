"""ListOffsets (key 2), versions 1–11: offsets by name and by time.

Special times: -1 latest, -2 earliest, -3 the record with the greatest timestamp (KIP-734), -4 earliest on bookies
(KIP-405), -5 latest in the object store (KIP-1005), -6 earliest that is not in the object store yet (KIP-1023); one that the
request's version does not have is answered UNSUPPORTED_VERSION, as Kafka does. By time: the first record whose timestamp is not
earlier, hot or cold; timestamps need not rise. No such record: offset -1, no error.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.context import RequestContext
from stratalog_broker.handlers.info import HandlerInfo
from stratalog_broker.handlers.leadership import leader_epoch_error, why_not_here
from stratalog_broker.partition_log import PartitionLog
from stratalog_broker.protocol.errors import fetch_error_code_of
from stratalog_broker.timestamps import Found, find_greatest, find_time
from stratalog_core.errors import StratalogError

_KEY: Final = 2
_LATEST: Final = -1
_EARLIEST: Final = -2
_GREATEST: Final = -3
_EARLIEST_LOCAL: Final = -4
_LATEST_TIERED: Final = -5
_EARLIEST_PENDING_UPLOAD: Final = -6
_LOWEST_VERSION: Final = {
    _LATEST: 1,
    _EARLIEST: 1,
    _GREATEST: 7,
    _EARLIEST_LOCAL: 8,
    _LATEST_TIERED: 9,
    _EARLIEST_PENDING_UPLOAD: 11,
}
_NEVER: Final = 1 << 15
_AT_ONCE: Final = 32


async def handle(context: RequestContext, request: Any) -> Any:
    """Answer all partitions, those that need reading in parallel."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def answer(topic: str, wanted: Any) -> Any:
        async with slots:
            return await _answer(context, topic, wanted)

    asked = [(topic.name, wanted) for topic in request.topics for wanted in topic.partitions]
    answers = iter(await asyncio.gather(*(answer(topic, wanted) for topic, wanted in asked)))
    topics = tuple(
        context.new("ListOffsetsTopicResponse", name=topic.name, partitions=tuple(next(answers) for _ in topic.partitions))
        for topic in request.topics
    )
    return context.new("ListOffsetsResponse", topics=topics)


async def _answer(context: RequestContext, topic: str, wanted: Any) -> Any:
    log = context.services.partitions.find_by_name(topic.encode(), wanted.partition_index)
    code = why_not_here(context, topic, wanted.partition_index) if log is None else leader_epoch_error(log, wanted)
    found: Found | None = None
    if wanted.timestamp < 0 and context.api_version < _LOWEST_VERSION.get(wanted.timestamp, _NEVER):
        code = ErrorCode.unsupported_version
    if log is not None and code is ErrorCode.none:
        try:
            found = await _find(context, log, wanted.timestamp)
        except StratalogError as failure:
            code = fetch_error_code_of(failure)
    offset, timestamp_ms, epoch = found or Found(-1, -1, -1)
    return context.new(
        "ListOffsetsPartitionResponse",
        partition_index=wanted.partition_index,
        error_code=code,
        timestamp=timestamp_ms,
        offset=offset,
        leader_epoch=epoch,
    )


async def _find(context: RequestContext, log: PartitionLog, timestamp_ms: int) -> Found | None:
    if timestamp_ms >= 0:
        return await find_time(context.services, log, timestamp_ms)
    if timestamp_ms == _GREATEST:
        return await find_greatest(context.services, log)
    offset = _named(context, log, timestamp_ms)
    return None if offset is None else Found(offset, -1, log.core.epoch_at(offset))


def _named(context: RequestContext, log: PartitionLog, timestamp_ms: int) -> int | None:
    core, reader = log.core, context.services.reader
    pointer = reader.manifest_pointer(log)
    cold_end = pointer.end_offset if pointer is not None else 0
    offsets = {
        _LATEST: core.high_watermark,
        _EARLIEST: core.log_start_offset,
        _EARLIEST_LOCAL: reader.hot_start_offset(log),
        _LATEST_TIERED: cold_end - 1 if cold_end > core.log_start_offset else -1,
        _EARLIEST_PENDING_UPLOAD: max(cold_end, core.log_start_offset),
    }
    return offsets.get(timestamp_ms)


API: Final = HandlerInfo(key=_KEY, min_version=1, max_version=11, handle=handle)
