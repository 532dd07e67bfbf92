"""OffsetCommit responses (key 8) with hand-encoded partitions, because a consumer of thousands commits all at once.

A partition is: i32 index, i16 error, from version 8 on tagged fields. kio encodes the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

from stratalog_broker.protocol.arrays import with_array
from stratalog_broker.protocol.entities import Structs, encode_response

_FLEXIBLE_VERSION: Final = 8
_PLAIN: Final = struct.Struct(">ih").pack
_FLEXIBLE: Final = struct.Struct(">ihB").pack


class CommittedTopic(NamedTuple):
    """The response for one topic: indexes of its partitions, and the number of each one's error code."""

    name: str
    topic_id: UUID | None
    partitions: Sequence[int]
    errors: Sequence[int]


def encode_offset_commit(new: Structs, version: int, topics: Sequence[CommittedTopic]) -> bytes:
    """Encode an ``OffsetCommitResponse`` of these topics; ``new`` builds its structs in this version."""
    is_flexible = version >= _FLEXIBLE_VERSION
    tail = 1 if is_flexible else 0
    encoded = []
    for topic in topics:
        head = encode_response(new("OffsetCommitResponseTopic", name=topic.name, topic_id=topic.topic_id, partitions=()))
        pairs = zip(topic.partitions, topic.errors, strict=True)
        rows = [_FLEXIBLE(*pair, 0) for pair in pairs] if is_flexible else [_PLAIN(*pair) for pair in pairs]
        encoded.append(with_array(head, tail, len(rows), rows, is_flexible=is_flexible))
    response = encode_response(new("OffsetCommitResponse", topics=()))
    return with_array(response, tail, len(encoded), encoded, is_flexible=is_flexible)
