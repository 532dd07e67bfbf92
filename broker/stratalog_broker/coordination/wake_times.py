"""The time on both clocks, and when each group or transaction of a coordinator has its next deadline. Does no I/O."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final, NamedTuple

NEVER_MS: Final = 2**62
"""A monotonic time that means no deadline."""


class Instant(NamedTuple):
    """The current time on both clocks."""

    monotonic_ms: int
    wall_ms: int


class WakeTimes:
    """One monotonic time in milliseconds for each key that has a deadline. Moving a time back takes effect once it is due."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        self._planned: dict[str, int] = {}

    @property
    def next_ms(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def plan(self, key: str, at_ms: int) -> None:
        """Make the key due at ``at_ms``, or earlier if that is planned already."""
        if at_ms < self._planned.get(key, NEVER_MS):
            self._planned[key] = at_ms
            heapq.heappush(self._heap, (at_ms, key))

    def due(self, now_ms: int) -> Iterator[str]:
        """Remove and yield the keys that are due, also those that are planned for the past during the iteration."""
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, key = heapq.heappop(self._heap)
            if self._planned.get(key) == at_ms:  # else it was moved to an earlier time and yielded then
                del self._planned[key]
                yield key
