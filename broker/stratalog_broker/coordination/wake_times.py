"""The time on both clocks, and when each group or transaction of a coordinator has its next deadline. Does no I/O."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final, NamedTuple

NEVER_MS: Final = 2**62
"""A monotonic time that means no deadline."""
_STALE_MIN: Final = 1_000


class Instant(NamedTuple):
    """The current time on both clocks."""

    monotonic_ms: int
    wall_ms: int


class WakeTimes:
    """One monotonic time in milliseconds for each key that has a deadline. Moving a time back takes effect once it is due."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        """With times of keys that were moved or forgotten since, no more of these than of others and ``_STALE_MIN``."""
        self._planned: dict[str, int] = {}

    @property
    def next_ms(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def plan(self, key: str, at_ms: int) -> None:
        """Make the key due at ``at_ms``, or earlier if that is planned already."""
        if at_ms < self._planned.get(key, NEVER_MS):
            self._planned[key] = at_ms
            heapq.heappush(self._heap, (at_ms, key))
            self._drop_stale()

    def forget(self, key: str) -> None:
        """Make the key due no more; no error if it is not planned."""
        if self._planned.pop(key, None) is not None:
            self._drop_stale()

    def _drop_stale(self) -> None:
        if len(self._heap) > 2 * len(self._planned) + _STALE_MIN:
            self._heap = [(at_ms, key) for key, at_ms in self._planned.items()]
            heapq.heapify(self._heap)

    def due(self, now_ms: int) -> Iterator[str]:
        """Remove and yield the keys that are due, also those that are planned for the past during the iteration."""
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, key = heapq.heappop(self._heap)
            if self._planned.get(key) == at_ms:  # else it was moved to an earlier time and yielded then
                del self._planned[key]
                yield key
