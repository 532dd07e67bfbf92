"""Record batches with a sound header and CRC whose records cannot be read: a client can send them, a broker may have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from stratalog_core.batches.batch import HEADER_BYTES, LOCATED_RECORDS_MAX, MAGIC, BatchHeader, write_header
from stratalog_core.batches.compression import DECOMPRESSED_BYTES_MAX, NAMES, NONE, compress, compress_pieces
from stratalog_core.batches.records import Record, build_batch, encode_varint

_MIB: Final = 1024 * 1024
_SOUND: Final = bytes(build_batch([Record(offset=0, timestamp_ms=0, key=b"key", value=b"value")])[HEADER_BYTES:])
_ENDLESS: Final = b"\xff" * 30
_BODIES: Final = {
    "a length that does not end": _ENDLESS,
    "a length beyond the batch": encode_varint(2**40) + _SOUND[1:],
    "a negative length": encode_varint(-5) + _SOUND[1:],
    "a key beyond its record": bytes((encode_varint(7)[0], 0, 0, 0)) + encode_varint(100) + b"abc",
    "a value beyond its record": _SOUND[:-7] + encode_varint(100) + _SOUND[-6:],
    "bytes after the last record": _SOUND + b"\x00\x01",
    "fewer records than it claims": b"",
}
CODECS: Final = tuple(NAMES.values())
KINDS: Final = (*_BODIES, "more records than are located", "a bomb", "cut short")


def hostile_batch(kind: str, codec: int, base_offset: int = 0) -> bytes:
    """A batch with one record, or as many as the kind claims. ``kind`` is one of ``KINDS``."""
    records = LOCATED_RECORDS_MAX + 1 if kind == "more records than are located" else 1
    if kind == "a bomb":
        packed = b"".join(compress_pieces(codec, _zeros())) if codec != NONE else _ENDLESS
    elif kind == "cut short":
        packed = compress(codec, _SOUND)[:-1]
    else:
        packed = compress(codec, _BODIES.get(kind, _SOUND))
    batch = bytearray(HEADER_BYTES) + packed
    header = BatchHeader(base_offset, 0, 0, MAGIC, 0, codec, records - 1, 0, 0, -1, -1, -1, records)
    write_header(batch, header)
    return bytes(batch)


def _zeros() -> Iterator[bytes]:
    """One piece more than may come out of a batch."""
    piece = encode_varint(2 * DECOMPRESSED_BYTES_MAX) + bytes(_MIB)
    for _ in range(DECOMPRESSED_BYTES_MAX // _MIB + 1):
        yield piece
        piece = bytes(_MIB)
