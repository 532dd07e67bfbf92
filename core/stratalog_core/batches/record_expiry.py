"""When a record expires: a header that the topic names holds the time, as decimal milliseconds since 1970 in ASCII.

A record without the header, or with a value that is no such number, does not expire. Of several headers the last one counts.
"""

from __future__ import annotations

from typing import Final

from stratalog_core.batches.record_spans import RecordSpan, span_headers
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
        values = [value for name, value in span_headers(body, span) if name == header_name]
    except (Corrupt, IndexError):
        return None
    return expiry_of(values[-1]) if values else None
