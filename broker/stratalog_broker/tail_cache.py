"""The batches just written, as they are, for readers at the tail. One byte bound for the whole broker.

Eviction is first in, first out over all partitions: tail readers are never far behind, and readers that are get their own
sources. A cached batch is a view of the request it came in, so its cost is its share of that request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final

_COMPACT_AT: Final = 1024


class TailCache:
    """The shared bound, and the order in which partitions give up their oldest batch."""

    __slots__ = ("_bytes_max", "_order", "bytes_held")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._order: deque[PartitionTail] = deque()
        self.bytes_held = 0

    def added(self, tail: PartitionTail, size_bytes: int) -> None:
        """Count one more batch of ``tail`` and evict the oldest ones beyond the bound."""
        self._order.append(tail)
        self.bytes_held += size_bytes
        while self.bytes_held > self._bytes_max:
            self.bytes_held -= self._order.popleft().evict()


class PartitionTail:
    """One partition's run of neighbouring batches, the newest ones."""

    __slots__ = ("_base_offsets", "_batches", "_cache", "_evicted", "_head", "end_offset")

    def __init__(self, cache: TailCache, end_offset: int) -> None:
        self._cache = cache
        self._base_offsets: list[int] = []
        self._batches: list[memoryview] = []
        self._head = 0
        self._evicted = 0
        self.end_offset = end_offset
        """Offset after the newest batch."""

    @property
    def start_offset(self) -> int:
        """First offset held; the end if nothing is."""
        return self._base_offsets[self._head] if self._head < len(self._base_offsets) else self.end_offset

    def append(self, base_offset: int, end_offset: int, batch: memoryview) -> None:
        """Keep the partition's next batch."""
        self._base_offsets.append(base_offset)
        self._batches.append(batch)
        self.end_offset = end_offset
        self._cache.added(self, len(batch))

    def evict(self) -> int:
        """Give up the oldest batch; returns its bytes (0: the partition had already been cleared of it)."""
        if self._evicted:
            self._evicted -= 1
            return 0
        size = len(self._batches[self._head])
        self._batches[self._head] = _EMPTY
        self._head += 1
        if self._head >= _COMPACT_AT and self._head * 2 >= len(self._batches):
            del self._batches[: self._head]
            del self._base_offsets[: self._head]
            self._head = 0
        return size

    def clear(self) -> None:
        """Forget everything at once; the shared order still holds this partition's turns, which then evict nothing."""
        held = self._batches[self._head :]
        self._cache.bytes_held -= sum(map(len, held))
        self._evicted += len(held)
        self._base_offsets, self._batches, self._head = [], [], 0

    def read(self, offset: int, end_offset: int, bytes_max: int) -> tuple[list[memoryview], int] | None:
        """``(batches, bytes)`` from the one that contains ``offset`` on, whole, below ``end_offset``; at least one, then up to
        ``bytes_max``. None if that one is not held."""
        offsets, batches = self._base_offsets, self._batches
        position = bisect_right(offsets, offset, self._head) - 1
        if position < self._head:
            return None
        found = [batches[position]]
        total = len(found[0])
        position += 1
        count = len(offsets)
        while position < count and offsets[position] < end_offset:
            batch = batches[position]
            total += len(batch)
            if total > bytes_max:
                return found, total - len(batch)
            found.append(batch)
            position += 1
        return found, total


_EMPTY: Final = memoryview(b"")
