"""kio decodes time fields to ``timedelta``; the broker counts in integers."""

from __future__ import annotations

import datetime
from typing import Final

_MILLISECOND: Final = datetime.timedelta(milliseconds=1)


def milliseconds(duration: datetime.timedelta) -> int:
    """Whole milliseconds, as they came over the wire."""
    return duration // _MILLISECOND


def request_timeout_s(duration: datetime.timedelta, highest_s: float = 60.0) -> float:
    """A client's wish for how long an administrative request may take, within 1 s and ``highest_s``."""
    return min(max(duration.total_seconds(), 1.0), highest_s)
