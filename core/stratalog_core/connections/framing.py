"""Length-prefixed frames between Stratalog's processes, sans-IO.

A frame is a 16-byte header and a body, big-endian::

    u32 length       bytes that follow this field (12 + body)
    u8  kind         0 request, 1 reply, 2 error
    u8  version      of this layout: 1
    u16 method       of the request; echoed in the answer
    u64 correlation  chosen by the caller; echoed in the answer
    ...  body        the method's own encoding; for an error: msgpack [code, message, detail]

A connection answers requests in any order. A frame over the limit, of another version or of an unknown kind closes it.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from stratalog_core.errors import Corrupt, StratalogError, error_from_wire
from stratalog_core.malformed import MALFORMED

HEADER: Final = struct.Struct(">IBBHQ")
HEADER_BYTES: Final = HEADER.size
LENGTH_BYTES: Final = 4
VERSION: Final = 1
REQUEST: Final = 0
REPLY: Final = 1
ERROR: Final = 2
FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
"""Upper bound of a frame's length field. Protocols split larger transfers."""

_encode_error = msgspec.msgpack.Encoder()
_decode_error = msgspec.msgpack.Decoder(tuple[str, str, dict[str, object]])


def pack_header(kind: int, method: int, correlation: int, body_bytes: int) -> bytes:
    """Header of a frame whose body has ``body_bytes`` bytes."""
    return HEADER.pack(HEADER_BYTES - LENGTH_BYTES + body_bytes, kind, VERSION, method, correlation)


def unpack_header(stream: bytes | bytearray | memoryview, start: int = 0) -> tuple[int, int, int, int]:
    """Return ``(whole size, kind, method, correlation)`` of the frame whose header is at ``start``. Raises ``Corrupt``."""
    length_field, kind, version, method, correlation = HEADER.unpack_from(stream, start)
    if not HEADER_BYTES - LENGTH_BYTES <= length_field <= FRAME_BYTES_MAX:
        raise Corrupt(f"frame length {length_field} is outside 12..{FRAME_BYTES_MAX}")
    if version != VERSION or kind > ERROR:
        raise Corrupt(f"frame of version {version}, kind {kind}; this node speaks version {VERSION}")
    return LENGTH_BYTES + length_field, kind, method, correlation


def encode_error(error: StratalogError) -> bytes:
    return _encode_error.encode((error.code, error.message, error.detail))


def decode_error(body: bytes | bytearray | memoryview) -> StratalogError:
    try:
        code, message, detail = _decode_error.decode(body)
    except MALFORMED as malformed:
        return Corrupt(f"malformed error answer: {malformed}")
    return error_from_wire(code, message, detail)
