"""ListOffsets (key 2), versions 1–11: offsets by special value and by time.

Special times: -1 latest, -2 earliest, -3 the record with the greatest timestamp (KIP-734), -4 earliest on bookies
(KIP-405), -5 latest in the object store (KIP-1005), -6 earliest not yet in the object store (KIP-1023). A special time that
the request's version does not have returns UNSUPPORTED_VERSION, as in Kafka. By time: the first record, hot or cold, whose
timestamp is not earlier; timestamps need not increase. If there is none: offset -1 and no error.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.errors import fetch_error_code_of
from stratalog_broker.protocol.list_offsets import OffsetRow, encode_list_offsets
from stratalog_broker.reads.log_reader import LogReader
from stratalog_broker.reads.time_searches import Found, TimeSearches
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.leadership import leader_epoch_error, why_not_here
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


async def handle(
    context: RequestContext, request: Any, *, partitions: Partitions, reader: LogReader, searches: TimeSearches
) -> bytes:
    """Return the offsets of all partitions: first those in memory, then, concurrently, those that need reads."""
    answers = [
        [_answer_at_once(context, partitions, reader, topic.name, wanted) for wanted in topic.partitions]
        for topic in request.topics
    ]
    slots = asyncio.Semaphore(_AT_ONCE)

    async def read(rows: list[OffsetRow | None], position: int, topic: str, wanted: Any) -> None:
        async with slots:
            rows[position] = await _answer(partitions, searches, topic, wanted)

    await asyncio.gather(
        *(
            read(rows, position, topic.name, topic.partitions[position])
            for topic, rows in zip(request.topics, answers, strict=True)
            for position, row in enumerate(rows)
            if row is None
        )
    )
    topics = [
        (topic.name, [row for row in rows if row is not None]) for topic, rows in zip(request.topics, answers, strict=True)
    ]
    return encode_list_offsets(context.api_version, topics)


def _answer_at_once(
    context: RequestContext, partitions: Partitions, reader: LogReader, topic: str, wanted: Any
) -> OffsetRow | None:
    """Return a partition's result if it needs no read, else None."""
    timestamp_ms = wanted.timestamp
    if timestamp_ms < 0 and context.api_version < _LOWEST_VERSION.get(timestamp_ms, _NEVER):
        return _row(wanted, ErrorCode.unsupported_version)
    log = partitions.find_by_name(topic.encode(), wanted.partition_index)
    code = why_not_here(partitions, topic, wanted.partition_index) if log is None else leader_epoch_error(log, wanted)
    if log is None or code is not ErrorCode.none:
        return _row(wanted, code)
    if timestamp_ms >= 0 or timestamp_ms == _GREATEST:
        return None
    offset = _named(reader, log, timestamp_ms)
    return _row(wanted, ErrorCode.none, Found(offset, -1, log.core.epoch_at(offset)))


def _row(wanted: Any, code: ErrorCode, found: Found | None = None) -> OffsetRow:
    offset, timestamp_ms, epoch = found or (-1, -1, -1)
    return OffsetRow(wanted.partition_index, code.value, timestamp_ms, offset, epoch)


async def _answer(partitions: Partitions, searches: TimeSearches, topic: str, wanted: Any) -> OffsetRow:
    """Return the result for a time, or for the record with the greatest timestamp."""
    log = partitions.find_by_name(topic.encode(), wanted.partition_index)
    if log is None:
        return _row(wanted, why_not_here(partitions, topic, wanted.partition_index))
    try:
        if wanted.timestamp == _GREATEST:
            found = await searches.find_greatest(log)
        else:
            found = await searches.find_time(log, wanted.timestamp)
    except StratalogError as failure:
        return _row(wanted, fetch_error_code_of(failure))
    return _row(wanted, ErrorCode.none, found)


def _named(reader: LogReader, log: PartitionLog, timestamp_ms: int) -> int:
    core = log.core
    if timestamp_ms == _LATEST:
        return core.high_watermark
    if timestamp_ms == _EARLIEST:
        return core.log_start_offset
    if timestamp_ms == _EARLIEST_LOCAL:
        return reader.hot_start_offset(log)
    pointer = reader.manifest_pointer(log)
    cold_end = pointer.end_offset if pointer is not None else 0
    if timestamp_ms == _LATEST_TIERED:
        return cold_end - 1 if cold_end > core.log_start_offset else -1
    assert timestamp_ms == _EARLIEST_PENDING_UPLOAD, "all others are refused"
    return max(cold_end, core.log_start_offset)


API: Final = HandlerInfo(
    key=_KEY,
    min_version=1,
    max_version=11,
    handle=handle,
    ends_with_client=True,
    access=Access(Operation.DESCRIBE, Resource.TOPIC),
)
