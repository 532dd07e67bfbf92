"""Points in time as people type them: milliseconds since 1970, ISO 8601, ``now``, or how long ago (``90s``, ``7d``)."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from stratalog_core.errors import Invalid
from stratalog_core.moments import utc_text

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
UNIT_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


def parse_moment(text: str, *, now_ms: int) -> int:
    """Return milliseconds since 1970-01-01 UTC. A time without a zone is UTC. Raises ``Invalid``."""
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    if text == "now":
        return now_ms
    ago = re.fullmatch(r"(\d{1,9})([smhdw])", text)
    if ago:
        return now_ms - int(ago[1]) * UNIT_MS[ago[2]]
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as wrong:
        raise Invalid(
            f"{text!r} is not a time: give 2013-07-04, 2013-07-04T12:00:00Z, milliseconds since 1970, or 15m (ago)"
        ) from wrong
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // _MILLISECOND


def format_moment(time_ms: int) -> str:
    """Return ISO 8601 in UTC with milliseconds, ``-`` for a record without a time, or the number after the year 9999.

    Such times are of producers that count microseconds.
    """
    if time_ms < 0:
        return "-"
    try:
        return utc_text(time_ms, "milliseconds")
    except OverflowError:
        return str(time_ms)
