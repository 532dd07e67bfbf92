"""The reads of one Fetch request that are not in memory: batches, and which transactions were aborted in them.

All partitions are read side by side until the request's deadline. Once there are enough bytes to respond, slower partitions get
only ``GRACE_S``, so that a replay does not delay a tail read. A read that is not finished leaves its partition empty, without
an error, and continues for the next fetch. Where its result is not kept until then, a fetch waits for it for a while whatever
the client allows: a client that does not wait would never get records. Kafka's brokers do not count their reads as a wait.

A compaction that removes an aborted transaction leaves its name for one more version of the history, for readers that have
batches of the version before. Batches of an older one are dropped, and read again by the next fetch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final, Protocol

from stratalog_broker.protocol.fetch_request import FetchWanted
from stratalog_broker.reads.aborted_transactions import AbortedRun, AbortedTransactions, runs_in
from stratalog_broker.reads.pending_reads import Batches, PendingReads
from stratalog_broker.reads.readable_log import ReadableLog
from stratalog_core.batches.batch import read_header
from stratalog_core.batches.batch_run import BatchRun
from stratalog_core.errors import StratalogError, Unavailable
from stratalog_core.ports import Clock

GRACE_S: Final = 0.02
UNKEPT_S: Final = 0.5
"""Kafka's default of ``fetch.max.wait.ms``."""
_VERSIONS_MAX: Final = 1
"""By how many versions of the history batches may be older than the search for the transactions aborted in them."""
_log = logging.getLogger(__name__)


class FetchSink(Protocol):
    """Takes the results of the reads, by the partition's place in the request."""

    @property
    def bytes_found(self) -> int: ...

    def found(self, line: int, one: FetchWanted, log: ReadableLog, batches: Batches, aborted: Sequence[AbortedRun]) -> None: ...

    def failed(self, line: int, one: FetchWanted, failure: StratalogError) -> None:
        """Note an error for the response."""
        ...


class FetchReads:
    """Collects what has to be read, then reads it. ``is_committed``: for a reader of committed transactions only."""

    def __init__(
        self, pending_reads: PendingReads, aborted: AbortedTransactions, clock: Clock, sink: FetchSink, *, is_committed: bool
    ) -> None:
        self._pending_reads = pending_reads
        self._aborted = aborted
        self._clock = clock
        self._sink = sink
        self._is_committed = is_committed
        self._unread: list[tuple[int, FetchWanted, ReadableLog, int]] = []
        self._unexplained: list[tuple[int, FetchWanted, ReadableLog, Batches, int]] = []
        """Batches that were read, of which version at least, but not yet which transactions were aborted in them."""

    def read_later(self, line: int, one: FetchWanted, log: ReadableLog, end_offset: int) -> None:
        """Read batches below ``end_offset``."""
        self._unread.append((line, one, log, end_offset))

    def explain_later(self, line: int, one: FetchWanted, log: ReadableLog, found: Batches) -> None:
        """Read which transactions were aborted in batches that are in memory."""
        self._unexplained.append((line, one, log, found, self._aborted.version_of(log)))

    @property
    def lines(self) -> list[int]:
        """The partitions' places in the request."""
        return [*(line for line, *_ in self._unread), *(line for line, *_ in self._unexplained)]

    async def run(self, room: int, bytes_min: int, deadline: float) -> None:
        """Read up to ``room`` bytes until ``deadline``."""
        if not all(self._pending_reads.is_kept_for_the_next(log, one.offset) for _, one, log, _ in self._unread):
            deadline = max(deadline, self._clock.monotonic() + UNKEPT_S)
        reads: dict[asyncio.Task[BatchRun], tuple[int, FetchWanted, ReadableLog, int]] = {}
        for line, one, log, end_offset in self._unread:
            if room <= 0:
                break
            share = min(max(one.bytes_max, 1), room)
            try:
                task = self._pending_reads.start(log, one.offset, end_offset, share)
            except StratalogError:
                continue
            reads[task] = (line, one, log, share)
            room -= share
        self._unread = []
        await self._wait(reads, bytes_min, deadline)
        if self._unexplained:
            await self._explain(deadline)

    async def _wait(
        self,
        reads: dict[asyncio.Task[BatchRun], tuple[int, FetchWanted, ReadableLog, int]],
        bytes_min: int,
        deadline: float,
    ) -> None:
        waiting = set(reads)
        while waiting:
            now = self._clock.monotonic()
            if self._sink.bytes_found >= max(bytes_min, 1):
                deadline = min(deadline, now + GRACE_S)
            patience_s = max(deadline - now, 0.0)
            done, waiting = await asyncio.wait(waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return
            for task in done:
                self._take(task, *reads[task])

    def _take(self, task: asyncio.Task[BatchRun], line: int, one: FetchWanted, log: ReadableLog, share: int) -> None:
        if task.cancelled():
            return
        failure = task.exception()
        if failure is None:
            core = log.core
            end_offset = core.last_stable_offset if self._is_committed else core.high_watermark
            found = self._pending_reads.taken(log, one.offset, end_offset, share, task.result())
            version = self._pending_reads.version_of(task)
            if self._is_committed and self._is_outdated(log, version):
                return
            aborted = aborted_at_once(self._aborted, one, log, found) if self._is_committed else ()
            if aborted is None:
                self._unexplained.append((line, one, log, found, version))
            else:
                self._sink.found(line, one, log, found, aborted)
        elif isinstance(failure, StratalogError):
            if not isinstance(failure, Unavailable):
                self._sink.failed(line, one, failure)
        else:
            raise failure

    async def _explain(self, deadline: float) -> None:
        """Read which transactions were aborted in batches that are in memory."""
        unexplained, self._unexplained = self._unexplained, []
        left_s = max(deadline - self._clock.monotonic(), GRACE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await asyncio.gather(*(self._explain_one(*one) for one in unexplained))

    def _is_outdated(self, log: ReadableLog, version: int) -> bool:
        """Whether compactions may have removed the names of transactions that were aborted in batches of this version."""
        return self._aborted.version_of(log) > version + _VERSIONS_MAX

    async def _explain_one(self, line: int, one: FetchWanted, log: ReadableLog, found: Batches, version: int) -> None:
        try:
            aborted = await self._aborted.find(log, one.offset, _end_of(found))
        except StratalogError as failure:
            _log.info("aborted transactions of %s at offset %d: %s", log.topic_partition, one.offset, failure)
        else:
            if not self._is_outdated(log, version):
                self._sink.found(line, one, log, found, runs_in(found[0], aborted))


def aborted_at_once(
    aborted: AbortedTransactions, one: FetchWanted, log: ReadableLog, found: Batches
) -> Sequence[AbortedRun] | None:
    """Return the aborted transactions that overlap the batches found; None if that takes a read."""
    if not found[1] or log.core.has_no_aborted_from(one.offset):
        return ()
    known = aborted.at_once(log, one.offset, _end_of(found))
    if not known:
        return None if known is None else ()
    return runs_in(found[0], known)


def _end_of(found: Batches) -> int:
    """Return the offset after the last of the batches."""
    return read_header(found[0][-1]).next_offset
