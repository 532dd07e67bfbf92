"""Bounded caches of segment blocks: in memory, then on a local disk.

The disk holds blocks as they are stored in segments. Its content is never trusted: the caller verifies the CRC of every block
that it reads from disk, and treats a mismatch as a miss. The directory is emptied at the start, so no index is stored.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import pairwise
from typing import Final, Generic, TypeVar

from stratalog_core.batches.batch import iterate_headers
from stratalog_core.batches.batch_run import BatchRun
from stratalog_core.memory.retained import VIEW_BYTES, frame_bytes
from stratalog_core.ports import Background, Clock, Files

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
_DIRECTORY: Final = "blocks"
WAITING_S: Final = 10.0
"""A block that no reader has used for so long is evicted before those that readers have finished."""


class LruCache(Generic[Key, Value]):
    """Holds entries of at most ``weight_max`` in total; evicts the least recently used and passes them to ``on_evicted``."""

    def __init__(
        self,
        weight_max: int,
        weigh: Callable[[Value], int] = lambda _: 1,
        on_evicted: Callable[[Key, Value], None] | None = None,
    ) -> None:
        self._weight_max = weight_max
        self._weigh = weigh
        self._on_evicted = on_evicted
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._weight = 0

    @property
    def weight(self) -> int:
        return self._weight

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def get(self, key: Key) -> Value | None:
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: Key, value: Value) -> None:
        self.pop(key)
        self._entries[key] = value
        self._weight += self._weigh(value)
        while self._weight > self._weight_max and self._entries:
            evicted_key, evicted = self._entries.popitem(last=False)
            self._weight -= self._weigh(evicted)
            if self._on_evicted is not None:
                self._on_evicted(evicted_key, evicted)

    def latest_first(self) -> Iterator[Value]:
        """The values, the most recently used first."""
        return reversed(self._entries.values())

    def pop(self, key: Key) -> Value | None:
        value = self._entries.pop(key, None)
        if value is not None:
            self._weight -= self._weigh(value)
        return value


class CachedBlock:
    """A block's verified batches and their positions, so that a fetch finds its first batch by bisection.

    ``is_as_stored``: ``content`` is also what the segment stores, so that it matches the block's CRC.

    ``offsets`` are those from which each batch is found: its base offset, or, if compaction left a gap there, the end of the
    batch before it; the first batch of the block is found from ``base_offset`` on.
    """

    __slots__ = ("content", "end_offset", "is_as_stored", "offsets", "positions")

    def __init__(self, content: memoryview, base_offset: int, *, is_as_stored: bool = True) -> None:
        self.content = content
        self.is_as_stored = is_as_stored
        self.positions = array("I")
        self.offsets = array("q")
        self.end_offset = base_offset
        for position, header in iterate_headers(content):
            self.positions.append(position)
            self.offsets.append(self.end_offset)
            self.end_offset = header.next_offset

    @property
    def memory_bytes(self) -> int:
        """Size in memory, including the index and the buffer's overhead."""
        places = len(self.offsets) * (self.offsets.itemsize + self.positions.itemsize)
        return frame_bytes(self.content) + VIEW_BYTES + places

    def batches_from(self, offset: int, bytes_max: int, *, at_least_one: bool) -> BatchRun:
        """Whole batches from the one that holds ``offset`` on, or the next one if it is gone, up to ``bytes_max``."""
        count = len(self.positions)
        first = max(0, bisect_right(self.offsets, offset) - 1)
        start = self.positions[first]
        stop = count
        if start + bytes_max < len(self.content):
            stop = max(bisect_right(self.positions, start + bytes_max) - 1, first + at_least_one)
        is_whole = stop == count
        bounds = [*self.positions[first:stop], len(self.content) if is_whole else self.positions[stop]]
        batches = [self.content[begin:end] for begin, end in pairwise(bounds)]
        return BatchRun(batches, self.offsets[first:stop], self.end_offset if is_whole else self.offsets[stop])


BlockKey = tuple[str, int]
"""Key of the object, and position of the block in it."""


class BlockMemory:
    """Blocks of at most ``bytes_max`` in total. A block waits until a reader has read it to its end.

    Waiting blocks are evicted last. They were read ahead, or a reader has read their first part, so they are needed soon. A
    finished block is needed again only if another reader follows. An LRU cache would evict what was read ahead for a reader
    before what it has just finished.
    """

    def __init__(self, bytes_max: int, clock: Clock, on_evicted: Callable[[BlockKey, CachedBlock], None]) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0
        self._clock = clock
        self._on_evicted = on_evicted
        self._finished: OrderedDict[BlockKey, CachedBlock] = OrderedDict()
        """The least recently used first."""
        self._waiting: OrderedDict[BlockKey, tuple[CachedBlock, float]] = OrderedDict()
        """With the time of their last use (monotonic seconds), the least recently used first."""

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._waiting or key in self._finished

    def get(self, key: BlockKey) -> CachedBlock | None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._waiting[key] = waiting[0], self._clock.monotonic()
            return waiting[0]
        finished = self._finished.get(key)
        if finished is not None:
            self._finished.move_to_end(key)
        return finished

    def put(self, key: BlockKey, block: CachedBlock) -> None:
        """Add a block that waits for its reader. One that is larger than the memory is evicted at once."""
        self._drop(key)
        size = block.memory_bytes
        if size > self.bytes_max:
            self._on_evicted(key, block)
            return
        while self.bytes_held + size > self.bytes_max:
            self._evict_one()
        self._waiting[key] = block, self._clock.monotonic()
        self.bytes_held += size

    def finish(self, key: BlockKey) -> None:
        """A reader has read the block to its end."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._finished[key] = waiting[0]

    def _drop(self, key: BlockKey) -> None:
        self.finish(key)
        known = self._finished.pop(key, None)
        if known is not None:
            self.bytes_held -= known.memory_bytes

    def _evict_one(self) -> None:
        _, used_s = next(iter(self._waiting.values()), (None, math.inf))
        if self._finished and used_s >= self._clock.monotonic() - WAITING_S:
            key, block = self._finished.popitem(last=False)
        else:
            key, (block, _) = self._waiting.popitem(last=False)
        self.bytes_held -= block.memory_bytes
        self._on_evicted(key, block)


class DiskCache:
    """Stored blocks as files, one each. A disk failure only costs a cache hit, so it counts as a miss and is not raised."""

    def __init__(self, files: Files, background: Background, bytes_max: int) -> None:
        self._files = files
        self._background = background
        self._known: LruCache[BlockKey, int] = LruCache(bytes_max, lambda size: size, self._evicted)
        self._leaving: list[str] = []
        """Files of forgotten blocks, which the next write removes."""
        self._writing: set[BlockKey] = set()
        files.make_directory(_DIRECTORY)
        for name in files.list(_DIRECTORY):
            files.remove(f"{_DIRECTORY}/{name}")

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._known

    async def read(self, key: BlockKey) -> bytes | None:
        """The block's bytes, which the caller must verify; None on a miss."""
        if self._known.get(key) is None or key in self._writing:
            return None
        try:
            return await self._background.run(lambda: self._read(_path(key)))
        except OSError:
            self.discard(key)
            return None

    async def write(self, key: BlockKey, content: memoryview) -> None:
        if key in self._known or key in self._writing:
            return
        self._known.put(key, len(content))
        self._writing.add(key)
        leaving, self._leaving = self._leaving, []
        try:
            await self._background.run(lambda: self._write(_path(key), content, leaving))
        except OSError:
            self._known.pop(key)
            self._leaving += leaving
        else:
            if key not in self._known:  # It was evicted meanwhile, perhaps before its file was there.
                self._leaving.append(_path(key))
        finally:
            self._writing.discard(key)

    def discard(self, key: BlockKey) -> None:
        """Forget a block whose bytes were wrong, or could not be read."""
        if self._known.pop(key) is not None:
            self._leaving.append(_path(key))

    def _evicted(self, key: BlockKey, size: int) -> None:
        self._leaving.append(_path(key))

    def _read(self, path: str) -> bytes:
        file = self._files.open(path)
        try:
            return file.pread(file.size(), 0)
        finally:
            file.close()

    def _write(self, path: str, content: memoryview, leaving: list[str]) -> None:
        for name in leaving:
            if self._files.exists(name):
                self._files.remove(name)
        file = self._files.open(path, create=True)
        try:
            file.pwritev([content], 0)
        except OSError:
            self._files.remove(path)
            raise
        finally:
            file.close()


def _path(key: BlockKey) -> str:
    return f"{_DIRECTORY}/{hashlib.sha256(key[0].encode()).hexdigest()[:40]}-{key[1]}"
