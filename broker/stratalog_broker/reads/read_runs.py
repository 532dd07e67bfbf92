"""Cache of batches that were read from bookies or object store and are not fully served yet, in runs. Sans-IO.

A run is dropped when it has been served to its end, unless a second reader was seen in its partition: then runs stay while
there is room, for readers that follow each other closely. A run that is not used for ``KEPT_S`` is dropped. One bound on real
memory covers the broker: a run is charged with the blocks and receive buffers that its batches are views of. To stay within the
bound, served runs are dropped first, then the least recently used ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from stratalog_core.batches.batch_run import BatchRun
from stratalog_core.memory.retained import retained_bytes
from stratalog_core.ports import Buffer

KEPT_S: Final = 10.0


class Served(NamedTuple):
    """Batches for a fetch, the offset at which their run ends, and the bytes of the run after these batches."""

    batches: Sequence[Buffer]
    size: int
    run_end: int
    left_bytes: int


class _Run:
    __slots__ = ("base_offsets", "batches", "end_offset", "key", "retained_bytes", "served_to", "used_s")

    def __init__(self, key: Hashable, found: BatchRun, now_s: float) -> None:
        self.key = key
        self.batches, self.base_offsets, self.end_offset = found
        self.retained_bytes = retained_bytes(found.batches)
        self.served_to = self.base_offsets[0]
        self.used_s = now_s

    @property
    def is_served(self) -> bool:
        return self.served_to >= self.end_offset


class ReadRuns:
    """Runs of all partitions of a broker; ``key`` is the partition's ``PartitionLog`` and its last erasure."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes_held = 0
        self._runs: dict[_Run, None] = {}
        """In order of last use, the least recent first."""
        self._by_key: dict[Hashable, list[_Run]] = {}
        self._served_to: dict[Hashable, tuple[int, float]] = {}
        """Offset up to which each partition was served, and when last (seconds); the least recent first."""
        self._shared_s: dict[Hashable, float] = {}

    def is_followed(self, key: Hashable, offset: int) -> bool:
        """Whether the offsets before ``offset`` have been served, so that its reader is taken for a sequential one."""
        return key in self._served_to and offset <= self._served_to[key][0]

    def holds(self, key: Hashable, offset: int) -> bool:
        return self._holding(key, offset) is not None

    def _holding(self, key: Hashable, offset: int) -> _Run | None:
        return next((run for run in self._by_key.get(key, ()) if run.base_offsets[0] <= offset < run.end_offset), None)

    def put(self, key: Hashable, found: BatchRun, now_s: float) -> None:
        """Add a run of at least one batch."""
        run = _Run(key, found, now_s)
        self._runs[run] = None
        self._by_key.setdefault(key, []).append(run)
        self.bytes_held += run.retained_bytes
        self.make_room(0, self._bytes_max, now_s)
        while self.bytes_held > self._bytes_max and len(self._runs) > 1:
            self._drop(next(iter(self._runs)))

    def serve(self, key: Hashable, offset: int, end_offset: int, bytes_max: int, now_s: float) -> Served | None:
        """Return whole batches below ``end_offset`` from the one that contains ``offset`` on; None if no run holds it.

        At least one batch, and otherwise at most ``bytes_max`` bytes.
        """
        run = self._holding(key, offset)
        if run is None or offset >= end_offset:
            return None
        offsets, batches = run.base_offsets, run.batches
        first = bisect_right(offsets, offset) - 1
        stop, size = first + 1, len(batches[first])
        while stop < len(offsets) and offsets[stop] < end_offset and size + len(batches[stop]) <= bytes_max:
            size += len(batches[stop])
            stop += 1
        served = Served(batches[first:stop], size, run.end_offset, sum(map(len, batches[stop:])))
        self._mark(run, offset, run.end_offset if stop == len(offsets) else offsets[stop], now_s)
        return served

    def _mark(self, run: _Run, offset: int, served_to: int, now_s: float) -> None:
        key = run.key
        before, _ = self._served_to.pop(key, (-1, 0.0))
        if offset < before:
            self._shared_s[key] = now_s
        self._served_to[key] = max(before, served_to), now_s
        self._forget(now_s)
        run.used_s = now_s
        run.served_to = max(run.served_to, served_to)
        del self._runs[run]
        self._runs[run] = None
        shared_s = self._shared_s.get(key)
        if run.is_served and (shared_s is None or shared_s < now_s - KEPT_S):
            self._drop(run)

    def _forget(self, now_s: float) -> None:
        """Forget how far partitions were served that have not been read for ``KEPT_S``."""
        for key, (_, used_s) in list(islice(self._served_to.items(), 2)):
            if used_s < now_s - KEPT_S:
                del self._served_to[key]
                self._shared_s.pop(key, None)

    def make_room(self, size: int, bytes_max: int, now_s: float) -> bool:
        """Drop old and served runs as needed; return whether ``size`` more bytes then fit into ``bytes_max``."""
        while self._runs and (oldest := next(iter(self._runs))).used_s < now_s - KEPT_S:
            self._drop(oldest)
        if self.bytes_held + size > bytes_max:
            served = iter([run for run in self._runs if run.is_served])
            while self.bytes_held + size > bytes_max and (run := next(served, None)) is not None:
                self._drop(run)
        return self.bytes_held + size <= bytes_max

    def _drop(self, run: _Run) -> None:
        del self._runs[run]
        self.bytes_held -= run.retained_bytes
        runs = self._by_key[run.key]
        runs.remove(run)
        if not runs:
            del self._by_key[run.key]

    def clear(self) -> None:
        self._runs.clear()
        self._by_key.clear()
        self.bytes_held = 0
