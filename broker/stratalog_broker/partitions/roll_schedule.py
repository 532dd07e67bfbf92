"""Schedule of the times at which open ledgers become old or idle. Sans-IO.

A heap, so that a tick costs in proportion to the ledgers that are due, not to those that are open. Appends postpone a ledger's
idle time but are not reported here: a partition that is checked too early returns when to check again, which amounts to one
check per ``ledger_idle_ms``.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Protocol


class Rolling(Protocol):
    """A partition as the schedule sees it."""

    def tick(self) -> int | None:
        """Roll the open ledger if it is due; return when to check again (monotonic ms), None if no ledger is open."""
        ...


class RollSchedule:
    """Partitions by the time at which to check them. Each has one time: the earliest requested."""

    def __init__(self) -> None:
        self._due_ms: dict[Rolling, int] = {}
        self._heap: list[tuple[int, int, Rolling]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._due_ms)

    def look_at(self, log: Rolling, due_ms: int) -> None:
        """Check ``log`` at ``due_ms``, or earlier if that was requested before."""
        if due_ms < self._due_ms.get(log, due_ms + 1):
            self._due_ms[log] = due_ms
            heapq.heappush(self._heap, (due_ms, next(self._numbers), log))

    def forget(self, log: Rolling) -> None:
        """Remove a partition that is no longer served."""
        if self._due_ms.pop(log, None) is not None and len(self._heap) > 2 * len(self._due_ms) + 64:
            self._heap = [entry for entry in self._heap if self._due_ms.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def run(self, now_ms: int) -> int:
        """Check all partitions that are due; return how many."""
        looked = 0
        while self._heap and self._heap[0][0] <= now_ms:
            due_ms, _, log = heapq.heappop(self._heap)
            if self._due_ms.get(log) != due_ms:
                continue
            del self._due_ms[log]
            looked += 1
            again_ms = log.tick()
            if again_ms is not None:
                self.look_at(log, max(again_ms, now_ms + 1))
        return looked
