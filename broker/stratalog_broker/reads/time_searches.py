"""Searches a partition by timestamp: cold history first, then each hot ledger by its index, then the records of one batch.

Timestamps are the producers' and need not rise, so the result is the first record, in offset order, that is not earlier than
the requested time. Only these searches decode records, outside the event loop (``stratalog_core.search_pool``).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from stratalog_bookies.client import LedgerClient
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.reads.log_reader import LogReader
from stratalog_core.batches.batch import read_header
from stratalog_core.errors import NotFound
from stratalog_core.search_pool import SearchPool
from stratalog_metadata.records import LedgerRef, ManifestPointer
from stratalog_tiering.cold.reader import ColdReader


class Found(NamedTuple):
    """A record's offset; timestamp and epoch are -1 if unknown or not applicable."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


class TimeSearches:
    """One instance per broker."""

    def __init__(self, reader: LogReader, ledgers: LedgerClient, cold: ColdReader, searches: SearchPool) -> None:
        self._reader = reader
        self._ledgers = ledgers
        self._cold = cold
        self._searches = searches

    async def find_time(self, log: PartitionLog, timestamp_ms: int) -> Found | None:
        """Return the first readable record at or after ``timestamp_ms``. Raises what reading raises."""
        start = log.core.log_start_offset
        cold = await self._find_cold(log, timestamp_ms, start)
        if cold is not None:
            return cold
        for ref in self._reader.hot_ledgers(log):
            found = await self._find_in_ledger(log, ref, timestamp_ms, start)
            if found is not None:
                return found
        return None

    async def _find_cold(self, log: PartitionLog, timestamp_ms: int, start: int) -> Found | None:
        pointer = self._reader.manifest_pointer(log)
        refs = self._reader.hot_ledgers(log)
        hot_start = refs[0].base_offset if refs else log.core.next_offset
        if pointer is None or pointer.end_offset <= start or hot_start <= start:
            return None
        cold = await self._cold.offset_for_timestamp(pointer, timestamp_ms, start)
        if cold is None or cold.offset >= hot_start:
            return None
        return Found(cold.offset, cold.timestamp_ms, cold.leader_epoch)

    async def _find_in_ledger(self, log: PartitionLog, ref: LedgerRef, timestamp_ms: int, start: int) -> Found | None:
        first = max(start, ref.base_offset)

        async def hot() -> Found | None:
            ledger, index = await self._reader.index_of(log, ref)
            for entry_id in index.reaching(timestamp_ms, first):
                async with self._searches.reads:
                    (entry, *_) = await self._ledgers.read(ledger, entry_id, entry_id, 1)
                    found = await self._find_in_batch(entry.payload, timestamp_ms, start)
                if found is not None:
                    return found if found.offset < log.core.high_watermark else None
            return None

        async def cold() -> Found | None:
            """Return the first record from ``first`` on, in this ledger or a later one that is also cold."""
            found = await self._cold.offset_for_timestamp(self._pointer(log), timestamp_ms, first)
            return None if found is None else Found(found.offset, found.timestamp_ms, found.leader_epoch)

        return await self._reader.from_either(log, ref, first, hot, cold)

    def _pointer(self, log: PartitionLog) -> ManifestPointer:
        pointer = self._reader.manifest_pointer(log)
        if pointer is None:
            raise NotFound(f"{log.topic_partition} no longer has cold history")
        return pointer

    async def _find_in_batch(self, batch: memoryview, timestamp_ms: int, start: int) -> Found | None:
        header = read_header(batch)
        if header.max_timestamp_ms < timestamp_ms:
            return None
        found = await self._searches.first_reaching(batch, header, timestamp_ms, start)
        return None if found is None else Found(found.offset, found.timestamp_ms, header.leader_epoch)

    async def find_greatest(self, log: PartitionLog) -> Found | None:
        """Return the first readable record with the partition's greatest timestamp (KIP-734). Raises what reading raises.

        The greatest timestamp in the indexes may be below the log's start or not confirmed yet; then a bisection finds the
        greatest readable one.
        """
        low, high = -1, await self._latest_known(log) + 1
        best: Found | None = None
        middle = high - 1
        while low < middle < high:
            found = await self.find_time(log, middle)
            if found is None:
                high = middle
            else:
                best, low = found, found.timestamp_ms
            middle = (low + high) // 2
        return best

    async def _latest_known(self, log: PartitionLog) -> int:
        """Return an upper bound of all timestamps; -1 if there are none."""
        latest = -1
        pointer = self._reader.manifest_pointer(log)
        if pointer is not None and pointer.end_offset > log.core.log_start_offset:
            latest = await self._cold.timestamp_bound(pointer)
        for ref in self._reader.hot_ledgers(log):
            first = max(log.core.log_start_offset, ref.base_offset)
            hot = partial(self._greatest_in_ledger, log, ref)
            cold = partial(self._greatest_in_history, log)
            latest = max(latest, await self._reader.from_either(log, ref, first, hot, cold))
        return latest

    async def _greatest_in_ledger(self, log: PartitionLog, ref: LedgerRef) -> int:
        _, index = await self._reader.index_of(log, ref)
        return index.greatest_timestamp_ms

    async def _greatest_in_history(self, log: PartitionLog) -> int:
        return await self._cold.timestamp_bound(self._pointer(log))
