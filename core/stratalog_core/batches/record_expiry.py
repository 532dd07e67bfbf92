"""When a record expires: a header that the topic names holds the time, as decimal milliseconds since 1970 in ASCII.

A record without the header, or with a value that is no such number, does not expire. Of several headers the last one counts.
"""

from __future__ import annotations

from typing import Final

DIGITS_MAX: Final = 19


def expiry_of(value: bytes | None) -> int | None:
    """Return the time that the header's value means; None if it is no time."""
    return int(value) if value is not None and value.isdigit() and len(value) <= DIGITS_MAX else None
