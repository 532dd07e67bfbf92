"""Group commit: one write and one sync for all that waits, the next group as soon as the last is durable.

What comes while a group is being synced makes up the next one, so a slow disk makes bigger groups and a fast one small
ones; there is no timer. All that arrives in one turn of the event loop leaves together, because it is taken in the next turn.
Mostly the kernel writes by itself; what it cannot is written by a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from stratalog_bookies.disk.core.disk_core import DiskCore
from stratalog_bookies.disk.core.log import Write
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.metrics import GROUP_BOUNDS_BYTES, Counters
from stratalog_core.errors import StorageFailed
from stratalog_core.metrics.groups import LATENCY_BOUNDS_S, Histogram
from stratalog_core.ports import Background

_log = logging.getLogger(__name__)


class GroupCommit:
    """Makes one disk's groups durable and tells those who wait."""

    def __init__(
        self, core: DiskCore, store: LogFiles, background: Background, counters: Counters, on_written: Callable[[], None]
    ) -> None:
        self._core = core
        self._store = store
        self._background = background
        self._counters = counters
        self._on_written = on_written
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._is_busy = False
        self._began_at_s = 0.0
        self.seconds = Histogram(LATENCY_BOUNDS_S)
        """Time from the begin of a group's write until it is durable."""
        self.bytes = Histogram(GROUP_BOUNDS_BYTES)
        self._idle: list[asyncio.Future[None]] = []

    @property
    def waiting(self) -> int:
        """Requests that wait until they are durable."""
        return len(self._waiting)

    def when_durable(self, sequence: int, call: Callable[[], None]) -> None:
        """Call when all groups up to ``sequence`` are durable, or the disk has failed (``DiskCore.failure`` tells which).

        Sequences must not fall from one call to the next.
        """
        if sequence <= self._core.log.durable_sequence or self._core.failure:
            call()
            return
        self._waiting.append((sequence, call))
        if not self._is_busy:
            self._is_busy = True
            asyncio.get_running_loop().call_soon(self._turn, None)

    async def durable(self, sequence: int) -> None:
        """The same, awaited. Raises ``StorageFailed``."""
        if sequence > self._core.log.durable_sequence and not self._core.failure:
            reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.when_durable(sequence, lambda: None if reached.done() else reached.set_result(None))
            await reached
        if self._core.failure:
            raise StorageFailed(self._core.failure, read_only=False)

    async def close(self) -> None:
        """Wait until all that was placed is durable, or the disk has failed."""
        while self._is_busy:
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await idle

    def _turn(self, written: Write | None, failure: BaseException | None = None) -> None:
        """A group is durable, or failed: begin the next one, and only then answer those that waited for it."""
        self._is_busy = False
        try:
            if failure is not None:
                raise failure
            if self._core.failure:
                # Whoever keeps its files has retired the disk meanwhile.
                self._answer_all()
            else:
                self._go_on(written)
        except OSError as lost:
            self._fail(lost)
        except Exception as unexpected:
            # Whatever else goes wrong here, nobody may wait for ever, and nothing may be acknowledged on a guess.
            _log.exception("group commit failed")
            self._fail(unexpected)
        if not self._is_busy:
            idle, self._idle = self._idle, []
            for each in idle:
                _resolve(each)

    def _go_on(self, written: Write | None) -> None:
        if written is not None:
            self._core.written(written.sequence)
            self._count(written)
        following = self._core.take()
        if following is not None:
            self._begin(following)
        if written is not None:
            # Answers go out while the next group is written.
            self._settle(written.sequence)
            self._on_written()

    def _count(self, written: Write) -> None:
        size = self._core.log.durable_position - written.position
        self._counters.log_groups += 1
        self._counters.log_bytes += size
        self.bytes.observe(size)
        self.seconds.observe(asyncio.get_running_loop().time() - self._began_at_s)

    def _begin(self, write: Write) -> None:
        self._began_at_s = asyncio.get_running_loop().time()
        if not self._store.begin_write(write, partial(self._turn, write)):
            job = asyncio.ensure_future(self._background.run(partial(self._store.write, write)))
            job.add_done_callback(partial(self._job_done, write))
        self._is_busy = True

    def _job_done(self, write: Write, job: asyncio.Future[None]) -> None:
        # A cancelled one belongs to a process that ends: nobody is told anything.
        if not job.cancelled():
            self._turn(write, job.exception())

    def _settle(self, durable: int) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= durable:
            waiting.popleft()[1]()

    def _fail(self, failure: Exception) -> None:
        _log.critical("a write or sync of the log failed; the disk is retired: %s", failure)
        self._core.fail(f"the disk failed: {failure}")
        self._answer_all()

    def _answer_all(self) -> None:
        """The disk has failed, as they will see: nothing that waits becomes durable."""
        while self._waiting:
            try:
                self._waiting.popleft()[1]()
            except Exception:
                _log.exception("an answer could not be given")
        self._on_written()


def _resolve(idle: asyncio.Future[None]) -> None:
    if not idle.done():
        idle.set_result(None)
