"""ListOffsets responses (key 2) with hand-encoded partitions, because a consumer of thousands asks for all at once.

A partition is: i32 index, i16 error, i64 timestamp, i64 offset, from version 4 on i32 leader epoch, from 6 on tagged fields.
kio encodes the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from stratalog_broker.protocol.arrays import with_array
from stratalog_broker.protocol.entities import Structs, encode_response

_EPOCH_VERSION: Final = 4
_FLEXIBLE_VERSION: Final = 6
_PLAIN: Final = struct.Struct(">ihqq").pack
_WITH_EPOCH: Final = struct.Struct(">ihqqi").pack
_FLEXIBLE: Final = struct.Struct(">ihqqiB").pack


class OffsetRow(NamedTuple):
    """The response for one partition; ``error`` is the code's number."""

    partition: int
    error: int
    timestamp_ms: int
    offset: int
    leader_epoch: int


def encode_list_offsets(new: Structs, version: int, topics: Sequence[tuple[str, Sequence[OffsetRow]]]) -> bytes:
    """Encode a ``ListOffsetsResponse`` of these topics; ``new`` builds its structs in this version."""
    is_flexible = version >= _FLEXIBLE_VERSION
    tail = 1 if is_flexible else 0
    encoded = []
    for name, rows in topics:
        topic = encode_response(new("ListOffsetsTopicResponse", name=name, partitions=()))
        encoded.append(with_array(topic, tail, len(rows), _encode_rows(version, rows), is_flexible=is_flexible))
    response = encode_response(new("ListOffsetsResponse", topics=()))
    return with_array(response, tail, len(encoded), encoded, is_flexible=is_flexible)


def _encode_rows(version: int, rows: Sequence[OffsetRow]) -> list[bytes]:
    if version >= _FLEXIBLE_VERSION:
        return [_FLEXIBLE(*row, 0) for row in rows]
    if version >= _EPOCH_VERSION:
        return [_WITH_EPOCH(*row) for row in rows]
    return [_PLAIN(*row[:-1]) for row in rows]
