"""Request and response headers (Kafka protocol guide, "Request Header v1/v2"), parsed by hand for every request.

A request frame, after its four-byte length, is: i16 API key, i16 version, i32 correlation id, nullable string client id,
and in flexible versions tagged fields. kio's schemas say which versions are flexible. ApiVersions always answers with response
header v0, so that a client of any version can read it.
"""

from __future__ import annotations

import functools
import struct
from typing import Final, NamedTuple

from kio.index import UnknownAPIKey, UnknownEntity, load_request_schema, load_response_schema

from stratalog_core.errors import Corrupt

LENGTH_BYTES: Final = 4
_HEAD: Final = struct.Struct(">hhih")
_CORRELATION: Final = struct.Struct(">i")
_LENGTH_AND_CORRELATION: Final = struct.Struct(">ii")
_LENGTH_CORRELATION_TAGS: Final = struct.Struct(">iib")
_UVARINT_BYTES_MAX: Final = 5
ELEMENTS_MAX: Final = 100_000
"""Elements of all arrays of one request together: each becomes an object many times its size. The largest legitimate requests
name every partition of a client once."""
TAGGED_FIELDS_MAX: Final = 1000
"""Tagged fields of one struct; Kafka's structs have at most three."""


class RequestHead(NamedTuple):
    """A request header, and the body's position in the frame (without its length field)."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str
    body_start: int


def parse_head(frame: memoryview) -> RequestHead:
    """Return the header of a request. Raises ``Corrupt`` if it is malformed.

    For an unknown API or version, only key, version and correlation id are meaningful.
    """
    try:
        api_key, api_version, correlation_id, client_id_bytes = _HEAD.unpack_from(frame)
    except struct.error:
        raise Corrupt(f"request header is cut short: {len(frame)} bytes") from None
    position = _HEAD.size
    client_id = ""
    if client_id_bytes > 0:
        client_id = str(frame[position : position + client_id_bytes], "utf-8", "replace")
        position += client_id_bytes
    if is_flexible(api_key, api_version):
        position = skip_tagged_fields(frame, position)
    if position > len(frame):
        raise Corrupt(f"request header exceeds its frame of {len(frame)} bytes")
    return tuple.__new__(RequestHead, (api_key, api_version, correlation_id, client_id, position))


@functools.cache
def _flexible_versions(api_key: int, api_version: int) -> tuple[bool, bool]:
    """Whether (request, response) headers of this version have tagged fields. Raises kio's errors if it is unknown."""
    request = load_request_schema(api_key, api_version)
    response = load_response_schema(api_key, api_version)
    return request.__header_schema__.__flexible__, response.__header_schema__.__flexible__


_unknown: Final = (UnknownAPIKey, UnknownEntity)


def is_flexible(api_key: int, api_version: int) -> bool:
    """Whether requests of this version have tagged fields; False for an unknown API or version."""
    try:
        return _flexible_versions(api_key, api_version)[0]
    except _unknown:
        return False


def response_head(api_key: int, api_version: int, correlation_id: int, body_bytes: int) -> bytes:
    """Return the length field and header of a response whose body has ``body_bytes`` bytes."""
    try:
        tagged = _flexible_versions(api_key, api_version)[1]
    except _unknown:
        tagged = False
    if tagged:
        return _LENGTH_CORRELATION_TAGS.pack(5 + body_bytes, correlation_id, 0)
    return _LENGTH_AND_CORRELATION.pack(4 + body_bytes, correlation_id)


def read_uvarint(buffer: memoryview, position: int) -> tuple[int, int]:
    """Return ``(value, next position)`` of an unsigned varint of at most five bytes. Raises ``Corrupt``."""
    if position < len(buffer) and (first := buffer[position]) < 0x80:
        return first, position + 1
    value = shift = 0
    for index in range(position, min(position + _UVARINT_BYTES_MAX, len(buffer))):
        byte = buffer[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    raise Corrupt(f"unsigned varint at byte {position} does not end")


def write_uvarint(value: int) -> bytes:
    """Return ``value`` as an unsigned varint."""
    if value < 0x80:
        return value.to_bytes(1, "big")
    out = bytearray()
    while value > 0x7F:
        out.append(0x80 | (value & 0x7F))
        value >>= 7
    out.append(value)
    return bytes(out)


def skip_tagged_fields(buffer: memoryview, position: int) -> int:
    """Return the position after the tagged fields that begin at ``position`` (nearly always none). Raises ``Corrupt``."""
    if position < len(buffer) and not buffer[position]:
        return position + 1
    count, position = read_uvarint(buffer, position)
    if count > TAGGED_FIELDS_MAX:
        raise Corrupt(f"{count} tagged fields in one struct; maximum is {TAGGED_FIELDS_MAX}")
    for _ in range(count):
        _, position = read_uvarint(buffer, position)
        size, position = read_uvarint(buffer, position)
        position += size
        if position > len(buffer):
            raise Corrupt(f"tagged field of {size} bytes exceeds its message")
    return position
