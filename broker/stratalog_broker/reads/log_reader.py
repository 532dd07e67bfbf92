"""Reads a partition from bookies or the object store, whichever has the offset. The caller asks the tail cache first.

Every read returns whole batches in order as views, all below a given end; the first one contains the requested offset. Their
offsets come from the index of the ledger or block, so no header is parsed.
Ledgers that the partition's ``Log`` record references are hot; the manifest's range below them is cold. While tiering drops a
hot copy, a ledger may be gone that the reader's view still shows: the reader looks it up again.

A sealed ledger that the committed manifest covers is in both places, with the same batches at the same offsets. If its
bookies cannot return it, its cold copy is read, and the bookies are not asked again for ``_COLD_INSTEAD_S``.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from stratalog_bookies.client import LedgerClient
from stratalog_broker.partitions.index_cache import IndexCache
from stratalog_broker.partitions.ledger_index import LedgerIndex
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.reads.readable_log import ColdHistory, ReadableLog
from stratalog_core.batches.batch_run import BatchRun, empty_run
from stratalog_core.errors import Corrupt, NotFound, StratalogError, Unavailable
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import (
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    ManifestPointer,
    ledger_key,
    log_key,
    manifest_pointer_key,
)
from stratalog_tiering.cold.block_cache import LruCache
from stratalog_tiering.cold.reader import ColdReader

_LOOK_AGAIN_S: Final = 0.05
_HOT_WAIT_S: Final = 2.0
"""Timeout of bookies when there is a cold copy; every replica has been asked well before that."""
_COLD_INSTEAD_S: Final = 30.0
"""How long a ledger's cold copy is read after its bookies could not return it."""
_UNREADABLE_MAX: Final = 10_000
_log = logging.getLogger(__name__)
_Read = TypeVar("_Read")


class LogReader:
    """Reads for all partitions of a broker."""

    def __init__(self, view: MetadataView, ledgers: LedgerClient, cold: ColdReader, clock: Clock, indexes: IndexCache) -> None:
        self._view = view
        self._ledgers = ledgers
        self._cold = cold
        self._clock = clock
        self._indexes = indexes
        self._unreadable_until: LruCache[int, float] = LruCache(_UNREADABLE_MAX)
        """Until when (monotonic seconds) bookies are not asked for a ledger, by ledger id."""

    async def read(
        self,
        log: ReadableLog,
        offset: int,
        end_offset: int,
        bytes_max: int,
        timeout_s: float,
        before_cold: Callable[[], None] = lambda: None,
    ) -> BatchRun:
        """Return batches from ``offset`` on, hot or cold; empty if ``offset`` is at or beyond ``end_offset``.

        ``before_cold`` is called before the object store is read; an error it raises ends the read. Raises ``Unavailable`` if
        the read takes longer than ``timeout_s``, ``Corrupt``, ``NotFound``.
        """

        async def cold() -> BatchRun:
            before_cold()
            return await self._read_cold(log, offset, end_offset, bytes_max, timeout_s)

        try:
            async with asyncio.timeout(timeout_s):
                return await self._read(log, offset, end_offset, bytes_max, cold)
        except TimeoutError:
            raise Unavailable(f"offset {offset} of {log.topic_partition} was not read within {timeout_s} s") from None

    async def _read(
        self, log: ReadableLog, offset: int, end_offset: int, bytes_max: int, cold: Callable[[], Awaitable[BatchRun]]
    ) -> BatchRun:
        while offset < end_offset:
            ref = self.hot_ledger_at(log, offset)
            if ref is None:
                return await cold()
            hot = partial(self._read_hot, log, ref, offset, end_offset, bytes_max)
            try:
                found = await self.from_either(log, ref, offset, hot, cold)
                if found.batches:
                    return found
            except NotFound:
                if self.hot_ledger_at(log, offset) == ref and self._ledger(ref.ledger_id) is not None:
                    raise
            await asyncio.sleep(_LOOK_AGAIN_S)
        return empty_run(offset)

    async def from_either(
        self,
        log: ReadableLog,
        ref: LedgerRef,
        offset: int,
        hot: Callable[[], Awaitable[_Read]],
        cold: Callable[[], Awaitable[_Read]],
    ) -> _Read:
        """Return what ``hot`` reads of a ledger from ``offset`` on; ``cold`` if the bookies fail and there is a cold copy."""
        if not self._has_cold_copy(log, ref, offset):
            return await hot()
        if not self._is_unreadable(ref):
            try:
                async with asyncio.timeout(_HOT_WAIT_S):
                    return await hot()
            except (TimeoutError, Unavailable, Corrupt, NotFound) as failure:
                self._unreadable_until.put(ref.ledger_id, self._clock.monotonic() + _COLD_INSTEAD_S)
                _log.warning("ledger %d is read from the object store: %s", ref.ledger_id, failure or "no answer in time")
        try:
            return await cold()
        except StratalogError:
            # The bookies may have recovered: the next read tries them first.
            self._unreadable_until.pop(ref.ledger_id)
            raise

    def _is_unreadable(self, ref: LedgerRef) -> bool:
        until = self._unreadable_until.get(ref.ledger_id)
        return until is not None and self._clock.monotonic() < until

    def _has_cold_copy(self, log: ReadableLog, ref: LedgerRef, offset: int) -> bool:
        """Whether the committed manifest covers a sealed ledger from ``offset`` to its end."""
        pointer = self.manifest_pointer(log)
        if pointer is None or not pointer.start_offset <= offset < pointer.end_offset:
            return False
        ledger = self._ledger(ref.ledger_id)
        return ledger is None or (ledger.state is LedgerState.CLOSED and ledger.end_offset <= pointer.end_offset)

    async def _read_hot(self, log: ReadableLog, ref: LedgerRef, offset: int, end_offset: int, bytes_max: int) -> BatchRun:
        ledger, index = await self.index_of(log, ref)
        run = index.run_from(offset, end_offset, bytes_max)
        if run is None:
            return empty_run(offset)
        entries = await self._ledgers.read(ledger, run.first_entry, run.last_entry, bytes_max)
        return index.run_of(run.first_entry, [entry.payload for entry in entries])

    async def _read_cold(self, log: ReadableLog, offset: int, end_offset: int, bytes_max: int, timeout_s: float) -> BatchRun:
        pointer = self.manifest_pointer(log)
        if pointer is None or not pointer.start_offset <= offset < pointer.end_offset:
            raise NotFound(f"offset {offset} of {log.topic_partition} is neither hot nor cold")
        return (await self._cold.fetch(pointer, offset, bytes_max, timeout_s)).below(end_offset)

    # -- location ----------------------------------------------------------------------------------------------------------

    def is_in_tail(self, log: ReadableLog, offset: int) -> bool:
        """Whether the tail cache has ``offset``, so that no read is needed."""
        return offset >= log.tail.start_offset

    def is_cold(self, log: ReadableLog, offset: int) -> bool:
        """Whether a read of ``offset`` begins with the object store."""
        ref = self.hot_ledger_at(log, offset)
        return ref is None or (self._is_unreadable(ref) and self._has_cold_copy(log, ref, offset))

    async def index_of(self, log: ReadableLog, ref: LedgerRef) -> tuple[Ledger, LedgerIndex]:
        """Return the record and index of a hot ledger, open or sealed. Raises ``NotFound`` if it was just deleted."""
        unsealed = log.unsealed(ref.ledger_id)
        if unsealed is not None:
            return unsealed
        ledger = self._ledger(ref.ledger_id)
        if ledger is None:
            raise NotFound(f"ledger {ref.ledger_id} is deleted")
        if ledger.state is not LedgerState.CLOSED:
            raise Unavailable(f"ledger {ref.ledger_id} is not sealed yet")
        return ledger, await self._indexes.get(ledger)

    def index_at_once(self, log: ReadableLog, ref: LedgerRef) -> LedgerIndex | None:
        """Return the index of a hot ledger if it is in memory."""
        unsealed = log.unsealed(ref.ledger_id)
        return self._indexes.cached(ref.ledger_id) if unsealed is None else unsealed[1]

    def _ledger(self, ledger_id: int) -> Ledger | None:
        return self._view.find(Ledger, ledger_key(ledger_id))

    def hot_ledgers(self, log: ReadableLog) -> Sequence[LedgerRef]:
        """Return the references to the hot ledgers, in offset order."""
        if isinstance(log, ColdHistory):
            return ()
        identity = log.topic_partition
        record = self._view.find(Log, log_key(identity.topic_id, identity.partition))
        return () if record is None else record.ledgers

    def hot_ledger_at(self, log: ReadableLog, offset: int) -> LedgerRef | None:
        """Return the hot ledger that contains ``offset``; None if the offset is cold."""
        refs = self.hot_ledgers(log)
        position = bisect_right(refs, offset, key=lambda ref: ref.base_offset) - 1
        return refs[position] if position >= 0 else None

    def manifest_pointer(self, log: ReadableLog) -> ManifestPointer | None:
        identity = log.topic_partition
        return self._view.find(ManifestPointer, manifest_pointer_key(identity.topic_id, identity.partition))

    def history_version(self, log: ReadableLog) -> int:
        """Return the version of the cold history; 0 if there is none."""
        pointer = self.manifest_pointer(log)
        return 0 if pointer is None else pointer.manifest_version

    def hot_start_offset(self, log: PartitionLog) -> int:
        """Return the first offset on bookies (ListOffsets -4); the end of what is confirmed if there is none."""
        refs = self.hot_ledgers(log)
        return max(refs[0].base_offset, log.core.log_start_offset) if refs else log.core.high_watermark
