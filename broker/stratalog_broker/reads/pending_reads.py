"""Reads from bookies and object store that outlive the fetch that began them, and read ahead for sequential readers.

A fetch waits only as long as its client allows, and less if it already has data to return. Its reads continue, and the client's
next fetch finds their result (``read_runs.py``). Concurrent reads of the same offset share the work. A sequential reader gets
larger reads from bookies than its fetch asks for, and the next read begins when half of ``AHEAD_BYTES`` is left: most fetches
of a reader that catches up are answered at once, from memory. The object store's reader reads ahead by itself, block by block.
Everything is bounded in number and bytes; results that no fetch asks for are dropped.

Reads from bookies and from the object store have separate pools, so that an unresponsive store does not block readers of hot
data. A read that falls back to the store because its bookies fail moves to the other pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from stratalog_broker.reads.log_reader import LogReader
from stratalog_broker.reads.read_runs import ReadRuns
from stratalog_broker.reads.readable_log import ReadableLog
from stratalog_broker.reads.replay_pace import ReplayPace
from stratalog_core.batches.batch_run import BatchRun
from stratalog_core.errors import Overloaded, Unavailable
from stratalog_core.ports import Buffer, Clock
from stratalog_core.single_flight import SingleFlight

READ_BYTES_MAX: Final = 4 * 1024 * 1024
AHEAD_BYTES: Final = 2 * 1024 * 1024
"""Size of one read-ahead: large enough to make its fixed cost small, small enough for many concurrent readers."""
READ_TIMEOUT_S: Final = 30.0
Batches = tuple[Sequence[Buffer], int]
"""Batches for a fetch, and their bytes."""
NOTHING: Final[Batches] = ([], 0)
_Key = tuple[ReadableLog, int]


class PendingReads:
    """One instance per broker."""

    def __init__(
        self,
        reader: LogReader,
        clock: Clock,
        pace: ReplayPace,
        *,
        hot_reads_max: int,
        cold_reads_max: int,
        bytes_max: int,
        is_kept: Callable[[ReadableLog], bool] = lambda log: True,
    ) -> None:
        """``is_kept``: whether what was read of a partition may be kept for a later fetch."""
        self._hot_reads_max = hot_reads_max
        self._cold_reads_max = cold_reads_max
        self._pool_bytes_max = bytes_max // 4
        self._ahead_bytes_max = bytes_max // 2
        self._reader = reader
        self._clock = clock
        self._pace = pace
        self._is_kept = is_kept
        self._reads: SingleFlight[_Key, BatchRun] = SingleFlight()
        self._versions: WeakKeyDictionary[asyncio.Task[BatchRun], int] = WeakKeyDictionary()
        self._sizes: dict[_Key, int] = {}
        """Maximum bytes of each read in ``_reads``."""
        self._cold: set[_Key] = set()
        """The reads in ``_reads`` that read from the object store."""
        self.runs = ReadRuns(bytes_max // 2)

    @property
    def bytes_held(self) -> int:
        """Maximum bytes of the reads in progress plus the bytes held in ``runs``."""
        return sum(self._sizes.values()) + self.runs.bytes_held

    @property
    def reads_in_progress(self) -> tuple[int, int]:
        """Numbers of reads in progress: from bookies, from the object store."""
        return self._under_way(False), self._under_way(True)

    def ready(self, log: ReadableLog, offset: int, end_offset: int, bytes_max: int) -> Batches | None:
        """Return whole batches that are already read, beginning with the one that contains ``offset``; None if none is."""
        served = self.runs.serve(_runs_of(log), offset, end_offset, bytes_max, self._clock.monotonic())
        if served is None:
            return None
        if served.left_bytes < AHEAD_BYTES // 2 and served.run_end < end_offset:
            self._read_ahead(log, served.run_end, end_offset)
        return self._counted(log, offset, (served.batches, served.size))

    def is_cold(self, log: ReadableLog, offset: int) -> bool:
        """Whether batches at ``offset`` come from the object store."""
        return self._reader.is_cold(log, offset)

    def is_kept_for_the_next(self, log: ReadableLog, offset: int) -> bool:
        """Whether a fetch that does not wait for a read finds its result later: here, or in the blocks of the object store."""
        return self._is_kept(log) or self._reader.is_cold(log, offset)

    def _read_ahead(self, log: ReadableLog, offset: int, end_offset: int) -> None:
        if (log, offset) in self._reads or self.runs.holds(_runs_of(log), offset) or self._reader.is_in_tail(log, offset):
            return
        if not self._reader.is_cold(log, offset) and self._may_read_ahead():
            self._begin(log, offset, end_offset, AHEAD_BYTES, is_cold=False)

    def _under_way(self, is_cold: bool) -> int:
        return len(self._cold) if is_cold else len(self._sizes) - len(self._cold)

    def _bytes_under_way(self, is_cold: bool) -> int:
        return sum(size for key, size in self._sizes.items() if (key in self._cold) is is_cold)

    def _has_room(self, is_cold: bool, size: int, share: int = 1) -> bool:
        """Whether one more read of ``size`` bytes fits into 1/``share`` of a pool. A read always fits into an empty pool."""
        under_way = self._under_way(is_cold)
        if not under_way:
            return True
        has_slot = under_way * share < (self._cold_reads_max if is_cold else self._hot_reads_max)
        return has_slot and (self._bytes_under_way(is_cold) + size) * share <= self._pool_bytes_max

    def _may_read_ahead(self) -> bool:
        """Whether there is room for a read-ahead. Half of the pool is reserved for reads that fetches wait for."""
        if not self._has_room(False, AHEAD_BYTES, share=2):
            return False
        wanted = AHEAD_BYTES * (1 + self._under_way(is_cold=False))
        return self.runs.make_room(wanted, self._ahead_bytes_max, self._clock.monotonic())

    def start(self, log: ReadableLog, offset: int, end_offset: int, bytes_max: int) -> asyncio.Task[BatchRun]:
        """Return the read of ``offset`` that is in progress, or start one. Raises ``Overloaded``."""
        known = self._reads.running((log, offset))
        if known is not None:
            return known
        is_cold = self._reader.is_cold(log, offset)
        size = min(bytes_max, READ_BYTES_MAX)
        if not self._has_room(is_cold, size):
            raise Overloaded(
                f"{self._under_way(is_cold)} reads from {'object store' if is_cold else 'bookies'} are in progress: retry later"
            )
        if not is_cold and self.runs.is_followed(_runs_of(log), offset) and self._may_read_ahead():
            size = max(size, AHEAD_BYTES)
        return self._begin(log, offset, end_offset, size, is_cold)

    def _begin(self, log: ReadableLog, offset: int, end_offset: int, size: int, is_cold: bool) -> asyncio.Task[BatchRun]:
        self._sizes[(log, offset)] = size
        if is_cold:
            self._cold.add((log, offset))
        version = self._reader.history_version(log)
        task = self._reads.start((log, offset), lambda: self._read(log, offset, end_offset, size), keep=True)
        self._versions[task] = version
        return task

    def version_of(self, task: asyncio.Task[BatchRun]) -> int:
        """Return the version of the cold history when a read was started: what it read is of this or a later one."""
        return self._versions[task]

    async def _read(self, log: ReadableLog, offset: int, end_offset: int, size: int) -> BatchRun:
        key, runs = (log, offset), _runs_of(log)
        try:
            found = await self._reader.read(log, offset, end_offset, size, READ_TIMEOUT_S, lambda: self._turn_cold(key))
        finally:
            self._sizes.pop(key, None)
            self._cold.discard(key)
        if found.batches and self._is_kept(log):
            self.runs.put(runs, found, self._clock.monotonic())
        return found

    def _turn_cold(self, key: _Key) -> None:
        """Move a read to the pool of cold reads, if it is not there yet. Raises ``Unavailable`` if that pool is full."""
        if key not in self._cold:
            if not self._has_room(True, self._sizes[key]):
                raise Unavailable(f"{len(self._cold)} reads from the object store are in progress: retry later")
            self._cold.add(key)

    def taken(self, log: ReadableLog, offset: int, end_offset: int, bytes_max: int, read: BatchRun) -> Batches:
        """Return a fetch's batches out of ``read``, which has just finished for it."""
        found = self.ready(log, offset, end_offset, bytes_max) if read.batches else NOTHING
        if found is not None:
            return found
        # Other reads have already evicted the run: return all of it to this fetch.
        batches = read.below(end_offset).batches
        return self._counted(log, offset, (batches, sum(map(len, batches))))

    def _counted(self, log: ReadableLog, offset: int, found: Batches) -> Batches:
        if self._reader.is_cold(log, offset):
            self._pace.sent(found[1])
        return found

    async def close(self) -> None:
        """Cancel all reads and drop all runs."""
        await self._reads.close()
        self.runs.clear()


def _runs_of(log: ReadableLog) -> tuple[ReadableLog, int]:
    """The key of what was read of a partition. It changes when records are erased, so that nobody gets them from memory."""
    return log, log.tail.erased_version
