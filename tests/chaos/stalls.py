"""Measures how busy the machine was: the time for which this mostly idle process had to wait for the CPU."""

from __future__ import annotations

import threading
import time
from typing import Final

_INTERVAL_S: Final = 0.05
_COUNTED_S: Final = 0.5


class Stalls:
    """Sleeps repeatedly and adds up the time by which it wakes up late, in seconds."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.total_s = 0.0
        """The sum of waits that were longer than half a second."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="stalls", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def _measure(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(_INTERVAL_S):
            now = time.monotonic()
            late_s, before = now - before - _INTERVAL_S, now
            self.longest_s = max(self.longest_s, late_s)
            self.total_s += late_s if late_s > _COUNTED_S else 0.0
