"""Rewrites a batch with another codec, in bounded memory: for topics whose ``compression.type`` is not ``producer``.

Everything but codec, length and checksum stays: offsets, timestamps, producer and sequence, so idempotence sees the same batch.
"""

from __future__ import annotations

from typing import NamedTuple

from stratalog_core.batches.batch import COMPRESSION_MASK, HEADER_BYTES, BatchHeader, write_header
from stratalog_core.batches.compression import DECOMPRESSED_BYTES_MAX, compress_pieces, decompress_pieces
from stratalog_core.batches.record_search import IsWanted, search_bytes
from stratalog_core.errors import Unavailable
from stratalog_core.ports import Buffer


class Codec(NamedTuple):
    """A codec by its number, and its level; None: the codec's default."""

    number: int
    level: int | None = None


def recompressed(
    batch: Buffer,
    header: BatchHeader,
    codec: Codec,
    bytes_max: int,
    *,
    is_wanted: IsWanted = lambda: True,
    memory_bytes: int = DECOMPRESSED_BYTES_MAX,
) -> bytearray | None:
    """Return the batch with its records compressed by ``codec``; None if it would have more than ``bytes_max`` bytes.

    A batch whose codec claims more memory than ``memory_bytes`` may not expand beyond ``memory_bytes``. Raises ``Corrupt`` for
    records that do not decompress, and ``Unavailable`` once ``is_wanted`` returns False.
    """
    content = memoryview(batch)[HEADER_BYTES : header.size_bytes]
    limit_bytes = DECOMPRESSED_BYTES_MAX if search_bytes(batch, header) <= memory_bytes else memory_bytes
    rewritten = bytearray(HEADER_BYTES)
    for piece in compress_pieces(codec.number, decompress_pieces(header.compression, content, limit_bytes), codec.level):
        if not is_wanted():
            raise Unavailable("no client waits for this batch any longer")
        rewritten += piece
        if len(rewritten) > bytes_max:
            return None
    write_header(rewritten, header._replace(attributes=header.attributes & ~COMPRESSION_MASK | codec.number))
    return rewritten
