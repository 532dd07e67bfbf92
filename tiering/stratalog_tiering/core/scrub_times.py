"""When each segment is due in the continuous scrub: once in each interval, at a time that its key alone decides. No I/O.

So there is no state to keep: a worker that starts again, or takes a partition over, continues where the clock is. The times of
a partition's segments are spread over the interval, and do not move when the history grows or shrinks.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

LOOK_BACK: Final = 0.1
"""Fraction of the interval, at most a day, that a worker scrubs again when it begins: a shorter outage leaves nothing out."""
_DAY_MS: Final = 24 * 3_600_000
_CHECKS: Final = 200
_PAUSE_S_MAX: Final = 3600.0
_PAUSE_S_MIN: Final = 0.05


def begin_ms(now_ms: int, interval_ms: int) -> int:
    """Wall time from which on a worker that begins now scrubs."""
    return now_ms - int(min(_DAY_MS, LOOK_BACK * interval_ms))


def is_due(key: str, after_ms: int, until_ms: int, interval_ms: int) -> bool:
    """Whether the segment at ``key`` is due after ``after_ms`` and not after ``until_ms`` (wall time)."""
    at = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) / 2**64
    return math.floor(until_ms / interval_ms - at) > math.floor(after_ms / interval_ms - at)


def pause_s(interval_ms: int) -> float:
    """Seconds between two looks at a partition."""
    return min(_PAUSE_S_MAX, max(_PAUSE_S_MIN, interval_ms / 1000 / _CHECKS))
