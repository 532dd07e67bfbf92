"""Reading a partition: tail cache, then bookies, then object store, for whatever holds the wanted offset.

Every read returns whole batches in order as views, the first one containing the offset asked for, all below a given end.
The hot part is what the partition's ``Log`` record still references; below it the manifest's range is cold. While
tiering drops a hot copy, a reader may find a ledger gone that its view still shows: it looks again.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from stratalog_broker.ledger_index import LedgerIndex
from stratalog_core.batch import LENGTH_PREFIX_BYTES
from stratalog_core.checkpoint import is_checkpoint
from stratalog_core.errors import NotFound, Unavailable
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

if TYPE_CHECKING:
    from stratalog_broker.context import BrokerServices
    from stratalog_broker.index_cache import IndexCache
    from stratalog_broker.partition_log import PartitionLog

_LOOK_AGAIN_S: Final = 0.05
Batches = tuple[list[memoryview], int]
NOTHING: Final[Batches] = ([], 0)


class LogReader:
    """Reads for all partitions of a broker."""

    def __init__(self, services: BrokerServices, indexes: IndexCache) -> None:
        self._services = services
        self._indexes = indexes

    async def read(self, log: PartitionLog, offset: int, end_offset: int, bytes_max: int, timeout_s: float) -> Batches:
        """From wherever it is. Raises ``Unavailable`` if that takes longer than ``timeout_s``, ``Corrupt``, ``NotFound``."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read(log, offset, end_offset, bytes_max, timeout_s)
        except TimeoutError:
            raise Unavailable(f"offset {offset} of {log.topic_partition} was not read in {timeout_s} s") from None

    async def _read(self, log: PartitionLog, offset: int, end_offset: int, bytes_max: int, timeout_s: float) -> Batches:
        while True:
            tail = log.tail.read(offset, end_offset, bytes_max) if offset < end_offset else NOTHING
            if tail is not None:
                return tail
            ref = self.hot_ledger_at(log, offset)
            if ref is None:
                return await self._read_cold(log, offset, end_offset, bytes_max, timeout_s)
            try:
                found = await self._read_hot(log, ref, offset, end_offset, bytes_max)
                if found[0]:
                    return found
            except NotFound:
                if self.hot_ledger_at(log, offset) == ref and self._ledger(ref.ledger_id) is not None:
                    raise
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _read_hot(self, log: PartitionLog, ref: LedgerRef, offset: int, end_offset: int, bytes_max: int) -> Batches:
        ledger, index = await self.index_of(log, ref)
        run = index.run_from(offset, end_offset, bytes_max)
        if run is None:
            return NOTHING
        entries = await self._services.ledgers.read(ledger, run.first_entry, run.last_entry, bytes_max)
        batches = [entry.payload for entry in entries if not is_checkpoint(entry.payload)]
        return batches, sum(map(len, batches))

    async def _read_cold(self, log: PartitionLog, offset: int, end_offset: int, bytes_max: int, timeout_s: float) -> Batches:
        pointer = self.manifest_pointer(log)
        if pointer is None or not pointer.start_offset <= offset < pointer.end_offset:
            raise NotFound(f"offset {offset} of {log.topic_partition} is neither hot nor cold")
        found = await self._services.cold.fetch(pointer, offset, bytes_max, timeout_s)
        batches = [batch for view in found for batch in split_batches(view) if _base_offset(batch) < end_offset]
        return batches, sum(map(len, batches))

    # -- where things are ------------------------------------------------------------------------------------------------

    async def index_of(self, log: PartitionLog, ref: LedgerRef) -> tuple[Ledger, LedgerIndex]:
        """Record and index of a hot ledger, open or sealed. Raises ``NotFound`` if it has just been deleted."""
        unsealed = log.unsealed(ref.ledger_id)
        if unsealed is not None:
            return unsealed
        ledger = self._ledger(ref.ledger_id)
        if ledger is None:
            raise NotFound(f"ledger {ref.ledger_id} is deleted")
        if ledger.state is not LedgerState.CLOSED:
            raise Unavailable(f"ledger {ref.ledger_id} is not sealed yet")
        return ledger, await self._indexes.get(ledger)

    def _ledger(self, ledger_id: int) -> Ledger | None:
        return self._services.view.find(Ledger, ledger_key(ledger_id))

    def hot_ledgers(self, log: PartitionLog) -> Sequence[LedgerRef]:
        """Refs of the hot ledgers, in offset order."""
        identity = log.topic_partition
        record = self._services.view.find(Log, log_key(identity.topic_id, identity.partition))
        return () if record is None else record.ledgers

    def hot_ledger_at(self, log: PartitionLog, offset: int) -> LedgerRef | None:
        """The hot ledger that holds ``offset``; None if it is cold."""
        refs = self.hot_ledgers(log)
        position = bisect_right(refs, offset, key=lambda ref: ref.base_offset) - 1
        return refs[position] if position >= 0 else None

    def manifest_pointer(self, log: PartitionLog) -> ManifestPointer | None:
        identity = log.topic_partition
        return self._services.view.find(ManifestPointer, manifest_pointer_key(identity.topic_id, identity.partition))

    def hot_start_offset(self, log: PartitionLog) -> int:
        """First offset that is on bookies (ListOffsets -4); the log's end if none is."""
        refs = self.hot_ledgers(log)
        return max(refs[0].base_offset, log.core.log_start_offset) if refs else log.core.next_offset


def split_batches(view: memoryview) -> list[memoryview]:
    """The single batches of a run of whole batches."""
    batches = []
    position = 0
    while position < len(view):
        end = position + LENGTH_PREFIX_BYTES + int.from_bytes(view[position + 8 : position + 12], "big")
        batches.append(view[position:end])
        position = end
    return batches


def _base_offset(batch: memoryview) -> int:
    return int.from_bytes(batch[:8], "big")
