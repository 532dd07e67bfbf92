"""When which piece of work is due, by name. Pure: time is passed in, changes of metadata are handed in.

A heap, so that a worker with ten thousand partitions pays for those that are due and not for all, each time one becomes due.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator


class Schedule:
    """Names with the monotonic time at which they are due; a name that is at work keeps what became due meanwhile.

    ``_due`` is the truth. Entries of the heap that do not agree with it, or whose name is at work, are dropped where they
    surface; a name's end puts it back.
    """

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._at_work: set[str] = set()

    @property
    def at_work_count(self) -> int:
        return len(self._at_work)

    def set_due(self, name: str, at: float) -> None:
        """Due at ``at``, or earlier if it was."""
        if at < self._due.get(name, float("inf")):
            self._due[name] = at
            self._offer(name)

    def set_all_due(self, names: Iterable[str], at: float) -> None:
        for name in names:
            self.set_due(name, at)

    def take_due(self, now: float, at_once_max: int) -> Iterator[str]:
        """Names to begin with now, the longest due first; each is at work until :meth:`ended`."""
        while len(self._at_work) < at_once_max:
            at = self.next_at()
            if at is None or at > now:
                return
            _, name = heapq.heappop(self._heap)
            del self._due[name]
            self._at_work.add(name)
            yield name

    def ended(self, name: str, again_at: float | None) -> None:
        """The work is done for now; None: it becomes due by a change only."""
        self._at_work.discard(name)
        if again_at is not None:
            self.set_due(name, again_at)
        if name in self._due:
            self._offer(name)

    def next_at(self) -> float | None:
        """When something that is not at work is due next."""
        heap = self._heap
        while heap and (self._due.get(heap[0][1]) != heap[0][0] or heap[0][1] in self._at_work):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def _offer(self, name: str) -> None:
        if name not in self._at_work:
            heapq.heappush(self._heap, (self._due[name], name))
