"""Points in time as messages show them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def utc_time(time_ms: int) -> datetime:
    """The wall time ``time_ms``, milliseconds since 1970, with its zone, UTC."""
    return _EPOCH + timedelta(milliseconds=time_ms)


def utc_text(time_ms: int, timespec: str = "seconds") -> str:
    """A wall time as ISO 8601: ``2026-11-24T12:00:00Z``; ``timespec`` as in ``isoformat``. Raises ``OverflowError``."""
    return utc_time(time_ms).isoformat(timespec=timespec).replace("+00:00", "Z")
