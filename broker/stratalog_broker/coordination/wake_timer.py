"""One timer of the event loop for the earliest deadline of a coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class WakeTimer:
    """Calls ``on_wake`` at the earliest time that was planned since the last call. Times are monotonic milliseconds."""

    def __init__(self, on_wake: Callable[[], None]) -> None:
        self._on_wake = on_wake
        self._timer: asyncio.TimerHandle | None = None
        self._at_ms = 0

    def plan(self, at_ms: int | None, now_ms: int) -> None:
        """Wake at ``at_ms``, or earlier if that is planned already; None plans nothing."""
        if at_ms is None or (self._timer is not None and self._at_ms <= at_ms):
            return
        self.cancel()
        self._at_ms = at_ms
        self._timer = asyncio.get_running_loop().call_later(max(at_ms - now_ms, 0) / 1000, self._wake)

    def cancel(self) -> None:
        """Plan nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        self._timer = None
        self._on_wake()
