"""OffsetFetch responses (key 9) with hand-encoded partitions, because a consumer of thousands asks for all at once.

A partition is: i32 index, i64 offset, from version 5 on i32 leader epoch, a string of metadata, i16 error; from version 6 on
the string is compact and tagged fields follow. kio encodes the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from stratalog_broker.protocol.arrays import with_array
from stratalog_broker.protocol.entities import Structs, encode_response
from stratalog_broker.protocol.frame import write_uvarint

_EPOCH_VERSION: Final = 5
_FLEXIBLE_VERSION: Final = 6
_GROUPS_VERSION: Final = 8
_ERROR_VERSION: Final = 2
_ERROR_BYTES: Final = 2
# Most offsets have no metadata: its length (0; compact: 1) is part of these structs.
_PLAIN: Final = struct.Struct(">iqhh").pack
_WITH_EPOCH: Final = struct.Struct(">iqihh").pack
_FLEXIBLE: Final = struct.Struct(">iqiBhB").pack
_PLAIN_HEAD: Final = struct.Struct(">iqh").pack
_WITH_EPOCH_HEAD: Final = struct.Struct(">iqih").pack
_FLEXIBLE_HEAD: Final = struct.Struct(">iqi").pack
_ERROR: Final = struct.Struct(">h").pack
_FLEXIBLE_ERROR: Final = struct.Struct(">hB").pack


class CommittedRow(NamedTuple):
    """The response for one partition; ``error`` is the code's number."""

    partition: int
    offset: int
    leader_epoch: int
    metadata: str
    error: int


class FetchedTopic(NamedTuple):
    name: str
    topic_id: UUID | None
    rows: Sequence[CommittedRow]


class FetchedGroup(NamedTuple):
    """The response for one group; ``error`` applies to the group as a whole."""

    group_id: str
    topics: Sequence[FetchedTopic]
    error: ErrorCode


def encode_offset_fetch(new: Structs, version: int, groups: Sequence[FetchedGroup]) -> bytes:
    """Encode an ``OffsetFetchResponse``; ``new`` builds its structs in this version.

    Before version 8 there must be exactly one group.
    """
    is_flexible = version >= _FLEXIBLE_VERSION
    tail = 1 if is_flexible else 0
    if version >= _GROUPS_VERSION:
        encoded = [_encode_group(new, version, group) for group in groups]
        return with_array(encode_response(new("OffsetFetchResponse", groups=())), 1, len(encoded), encoded, is_flexible=True)
    (group,) = groups
    response = encode_response(new("OffsetFetchResponse", topics=(), error_code=group.error))
    heads = [new("OffsetFetchResponseTopic", name=each.name, partitions=()) for each in group.topics]
    topics = [_encode_topic(*pair, version) for pair in zip(heads, group.topics, strict=True)]
    before = tail + (_ERROR_BYTES if version >= _ERROR_VERSION else 0)
    return with_array(response, before, len(topics), topics, is_flexible=is_flexible)


def _encode_group(new: Structs, version: int, group: FetchedGroup) -> bytes:
    head = encode_response(new("OffsetFetchResponseGroup", group_id=group.group_id, topics=(), error_code=group.error))
    heads = [new("OffsetFetchResponseTopics", name=each.name, topic_id=each.topic_id, partitions=()) for each in group.topics]
    topics = [_encode_topic(*pair, version) for pair in zip(heads, group.topics, strict=True)]
    return with_array(head, 1 + _ERROR_BYTES, len(topics), topics, is_flexible=True)


def _encode_topic(head: object, topic: FetchedTopic, version: int) -> bytes:
    is_flexible = version >= _FLEXIBLE_VERSION
    encode = _flexible_row if is_flexible else _row_with_epoch if version >= _EPOCH_VERSION else _plain_row
    rows = [encode(row) for row in topic.rows]
    return with_array(encode_response(head), 1 if is_flexible else 0, len(rows), rows, is_flexible=is_flexible)


def _flexible_row(row: CommittedRow) -> bytes:
    partition, offset, leader_epoch, metadata, error = row
    if not metadata:
        return _FLEXIBLE(partition, offset, leader_epoch, 1, error, 0)
    text = metadata.encode()
    head = _FLEXIBLE_HEAD(partition, offset, leader_epoch)
    return b"".join((head, write_uvarint(len(text) + 1), text, _FLEXIBLE_ERROR(error, 0)))


def _row_with_epoch(row: CommittedRow) -> bytes:
    partition, offset, leader_epoch, metadata, error = row
    if not metadata:
        return _WITH_EPOCH(partition, offset, leader_epoch, 0, error)
    text = metadata.encode()
    return b"".join((_WITH_EPOCH_HEAD(partition, offset, leader_epoch, len(text)), text, _ERROR(error)))


def _plain_row(row: CommittedRow) -> bytes:
    partition, offset, _, metadata, error = row
    if not metadata:
        return _PLAIN(partition, offset, 0, error)
    text = metadata.encode()
    return b"".join((_PLAIN_HEAD(partition, offset, len(text)), text, _ERROR(error)))
