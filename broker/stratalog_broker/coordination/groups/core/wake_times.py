"""When which group of a coordinator has its next deadline. Does no I/O."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from stratalog_broker.coordination.groups.core.deadlines import NEVER_MS


class WakeTimes:
    """One monotonic time in milliseconds for each group that has a deadline. Moving a time back takes effect once it is due."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        self._planned: dict[str, int] = {}

    @property
    def next_ms(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def plan(self, group_id: str, at_ms: int) -> None:
        """Make the group due at ``at_ms``, or earlier if that is planned already."""
        if at_ms < self._planned.get(group_id, NEVER_MS):
            self._planned[group_id] = at_ms
            heapq.heappush(self._heap, (at_ms, group_id))

    def due(self, now_ms: int) -> Iterator[str]:
        """Remove and yield the groups that are due, also those that are planned for the past during the iteration."""
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, group_id = heapq.heappop(self._heap)
            if self._planned.get(group_id) == at_ms:  # else it was moved to an earlier time and yielded then
                del self._planned[group_id]
                yield group_id
