"""Coarse time-outs for very many short waits: one timer for all, instead of one per produce request.

Almost every entry is discarded long before it is due, so adding and discarding must be cheap. A deadline may fire up to
``SWEEP_S`` late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from stratalog_core.ports import Clock

SWEEP_S: Final = 0.1


class Deadlines:
    """Callbacks with deadlines. The timer runs only while there are entries."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[object, tuple[float, Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, timeout_s: float, on_due: Callable[[], None]) -> object:
        """Call ``on_due`` after ``timeout_s``, unless the returned key is discarded first."""
        key = object()
        self._entries[key] = (self._clock.monotonic() + timeout_s, on_due)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        return key

    def discard(self, key: object) -> None:
        """Remove an entry; no error if it has been removed or has fired."""
        self._entries.pop(key, None)

    def _sweep(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        for key in [key for key, (due, _) in self._entries.items() if due <= now]:
            _, on_due = self._entries.pop(key)
            on_due()
        if self._entries and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def close(self) -> None:
        """Remove all entries and stop the timer."""
        self._entries.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
