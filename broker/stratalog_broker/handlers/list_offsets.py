"""ListOffsets (key 2), versions 1–11: offsets by special value and by time.

Special times: -1 latest, -2 earliest, -3 the record with the greatest timestamp (KIP-734), -4 earliest on bookies
(KIP-405), -5 latest in the object store (KIP-1005), -6 earliest not yet in the object store (KIP-1023). A special time that
the request's version does not have returns UNSUPPORTED_VERSION, as in Kafka. By time: the first record, hot or cold, whose
timestamp is not earlier; timestamps need not increase. If there is none: offset -1 and no error. With isolation level
``read_committed`` (from version 2) the latest offset is the last stable one, and records from there on are not found. A
partition that the request repeats is answered INVALID_REQUEST, as in Kafka.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.errors import fetch_error_code_of
from stratalog_broker.protocol.list_offsets import OffsetRow, encode_list_offsets
from stratalog_broker.reads.offset_lookup import NamedOffset, OffsetLookup
from stratalog_broker.reads.time_searches import Found
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.leadership import leader_epoch_error, why_not_here
from stratalog_broker.requests.permissions import Permissions
from stratalog_broker.requests.repeated_names import repeated_names
from stratalog_core.errors import StratalogError

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.TOPIC)
_KEY: Final = 2
_LOWEST_VERSION: Final[Mapping[int, int]] = {
    NamedOffset.LATEST: 1,
    NamedOffset.EARLIEST: 1,
    NamedOffset.GREATEST_TIMESTAMP: 7,
    NamedOffset.EARLIEST_LOCAL: 8,
    NamedOffset.LATEST_TIERED: 9,
    NamedOffset.EARLIEST_PENDING_UPLOAD: 11,
}
_NEVER: Final = 1 << 15
_ISOLATION_VERSION: Final = 2
_READ_COMMITTED: Final = 1
_AT_ONCE: Final = 32


async def handle(
    context: RequestContext, request: Any, *, partitions: Partitions, lookup: OffsetLookup, permissions: Permissions
) -> bytes:
    """Return the offsets of all partitions: first those in memory, then, concurrently, those that need reads."""
    is_committed = context.api_version >= _ISOLATION_VERSION and request.isolation_level == _READ_COMMITTED
    denied = permissions.denied(context, _ACCESS, (topic.name for topic in request.topics))
    repeated = repeated_names((topic.name, wanted.partition_index) for topic in request.topics for wanted in topic.partitions)
    answers: list[list[OffsetRow | None]] = [
        [_row(wanted, ErrorCode.topic_authorization_failed) for wanted in topic.partitions]
        if topic.name in denied
        else [
            _row(wanted, ErrorCode.invalid_request)
            if repeated and (topic.name, wanted.partition_index) in repeated
            else _answer_at_once(context, partitions, lookup, topic.name, wanted, is_committed=is_committed)
            for wanted in topic.partitions
        ]
        for topic in request.topics
    ]
    slots = asyncio.Semaphore(_AT_ONCE)

    async def read(rows: list[OffsetRow | None], position: int, topic: str, wanted: Any) -> None:
        async with slots:
            rows[position] = await _answer(partitions, lookup, topic, wanted, is_committed=is_committed)

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
    return encode_list_offsets(context.new, context.api_version, topics)


def _answer_at_once(
    context: RequestContext, partitions: Partitions, lookup: OffsetLookup, topic: str, wanted: Any, *, is_committed: bool
) -> OffsetRow | None:
    """Return a partition's result if it needs no read, else None."""
    timestamp_ms = wanted.timestamp
    if timestamp_ms < 0 and context.api_version < _LOWEST_VERSION.get(timestamp_ms, _NEVER):
        return _row(wanted, ErrorCode.unsupported_version)
    log = partitions.find_by_name(topic.encode(), wanted.partition_index)
    code = why_not_here(partitions, topic, wanted.partition_index) if log is None else leader_epoch_error(log, wanted)
    if log is None or code is not ErrorCode.none:
        return _row(wanted, code)
    if log.is_releasing:
        return _row(wanted, ErrorCode.not_leader_or_follower)
    found = lookup.at_once(log, timestamp_ms, is_committed=is_committed)
    return None if found is None else _row(wanted, ErrorCode.none, found)


def _row(wanted: Any, code: ErrorCode, found: Found | None = None) -> OffsetRow:
    offset, timestamp_ms, epoch = found or (-1, -1, -1)
    return OffsetRow(wanted.partition_index, code.value, timestamp_ms, offset, epoch)


async def _answer(partitions: Partitions, lookup: OffsetLookup, topic: str, wanted: Any, *, is_committed: bool) -> OffsetRow:
    """Return the result for a time, or for the record with the greatest timestamp."""
    log = partitions.find_by_name(topic.encode(), wanted.partition_index)
    if log is None:
        return _row(wanted, why_not_here(partitions, topic, wanted.partition_index))
    try:
        return _row(wanted, ErrorCode.none, await lookup.find(log, wanted.timestamp, is_committed=is_committed))
    except StratalogError as failure:
        return _row(wanted, fetch_error_code_of(failure))


API: Final = HandlerInfo(
    key=_KEY,
    min_version=1,
    max_version=11,
    handle=handle,
    ends_with_client=True,
    access=_ACCESS,
)
