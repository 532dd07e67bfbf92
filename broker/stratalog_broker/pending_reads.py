"""Reads from bookies and object store that outlive the fetch that began them, and run ahead of readers that go on.

A fetch waits only as long as its client allows, and less if it has something to answer already; what it then leaves behind
goes on and is there for the client's next fetch (``read_runs.py``). Equal reads share the work. Who reads on from where it was
served gets larger reads than its fetch asks for, and the next one begins while half of the last is still there: most fetches
of a reader that catches up are answered at once, from memory. Bounded in number and bytes; what nobody comes for is dropped.
"""

from __future__ import annotations

import asyncio
from typing import Final

from stratalog_broker.partition_log import PartitionLog
from stratalog_broker.read_runs import ReadRuns
from stratalog_broker.reads import NOTHING, Batches, LogReader
from stratalog_core.errors import Overloaded
from stratalog_core.ports import Clock

READ_BYTES_MAX: Final = 4 * 1024 * 1024
AHEAD_BYTES: Final = 2 * 1024 * 1024
"""Of one read ahead: large enough that its own cost is small beside its bytes, which stay few for many readers."""
READ_TIMEOUT_S: Final = 30.0
_Key = tuple[PartitionLog, int]


class PendingReads:
    """One for the broker."""

    def __init__(self, reader: LogReader, clock: Clock, reads_max: int, ahead_bytes_max: int) -> None:
        self._reads_max = reads_max
        self._ahead_bytes_max = ahead_bytes_max
        self._reader = reader
        self._clock = clock
        self._reads: dict[_Key, asyncio.Task[Batches]] = {}
        self._ahead_bytes = 0
        self.runs = ReadRuns(reads_max * READ_BYTES_MAX)

    def ready(self, log: PartitionLog, offset: int, end_offset: int, bytes_max: int) -> Batches | None:
        """What has been read already: whole batches, the one that contains ``offset`` first. None if nothing has."""
        served = self.runs.serve(log, offset, end_offset, bytes_max, self._clock.monotonic())
        if served is None:
            return None
        if served.left_bytes < AHEAD_BYTES // 2 and served.run_end < end_offset:
            self._read_ahead(log, served.run_end, end_offset)
        return served.batches, served.size

    def _read_ahead(self, log: PartitionLog, offset: int, end_offset: int) -> None:
        if (log, offset) not in self._reads and not self.runs.holds(log, offset) and self._may_read_ahead():
            self._begin(log, offset, end_offset, AHEAD_BYTES)

    def _may_read_ahead(self) -> bool:
        """Half of what may be under way is left to reads that fetches wait for."""
        if len(self._reads) * 2 >= self._reads_max:
            return False
        wanted = AHEAD_BYTES * (1 + len(self._reads))
        return self.runs.make_room(wanted, self._ahead_bytes_max, self._clock.monotonic())

    def start(self, log: PartitionLog, offset: int, end_offset: int, bytes_max: int) -> asyncio.Task[Batches]:
        """The read of that offset: one that is under way, or a new one. Raises ``Overloaded``."""
        known = self._reads.get((log, offset))
        if known is not None:
            return known
        if len(self._reads) >= self._reads_max:
            raise Overloaded(f"{self._reads_max} reads from bookies and object store are under way")
        size = min(bytes_max, READ_BYTES_MAX)
        if self.runs.is_followed(log, offset) and self._may_read_ahead():
            size = max(size, AHEAD_BYTES)
        return self._begin(log, offset, end_offset, size)

    def _begin(self, log: PartitionLog, offset: int, end_offset: int, size: int) -> asyncio.Task[Batches]:
        task = asyncio.get_running_loop().create_task(self._read(log, offset, end_offset, size))
        task.add_done_callback(_retrieve)
        self._reads[(log, offset)] = task
        return task

    async def _read(self, log: PartitionLog, offset: int, end_offset: int, size: int) -> Batches:
        try:
            found = await self._reader.read(log, offset, end_offset, size, READ_TIMEOUT_S)
        finally:
            self._reads.pop((log, offset), None)
        if found[0]:
            self.runs.put(log, *found, self._clock.monotonic())
        return found

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
