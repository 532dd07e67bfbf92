"""Converts kio's ``timedelta`` fields to the broker's numbers."""

from __future__ import annotations

import datetime
from typing import Final

_MILLISECOND: Final = datetime.timedelta(milliseconds=1)


def milliseconds(duration: datetime.timedelta) -> int:
    """Return ``duration`` in whole milliseconds, the unit on the wire."""
    return duration // _MILLISECOND


def request_timeout_s(duration: datetime.timedelta, highest_s: float = 60.0) -> float:
    """Return the timeout that a client set for an administrative request, limited to 1 s … ``highest_s``."""
    return min(max(duration.total_seconds(), 1.0), highest_s)
