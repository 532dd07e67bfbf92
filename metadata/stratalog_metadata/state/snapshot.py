"""Snapshot encoding: all records after one entry of the log. docs/reference/formats/metadata-snapshot.md.

The same bytes are sent to a follower that is too far behind and to a client that starts its view, and written to the state
file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import crc32c
import msgspec

from stratalog_core.errors import Corrupt
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer
from stratalog_metadata.records import Versioned

MAGIC: Final = b"SLMS"
VERSION: Final = 1
_HEADER: Final = struct.Struct(">4sHQQ")
_CHECKSUM: Final = struct.Struct(">I")
_encode = msgspec.msgpack.Encoder()
_decode = msgspec.msgpack.Decoder(list[Versioned])


@dataclass(frozen=True, slots=True, kw_only=True)
class StateImage:
    """All records after the entry at (``index``, ``term``)."""

    index: int
    term: int
    records: Sequence[Versioned]


def encode(image: StateImage) -> bytes:
    content = _HEADER.pack(MAGIC, VERSION, image.index, image.term) + _encode.encode(image.records)
    return content + _CHECKSUM.pack(crc32c.crc32c(content))


def decode(content: Buffer) -> StateImage:
    """Decode a snapshot. Raises ``Corrupt``."""
    view = memoryview(content)
    if len(view) < _HEADER.size + _CHECKSUM.size:
        raise Corrupt(f"a metadata snapshot of {len(view)} bytes is too short")
    if crc32c.crc32c(view[:-4]) != _CHECKSUM.unpack_from(view, len(view) - 4)[0]:
        raise Corrupt("a metadata snapshot does not match its checksum")
    magic, version, index, term = _HEADER.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise Corrupt(f"a metadata snapshot of version {version}; this node reads version {VERSION}")
    try:
        return StateImage(index=index, term=term, records=_decode.decode(view[_HEADER.size : -4]))
    except MALFORMED as malformed:
        raise Corrupt(f"a metadata snapshot is malformed: {malformed}") from malformed
