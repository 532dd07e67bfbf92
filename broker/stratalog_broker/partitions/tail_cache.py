"""Tail cache: the newest batches of all partitions, unchanged, for readers at the tail.

One bound on real memory covers the whole broker. Eviction is first in, first out over all partitions: tail readers are never
far behind, and readers that fall behind read from bookies or the object store. A batch of up to ``COPIED_BYTES_MAX`` is copied,
because a view and the receive buffer it keeps alive cost several times its bytes. A larger batch stays a view of its request,
and the whole request is charged while any of its batches is held.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from typing import Final

from stratalog_core.memory.retained import COPY_BYTES, VIEW_BYTES, frame_bytes
from stratalog_core.ports import Buffer

COPIED_BYTES_MAX: Final = 1024
"""Copying up to this many bytes costs less than the objects it saves (0.1 µs of some 30 for a batch)."""
_COMPACT_AT: Final = 32


class TailCache:
    """Enforces the shared bound and keeps the order in which partitions evict their oldest batch."""

    __slots__ = ("_frames", "_lost_turns", "_order", "bytes_held", "bytes_max")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0
        """Real size of everything held."""
        self._order: deque[PartitionTail] = deque()
        self._frames: dict[int, int] = {}
        """Number of views held of each receive buffer, by the buffer's ``id()``."""
        self._lost_turns = 0

    def added(self, tail: PartitionTail, batch: Buffer) -> None:
        """Charge a new batch of ``tail`` and evict the oldest batches until the bound holds."""
        self._order.append(tail)
        if isinstance(batch, memoryview):
            frame = id(batch.obj)
            views = self._frames.get(frame, 0)
            self._frames[frame] = views + 1
            self.bytes_held += VIEW_BYTES if views else VIEW_BYTES + frame_bytes(batch)
        else:
            self.bytes_held += COPY_BYTES + len(batch)
        if self.bytes_held > self.bytes_max:
            self.shrink()

    def removed(self, batch: Buffer) -> None:
        """Stop charging ``batch``, which its partition no longer holds."""
        if not isinstance(batch, memoryview):
            self.bytes_held -= COPY_BYTES + len(batch)
            return
        frame = id(batch.obj)
        views = self._frames[frame] - 1
        if views:
            self._frames[frame] = views
            self.bytes_held -= VIEW_BYTES
        else:
            del self._frames[frame]
            self.bytes_held -= VIEW_BYTES + frame_bytes(batch)

    def shrink(self) -> None:
        """Evict the oldest batches until the bound holds."""
        while self.bytes_held > self.bytes_max:
            tail = self._order.popleft()
            if tail.lost_turns:
                tail.lost_turns -= 1
                self._lost_turns -= 1
            else:
                tail.evict()

    def cleared(self, tail: PartitionTail, batches: int) -> None:
        """Note that ``tail`` dropped ``batches`` batches before their turn in the eviction order."""
        tail.lost_turns += batches
        self._lost_turns += batches
        if self._lost_turns * 2 > len(self._order):
            self._drop_lost_turns()

    def _drop_lost_turns(self) -> None:
        kept: deque[PartitionTail] = deque()
        for tail in self._order:
            if tail.lost_turns:
                tail.lost_turns -= 1
            else:
                kept.append(tail)
        self._order, self._lost_turns = kept, 0


class PartitionTail:
    """One partition's newest batches, contiguous in offset."""

    __slots__ = ("_base_offsets", "_batches", "_cache", "_head", "end_offset", "erased_version", "lost_turns")

    def __init__(self, cache: TailCache, end_offset: int) -> None:
        self._cache = cache
        self._base_offsets = array("q")
        self._batches: list[Buffer] = []
        self._head = 0
        self.lost_turns = 0
        """Turns in the shared eviction order whose batch is already gone."""
        self.end_offset = end_offset
        """Offset after the newest batch."""
        self.erased_version = 0
        """The manifest version of the last erasure that this owner has seen: what it read before is not served after it."""

    @property
    def start_offset(self) -> int:
        """First offset held; ``end_offset`` if nothing is held."""
        return self._base_offsets[self._head] if self._head < len(self._base_offsets) else self.end_offset

    def append(self, base_offset: int, end_offset: int, batch: memoryview) -> None:
        """Add the partition's next batch."""
        kept: Buffer = bytes(batch) if len(batch) <= COPIED_BYTES_MAX else batch
        self._base_offsets.append(base_offset)
        self._batches.append(kept)
        self.end_offset = end_offset
        self._cache.added(self, kept)

    def evict(self) -> None:
        """Drop the oldest batch."""
        head = self._head
        self._cache.removed(self._batches[head])
        self._batches[head] = b""
        self._head = head = head + 1
        if head >= _COMPACT_AT and head * 2 >= len(self._batches):
            del self._batches[:head]
            del self._base_offsets[:head]
            self._head = 0

    def drop_below(self, offset: int) -> None:
        """Drop the batches that begin below ``offset``."""
        dropped = 0
        while self.start_offset < min(offset, self.end_offset):
            self.evict()
            dropped += 1
        if dropped:
            self._cache.cleared(self, dropped)

    def clear(self) -> None:
        """Drop all batches."""
        held = self._batches[self._head :]
        for batch in held:
            self._cache.removed(batch)
        self._base_offsets, self._batches, self._head = array("q"), [], 0
        self._cache.cleared(self, len(held))

    def read(self, offset: int, end_offset: int, bytes_max: int) -> tuple[list[Buffer], int] | None:
        """Return ``(batches, bytes)``: whole batches below ``end_offset``, starting with the one that contains ``offset``.

        The first batch is returned whatever its size; the total is otherwise at most ``bytes_max``. None if the first is not
        held.
        """
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
