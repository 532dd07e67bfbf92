"""When each piece of work of a tiering worker is due, by name, and how fast a burst of sealed ledgers is started.

Times are seconds on the monotonic clock and are passed in. A heap keeps the cost of a due piece of work independent of the
number of partitions. No I/O.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator


class Schedule:
    """Names with the time at which they are due. A name that is being worked on keeps a due time that arrives meanwhile.

    ``_due`` holds the current due times. Heap entries that disagree with it, or whose name is being worked on, are dropped
    when they reach the top; ``ended`` adds the name again.
    """

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._at_work: set[str] = set()

    @property
    def at_work_count(self) -> int:
        return len(self._at_work)

    @property
    def due_count(self) -> int:
        """Pieces of work that wait for their time."""
        return len(self._due)

    def set_due(self, name: str, at: float) -> None:
        """Make the name due at ``at``, unless it is due earlier already."""
        if at < self._due.get(name, float("inf")):
            self._due[name] = at
            self._offer(name)

    def set_all_due(self, names: Iterable[str], at: float) -> None:
        for name in names:
            self.set_due(name, at)

    def take_due(self, now: float, at_once_max: int) -> Iterator[str]:
        """Names to start now, longest due first, at most ``at_once_max`` in progress; each stays so until :meth:`ended`."""
        while len(self._at_work) < at_once_max:
            at = self.next_at()
            if at is None or at > now:
                return
            _, name = heapq.heappop(self._heap)
            del self._due[name]
            self._at_work.add(name)
            yield name

    def ended(self, name: str, again_at: float | None) -> None:
        """Record that the work on a name has ended; ``again_at`` None: only a change makes it due again."""
        self._at_work.discard(name)
        if again_at is not None:
            self.set_due(name, again_at)
        if name in self._due:
            self._offer(name)

    def next_at(self) -> float | None:
        """The next due time among names that are not being worked on; None if there is none."""
        heap = self._heap
        while heap and (self._due.get(heap[0][1]) != heap[0][0] or heap[0][1] in self._at_work):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def _offer(self, name: str) -> None:
        if name not in self._at_work:
            heapq.heappush(self._heap, (self._due[name], name))


class BurstPacer:
    """Spreads bursts: the first ``burst`` start at once, the rest at ``per_s`` per second, and none later than ``longest_s``.

    A broker's death seals thousands of ledgers within seconds. Their offload can wait; the takeovers, the metadata quorum and
    the bookies, which often run on the same cores, cannot. Under a lasting overload every start is late by ``longest_s`` and no
    more.
    """

    def __init__(self, burst: int, per_s: float, longest_s: float) -> None:
        self._interval_s = 1 / per_s
        self._ahead_s = burst / per_s
        self._longest_s = longest_s
        self._last = float("-inf")

    def next_at(self, now: float) -> float:
        """Start time of the next one: from ``now`` to ``now + longest_s``."""
        self._last = min(max(self._last, now - self._ahead_s) + self._interval_s, now + self._longest_s)
        return max(self._last, now)
