"""Reads from bookies and object store that outlive the fetch that began them, and run ahead of readers that go on.

A fetch waits only as long as its client allows, and less if it has something to answer already; what it then leaves behind
goes on and is there for the client's next fetch (``read_runs.py``). Equal reads share the work. Who reads on from where it was
served gets larger reads than its fetch asks for, and the next one begins while half of the last is still there: most fetches
of a reader that catches up are answered at once, from memory. Bounded in number and bytes; what nobody comes for is dropped.

Reads from bookies and reads from the object store have pools of their own, so that a store that does not answer takes no place
from readers of hot data. A read that turns to the store because its bookies fail changes pools.
"""

from __future__ import annotations

import asyncio
from typing import Final

from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.reads.log_reader import NOTHING, Batches, LogReader
from stratalog_broker.reads.read_runs import ReadRuns
from stratalog_core.errors import Overloaded, Unavailable
from stratalog_core.ports import Clock

READ_BYTES_MAX: Final = 4 * 1024 * 1024
AHEAD_BYTES: Final = 2 * 1024 * 1024
"""Of one read ahead: large enough that its own cost is small beside its bytes, which stay few for many readers."""
READ_TIMEOUT_S: Final = 30.0
_Key = tuple[PartitionLog, int]


class PendingReads:
    """One for the broker."""

    def __init__(self, reader: LogReader, clock: Clock, *, hot_reads_max: int, cold_reads_max: int, bytes_max: int) -> None:
        self._hot_reads_max = hot_reads_max
        self._cold_reads_max = cold_reads_max
        self._pool_bytes_max = bytes_max // 4
        self._ahead_bytes_max = bytes_max // 2
        self._reader = reader
        self._clock = clock
        self._reads: dict[_Key, asyncio.Task[Batches]] = {}
        self._sizes: dict[_Key, int] = {}
        """Bytes that each of ``_reads`` may bring."""
        self._cold: set[_Key] = set()
        """Those of ``_reads`` that wait for the object store."""
        self.runs = ReadRuns(bytes_max // 2)

    @property
    def bytes_held(self) -> int:
        """Bytes that reads under way may bring, and those that are not served yet."""
        return sum(self._sizes.values()) + self.runs.bytes_held

    @property
    def reads_in_progress(self) -> tuple[int, int]:
        """Reads from bookies, and reads from the object store."""
        return self._under_way(False), self._under_way(True)

    def ready(self, log: PartitionLog, offset: int, end_offset: int, bytes_max: int) -> Batches | None:
        """What has been read already: whole batches, the one that contains ``offset`` first. None if nothing has."""
        served = self.runs.serve(log, offset, end_offset, bytes_max, self._clock.monotonic())
        if served is None:
            return None
        if served.left_bytes < AHEAD_BYTES // 2 and served.run_end < end_offset:
            self._read_ahead(log, served.run_end, end_offset)
        return served.batches, served.size

    def _read_ahead(self, log: PartitionLog, offset: int, end_offset: int) -> None:
        if (log, offset) in self._reads or self.runs.holds(log, offset):
            return
        is_cold = self._reader.is_cold(log, offset)
        if self._may_read_ahead(is_cold):
            self._begin(log, offset, end_offset, AHEAD_BYTES, is_cold)

    def _under_way(self, is_cold: bool) -> int:
        return len(self._cold) if is_cold else len(self._reads) - len(self._cold)

    def _bytes_under_way(self, is_cold: bool) -> int:
        return sum(size for key, size in self._sizes.items() if (key in self._cold) is is_cold)

    def _has_room(self, is_cold: bool, size: int, share: int = 1) -> bool:
        """Whether one more read of ``size`` bytes fits into a pool, or into its first ``share``-th part; one always does."""
        under_way = self._under_way(is_cold)
        if not under_way:
            return True
        has_slot = under_way * share < (self._cold_reads_max if is_cold else self._hot_reads_max)
        return has_slot and (self._bytes_under_way(is_cold) + size) * share <= self._pool_bytes_max

    def _may_read_ahead(self, is_cold: bool) -> bool:
        """Half of a pool is left to reads that fetches wait for. Stalled reads of the other pool take none of the bytes."""
        if not self._has_room(is_cold, AHEAD_BYTES, share=2):
            return False
        wanted = AHEAD_BYTES * (1 + self._under_way(is_cold))
        return self.runs.make_room(wanted, self._ahead_bytes_max, self._clock.monotonic())

    def start(self, log: PartitionLog, offset: int, end_offset: int, bytes_max: int) -> asyncio.Task[Batches]:
        """The read of that offset: one that is under way, or a new one. Raises ``Overloaded``."""
        known = self._reads.get((log, offset))
        if known is not None:
            return known
        is_cold = self._reader.is_cold(log, offset)
        size = min(bytes_max, READ_BYTES_MAX)
        if not self._has_room(is_cold, size):
            raise Overloaded(f"{self._under_way(is_cold)} reads from {'object store' if is_cold else 'bookies'} are under way")
        if self.runs.is_followed(log, offset) and self._may_read_ahead(is_cold):
            size = max(size, AHEAD_BYTES)
        return self._begin(log, offset, end_offset, size, is_cold)

    def _begin(self, log: PartitionLog, offset: int, end_offset: int, size: int, is_cold: bool) -> asyncio.Task[Batches]:
        task = asyncio.get_running_loop().create_task(self._read(log, offset, end_offset, size))
        task.add_done_callback(_retrieve)
        self._reads[(log, offset)] = task
        self._sizes[(log, offset)] = size
        if is_cold:
            self._cold.add((log, offset))
        return task

    async def _read(self, log: PartitionLog, offset: int, end_offset: int, size: int) -> Batches:
        key = (log, offset)
        try:
            found = await self._reader.read(log, offset, end_offset, size, READ_TIMEOUT_S, lambda: self._turn_cold(key))
        finally:
            self._reads.pop(key, None)
            self._sizes.pop(key, None)
            self._cold.discard(key)
        if found[0]:
            self.runs.put(log, found[0], self._clock.monotonic())
        return found

    def _turn_cold(self, key: _Key) -> None:
        """Move a read to the pool of cold ones, if it is not there. Raises ``Unavailable`` if that is full."""
        if key not in self._cold:
            if not self._has_room(True, self._sizes[key]):
                raise Unavailable(f"{len(self._cold)} reads from object store are under way; ask again")
            self._cold.add(key)

    def taken(self, log: PartitionLog, offset: int, end_offset: int, bytes_max: int, read: Batches) -> Batches:
        """A fetch's share of what has just been read for it."""
        if not read[0]:
            return NOTHING
        found = self.ready(log, offset, end_offset, bytes_max)
        # Evicted at once, by others: then all of it is for this fetch.
        return read if found is None else found

    async def close(self) -> None:
        """Cancel everything."""
        tasks = list(self._reads.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.runs.clear()


def _retrieve(task: asyncio.Task[Batches]) -> None:
    if not task.cancelled():
        task.exception()
