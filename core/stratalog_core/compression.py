"""The four codecs of Kafka's record batches, by their number in the batch attributes. All work is done by C libraries.

Snappy appears in two dresses: raw (librdkafka and most others) and xerial-framed (Java); both are read, xerial is
written. LZ4 is the frame format. ``decompress`` never allocates beyond ``limit_bytes``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

import cramjam
import lz4.frame
import zstandard

from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.ports import Buffer

NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4
NAMES: Final = {"none": NONE, "gzip": GZIP, "snappy": SNAPPY, "lz4": LZ4, "zstd": ZSTD}
DECOMPRESSED_BYTES_MAX: Final = 128 * 1024 * 1024

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES: Final = 16
_FIRST_PIECE_BYTES_MIN: Final = 64 * 1024
_LIKELY_RATIO: Final = 8
_LENGTH = struct.Struct(">i")


def compress(codec: int, content: Buffer) -> bytes:
    """``content`` in ``codec``. Raises ``Invalid`` for an unknown codec."""
    if codec == NONE:
        return bytes(content)
    if codec == GZIP:
        packer = zlib.compressobj(wbits=31)
        return packer.compress(content) + packer.flush()
    if codec == SNAPPY:
        block = bytes(cramjam.snappy.compress_raw(content))
        return _XERIAL_MAGIC + struct.pack(">ii", 1, 1) + _LENGTH.pack(len(block)) + block
    if codec == LZ4:
        return bytes(lz4.frame.compress(content))
    if codec == ZSTD:
        return zstandard.ZstdCompressor(level=3).compress(content)
    raise Invalid(f"compression codec {codec} is unknown; 0..4 are served")


def decompress(codec: int, content: Buffer, limit_bytes: int = DECOMPRESSED_BYTES_MAX) -> bytes:
    """Inverse of :func:`compress`. Raises ``Corrupt`` for bad bytes or a result over ``limit_bytes``."""
    try:
        result = _decompress(codec, content, limit_bytes)
    except (zlib.error, cramjam.DecompressionError, RuntimeError, EOFError, zstandard.ZstdError, struct.error) as bad:
        raise Corrupt(f"record batch does not decompress (codec {codec}): {bad}") from bad
    if len(result) > limit_bytes:
        raise Corrupt(f"record batch expands beyond the limit of {limit_bytes} bytes")
    return result


def _decompress(codec: int, content: Buffer, limit_bytes: int) -> bytes:
    if codec == NONE:
        return bytes(content)
    if codec == GZIP:
        gunzip = zlib.decompressobj(wbits=47)
        return _complete(gunzip.decompress(content, limit_bytes + 1), gunzip.eof, limit_bytes)
    if codec == SNAPPY:
        return _unsnappy(content, limit_bytes)
    if codec == LZ4:
        return _unlz4(content, limit_bytes)
    if codec == ZSTD:
        return _unzstd(content, limit_bytes)
    raise Corrupt(f"compression codec {codec} is unknown")


def _unlz4(content: Buffer, limit_bytes: int) -> bytes:
    unpacker = lz4.frame.LZ4FrameDecompressor()
    pieces: list[bytes] = []
    unread = content
    for piece_bytes in _piece_sizes(len(content), limit_bytes):
        pieces.append(unpacker.decompress(unread, piece_bytes))
        if unpacker.eof or unpacker.needs_input:
            break
        unread = b""
    return _complete(b"".join(pieces), unpacker.eof, limit_bytes)


def _unzstd(content: Buffer, limit_bytes: int) -> bytes:
    stream = zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True)
    pieces: list[bytes] = []
    for piece_bytes in _piece_sizes(len(content), limit_bytes):
        pieces.append(stream.read(piece_bytes))
        if len(pieces[-1]) < piece_bytes:
            break
    return b"".join(pieces)


def _piece_sizes(content_bytes: int, limit_bytes: int) -> Iterator[int]:
    """Sizes to ask for, up to one byte over the limit: a likely one first, because the codecs allocate all that is asked
    for (asking for the limit at once made a 1 MB batch ten times slower)."""
    room, size = limit_bytes + 1, max(_FIRST_PIECE_BYTES_MIN, content_bytes * _LIKELY_RATIO)
    while room > 0:
        size = min(size, room)
        yield size
        room -= size
        size *= 2


def _complete(result: bytes, ended: bool, limit_bytes: int) -> bytes:
    if not ended and len(result) <= limit_bytes:
        raise Corrupt("compressed records are cut short")
    return result


def _unsnappy(content: Buffer, limit_bytes: int) -> bytes:
    view = memoryview(content)
    if bytes(view[:8]) != _XERIAL_MAGIC:
        return _snappy_block(view, limit_bytes)
    if len(view) < _XERIAL_HEADER_BYTES:
        raise Corrupt("snappy stream header is cut short")
    pieces: list[bytes] = []
    position, room = _XERIAL_HEADER_BYTES, limit_bytes
    while position < len(view):
        (length,) = _LENGTH.unpack_from(view, position)
        position += _LENGTH.size
        if length < 0 or position + length > len(view):
            raise Corrupt("snappy block is cut short")
        pieces.append(_snappy_block(view[position : position + length], room))
        room -= len(pieces[-1])
        position += length
    return b"".join(pieces)


def _snappy_block(block: memoryview, limit_bytes: int) -> bytes:
    if cramjam.snappy.decompress_raw_len(block) > limit_bytes:
        raise Corrupt(f"snappy block expands beyond the limit of {limit_bytes} bytes")
    return bytes(cramjam.snappy.decompress_raw(block))
