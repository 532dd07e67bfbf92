"""Reads from bookies and object store that outlive the fetch that began them.

A fetch waits only as long as its client allows, and less if it has something to answer already; what it then leaves behind
goes on and is there for the client's next fetch at the same offset. Equal reads share the work. Bounded in number; what
nobody comes for is dropped.
"""

from __future__ import annotations

import asyncio
from typing import Final

from stratalog_broker.partition_log import PartitionLog
from stratalog_broker.reads import Batches, LogReader
from stratalog_core.errors import Overloaded
from stratalog_core.ports import Clock

READ_BYTES_MAX: Final = 4 * 1024 * 1024
KEPT_S: Final = 10.0
READ_TIMEOUT_S: Final = 30.0
_Key = tuple[PartitionLog, int]


class PendingReads:
    """One for the broker."""

    def __init__(self, reader: LogReader, clock: Clock, reads_max: int) -> None:
        self._reads_max = reads_max
        self._reader = reader
        self._clock = clock
        self._reads: dict[_Key, tuple[float, asyncio.Task[Batches]]] = {}

    def start(self, log: PartitionLog, offset: int, end_offset: int, bytes_max: int) -> asyncio.Task[Batches]:
        """The read of that offset: one that is under way or done, or a new one. Raises ``Overloaded``."""
        known = self._reads.get((log, offset))
        if known is not None:
            return known[1]
        if len(self._reads) * 2 >= self._reads_max:
            self._drop_old()
        if len(self._reads) >= self._reads_max:
            raise Overloaded(f"{self._reads_max} reads from bookies and object store are under way")
        task = asyncio.get_running_loop().create_task(
            self._reader.read(log, offset, end_offset, min(bytes_max, READ_BYTES_MAX), READ_TIMEOUT_S)
        )
        task.add_done_callback(_retrieve)
        self._reads[(log, offset)] = (self._clock.monotonic(), task)
        return task

    def finish(self, log: PartitionLog, offset: int) -> None:
        """The result was taken."""
        self._reads.pop((log, offset), None)

    def _drop_old(self) -> None:
        oldest_kept = self._clock.monotonic() - KEPT_S
        for key in [key for key, (begun, _) in self._reads.items() if begun < oldest_kept]:
            self._reads.pop(key)[1].cancel()

    async def close(self) -> None:
        """Cancel everything."""
        tasks = [task for _, task in self._reads.values()]
        self._reads.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _retrieve(task: asyncio.Task[Batches]) -> None:
    if not task.cancelled():
        task.exception()
