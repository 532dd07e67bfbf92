"""Group commit: one write and one sync for all that waits, the next group as soon as the last is durable.

What comes while a group is being synced makes up the next one, so a slow disk makes bigger groups and a fast one small
ones; there is no timer. All that arrives in one turn of the event loop leaves together, because the task that takes it runs
in the next turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from stratalog_bookies.bookie import Bookie
from stratalog_bookies.counters import Counters
from stratalog_bookies.log import Write
from stratalog_bookies.log_files import LogFiles
from stratalog_core.errors import StorageFailed
from stratalog_core.ports import Background

_log = logging.getLogger(__name__)


class GroupCommit:
    """Makes one disk's groups durable and tells those who wait."""

    def __init__(
        self, bookie: Bookie, store: LogFiles, background: Background, counters: Counters, on_written: Callable[[], None]
    ) -> None:
        self._bookie = bookie
        self._store = store
        self._background = background
        self._counters = counters
        self._on_written = on_written
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._task: asyncio.Task[None] | None = None

    def when_durable(self, sequence: int, call: Callable[[], None]) -> None:
        """Call when all groups up to ``sequence`` are durable, or the disk has failed (``Bookie.failure`` tells which).

        Sequences must not fall from one call to the next.
        """
        if sequence <= self._bookie.log.durable_sequence or self._bookie.failure:
            call()
            return
        self._waiting.append((sequence, call))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._commit())

    async def durable(self, sequence: int) -> None:
        """The same, awaited. Raises ``StorageFailed``."""
        if sequence > self._bookie.log.durable_sequence and not self._bookie.failure:
            reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.when_durable(sequence, lambda: None if reached.done() else reached.set_result(None))
            await reached
        if self._bookie.failure:
            raise StorageFailed(self._bookie.failure, read_only=False)

    async def close(self) -> None:
        """Wait until all that was placed is durable, or the disk has failed."""
        while self._task is not None:
            await asyncio.wait((self._task,))

    async def _commit(self) -> None:
        try:
            await self._write_groups()
        except OSError as failure:
            self._fail(failure)
        except Exception as failure:
            # Whatever else goes wrong here, nobody may wait for ever, and nothing may be acknowledged on a guess.
            _log.exception("group commit failed")
            self._fail(failure)
        finally:
            self._task = None

    async def _write_groups(self) -> None:
        write = self._bookie.take()
        job = self._start(write)
        while write is not None and job is not None:
            await job
            self._bookie.written(write.sequence)
            self._counters.log_groups += 1
            durable = write.sequence
            write = self._bookie.take()
            job = self._start(write)
            self._settle(durable)
            self._on_written()

    def _start(self, write: Write | None) -> asyncio.Future[None] | None:
        """Hand a group to the background at once; answers go out while it is written."""
        if write is None:
            return None
        return asyncio.ensure_future(self._background.run(partial(self._store.write, write)))

    def _settle(self, durable: int) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= durable:
            waiting.popleft()[1]()

    def _fail(self, failure: Exception) -> None:
        _log.critical("a write or sync of the log failed; the disk is retired: %s", failure)
        self._bookie.fail(f"the disk failed: {failure}")
        waiting, self._waiting = self._waiting, deque()
        for _, call in waiting:
            call()
        self._on_written()
