"""Group commit: one write and one sync for all waiting entries; the next group starts as soon as the last is durable.

Entries that arrive during a sync form the next group: a slow disk gets large groups, a fast one small groups, without a timer.
All entries of one event-loop turn are in one group, because the group is taken in the next turn. The kernel writes
asynchronously where it can; a thread writes otherwise. No group is acknowledged before it is durable.
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
    """Makes the groups of one disk durable and notifies those that wait."""

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
        self._awaited: dict[asyncio.Future[None], None] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait until they are durable."""
        return len(self._waiting)

    def when_durable(self, sequence: int, call: Callable[[], None]) -> None:
        """Call ``call`` when all groups up to ``sequence`` are durable or the disk has failed; check ``DiskCore.failure``.

        ``sequence`` must not decrease from one call to the next.
        """
        if sequence <= self._core.log.durable_sequence or self._core.failure:
            call()
            return
        self._waiting.append((sequence, call))
        if not self._is_busy:
            self._is_busy = True
            asyncio.get_running_loop().call_soon(self._turn, None)

    async def durable(self, sequence: int) -> None:
        """Wait until all groups up to ``sequence`` are durable. Raises ``StorageFailed``; they may become durable later if
        the disk hangs.
        """
        if sequence > self._core.log.durable_sequence and not self._core.failure:
            await self._reach(sequence)
        if self._core.failure:
            raise StorageFailed(self._core.failure, read_only=False)

    async def _reach(self, sequence: int) -> None:
        if self._core.stall:
            raise StorageFailed(self._core.stall, read_only=False)
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited[reached] = None
        try:
            self.when_durable(sequence, partial(_resolve, reached))
            await reached
        finally:
            del self._awaited[reached]

    def give_up(self) -> None:
        """Fail those that wait in ``durable``: the disk hangs."""
        for reached in self._awaited:
            if not reached.done():
                reached.set_exception(StorageFailed(self._core.stall, read_only=False))

    async def close(self) -> None:
        """Wait until everything placed is durable, or the disk has failed."""
        while self._is_busy:
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await idle

    def _turn(self, written: Write | None, failure: BaseException | None = None) -> None:
        """A group became durable or failed: begin the next one first, then answer those that waited."""
        self._is_busy = False
        try:
            if failure is not None:
                raise failure
            if self._core.failure:
                # ``LogFileLifecycle`` failed the disk while this write was in flight.
                self._answer_all()
            else:
                self._go_on(written)
        except OSError as lost:
            self._fail(lost)
        except Exception as unexpected:
            # A defect must not leave requests waiting, nor acknowledge what may not be durable.
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
            self._core.log.validate_state()
            self._begin(following)
        if written is not None:
            # Answer while the next group is being written.
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
        # Cancelled: the process is ending, and nothing is answered.
        if not job.cancelled():
            self._turn(write, job.exception())

    def _settle(self, durable: int) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= durable:
            waiting.popleft()[1]()

    def _fail(self, failure: Exception) -> None:
        _log.critical("a write or sync of the log failed; the disk accepts no more writes: %s", failure)
        self._core.fail(f"the disk failed: {failure}")
        self._answer_all()

    def _answer_all(self) -> None:
        """Answer everything that waits; nothing becomes durable on a failed disk, and the callers check for that."""
        while self._waiting:
            try:
                self._waiting.popleft()[1]()
            except Exception:
                _log.exception("a request could not be answered")
        self._on_written()


def _resolve(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
