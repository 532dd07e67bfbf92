"""When a record expires: a header that the topic names holds the time, as decimal milliseconds since 1970 in ASCII.

A record without the header, or with a value that is no such number, does not expire. Of several headers the last one counts.
"""

from __future__ import annotations

from typing import Final

from stratalog_core.batches.record_spans import RecordSpan
from stratalog_core.batches.records import decode_varint
from stratalog_core.errors import Corrupt

_DIGITS_MAX: Final = 19


def expiry_of(value: bytes | None) -> int | None:
    """Return the time that the header's value means; None if it is no time."""
    return int(value) if value is not None and value.isdigit() and len(value) <= _DIGITS_MAX else None


def expiry_ms(body: bytes, span: RecordSpan, header_name: bytes) -> int | None:
    """Return the wall time at which a record of ``body`` expires; None if it does not, or its headers cannot be read."""
    if body.find(header_name, span.offset_position, span.end) < 0:
        return None
    try:
        return _parsed(body, span, header_name)
    except (Corrupt, IndexError):
        return None


def _parsed(body: bytes, span: RecordSpan, header_name: bytes) -> int | None:
    _, position = decode_varint(body, span.offset_position)
    for _ in range(2):  # key and value
        length, position = decode_varint(body, position)
        position += max(length, 0)
    count, position = decode_varint(body, position)
    found: bytes | None = None
    for _ in range(count):
        name, position = _field(body, position, span.end)
        value, position = _field(body, position, span.end)
        if name == header_name:
            found = value
    return expiry_of(found)


def _field(body: bytes, position: int, end: int) -> tuple[bytes | None, int]:
    length, position = decode_varint(body, position)
    field_end = position + max(length, 0)
    if field_end > end:
        raise Corrupt(f"a header of {length} bytes exceeds its record")
    return body[position:field_end] if length >= 0 else None, field_end
