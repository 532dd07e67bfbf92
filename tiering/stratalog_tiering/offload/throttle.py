"""A limit on a rate, shared by all who pass through it: a token bucket on the monotonic clock, holding a quarter second."""

from __future__ import annotations

import asyncio
from typing import Final

from stratalog_core.ports import Clock

_BURST_S: Final = 0.25


class Throttle:
    """``take(n)`` returns when ``n`` more units fit into ``per_s``; one larger than a burst passes and is paid off after."""

    def __init__(self, per_s: float, clock: Clock) -> None:
        self._per_s = per_s
        self._clock = clock
        self._available = per_s * _BURST_S
        self._filled_at = clock.monotonic()

    async def take(self, units: int) -> None:
        self._fill()
        self._available -= units
        # Debts queue up in order: each taker waits until the bucket, as it is after its own share, is back at zero.
        if self._available < 0:
            await asyncio.sleep(-self._available / self._per_s)

    def _fill(self) -> None:
        now = self._clock.monotonic()
        self._available = min(self._per_s * _BURST_S, self._available + (now - self._filled_at) * self._per_s)
        self._filled_at = now
