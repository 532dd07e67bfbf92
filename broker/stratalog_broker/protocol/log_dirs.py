"""DescribeLogDirs responses (key 35) with hand-encoded partitions: kio takes 7 µs for each, and a broker may own thousands.

A partition is: i32 index, i64 bytes, i64 offset lag, bool is future, and tagged fields from version 2 on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.protocol.arrays import with_array
from stratalog_broker.protocol.entities import Structs, encode_response

FLEXIBLE_VERSION: Final = 2
_SPACE_VERSION: Final = 4
_CORDONED_VERSION: Final = 5
_PARTITION: Final = struct.Struct(">iqq?")
_FLEXIBLE_PARTITION: Final = struct.Struct(">iqq?B")


def encode_dir(new: Structs, version: int, name: str, topics: Mapping[str, Iterable[tuple[int, int]]]) -> bytes:
    """Encode one log directory; ``topics`` are the (index, bytes) of the partitions by topic."""
    is_flexible = version >= FLEXIBLE_VERSION
    rows = [_topic(new, topic, partitions, is_flexible=is_flexible) for topic, partitions in topics.items()]
    space = (16 if version >= _SPACE_VERSION else 0) + (1 if version >= _CORDONED_VERSION else 0)
    tail = space + is_flexible
    head = new("DescribeLogDirsResult", error_code=ErrorCode.none, log_dir=name, topics=())
    return with_array(encode_response(head), tail, len(rows), rows, is_flexible=is_flexible)


def _topic(new: Structs, name: str, partitions: Iterable[tuple[int, int]], *, is_flexible: bool) -> bytes:
    if is_flexible:
        rows = [_FLEXIBLE_PARTITION.pack(index, size, 0, False, 0) for index, size in partitions]
    else:
        rows = [_PARTITION.pack(index, size, 0, False) for index, size in partitions]
    head = new("DescribeLogDirsTopic", name=name, partitions=())
    return with_array(encode_response(head), int(is_flexible), len(rows), rows, is_flexible=is_flexible)
