"""Finds the aborted transactions that a ``read_committed`` reader must skip in the batches of one response.

The owner knows those of its newest offsets (``PartitionCore.aborted_between``). Those of older sealed ledgers are in the
ledgers' indexes, those of cold history in the segments' footers. A ledger's index also says which transactions are open at its
end, so a search goes on to the next ledger only while one of them begins within the batches. A footer has every transaction
that overlaps its segment, so nothing after the segment is read.

Compaction removes aborted records, and later their marker; the owner's memory, and a footer that was read before, still have
the transaction. So ``runs_in`` compares the transactions found with the batches of the response.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

from stratalog_broker.partitions.ledger_index import LedgerIndex
from stratalog_broker.reads.log_reader import LogReader
from stratalog_broker.reads.readable_log import ReadableLog
from stratalog_core.batches.batch import base_offset_of, read_header
from stratalog_core.errors import NotFound, Unavailable
from stratalog_core.partition_state.transactions import AbortedTransaction, aborted_between
from stratalog_core.ports import Buffer
from stratalog_metadata.records import LedgerRef
from stratalog_tiering.cold.reader import AbortedRange, ColdReader

_ATTEMPTS: Final = 5
AbortedRun = tuple[int, int]
"""Producer id and first offset of an aborted transaction, as in a Fetch response."""


def runs_in(batches: Sequence[Buffer], aborted: Iterable[AbortedRange]) -> list[AbortedRun]:
    """Return the transactions as a response reports them, without those whose marker compaction removed from the batches.

    Compaction removes a marker after its transaction's records. A client that is told of such a transaction waits for the
    marker and skips what the same producer committed later.
    """
    end_offset = read_header(batches[-1]).next_offset
    return [(producer, first) for producer, first, last in aborted if last >= end_offset or _has_marker(batches, last)]


def _has_marker(batches: Sequence[Buffer], offset: int) -> bool:
    position = bisect_right(batches, offset, key=base_offset_of) - 1
    if position < 0:
        return False
    header = read_header(batches[position])
    return header.base_offset == offset and header.is_control and header.record_count > 0


class AbortedTransactions:
    """One instance per broker. Offsets must be below the last stable offset."""

    def __init__(self, reader: LogReader, cold: ColdReader) -> None:
        self._reader = reader
        self._cold = cold

    def version_of(self, log: ReadableLog) -> int:
        """Return the version of the cold history in which a search begins now; 0 if there is none."""
        return self._reader.history_version(log)

    def at_once(self, log: ReadableLog, start_offset: int, end_offset: int) -> list[AbortedRange] | None:
        """Return those that overlap ``start_offset`` to below ``end_offset``, oldest first; None if that takes a read."""
        core = log.core
        if start_offset >= core.aborted_from:
            return _ranges(core.aborted_between(start_offset, end_offset))
        ref = self._reader.hot_ledger_at(log, start_offset)
        if ref is None:
            pointer = self._reader.manifest_pointer(log)
            if pointer is None or not pointer.start_offset <= start_offset <= end_offset <= pointer.end_offset:
                return None
            return self._cold.cached_aborted_transactions(pointer, start_offset, end_offset)
        search = _Search(log, start_offset, end_offset)
        for following in self._refs_from(log, ref):
            if search.ends_in_memory(following):
                break
            index = self._reader.index_at_once(log, following)
            if index is None:
                return None
            if not search.goes_on_after(index):
                break
        return _ranges(search.found)

    async def find(self, log: ReadableLog, start_offset: int, end_offset: int) -> list[AbortedRange]:
        """Return what ``at_once`` returns, after reading what it needs. Raises what reading raises."""
        for _ in range(_ATTEMPTS):
            try:
                return await self._find(log, start_offset, end_offset)
            except NotFound:
                continue  # A hot ledger was deleted during the search, because it is also cold.
        raise Unavailable(f"the ledgers of {log.topic_partition} at offset {start_offset} change too fast: retry")

    async def _find(self, log: ReadableLog, start_offset: int, end_offset: int) -> list[AbortedRange]:
        ready = self.at_once(log, start_offset, end_offset)
        if ready is not None:
            return ready
        ref = self._reader.hot_ledger_at(log, start_offset)
        if ref is None or self._reader.is_cold(log, start_offset):
            pointer = self._reader.manifest_pointer(log)
            if pointer is None or not pointer.start_offset <= start_offset < pointer.end_offset:
                raise NotFound(f"offset {start_offset} of {log.topic_partition} is neither hot nor cold")
            middle = min(end_offset, pointer.end_offset)
            cold = await self._cold.aborted_transactions(pointer, start_offset, middle)
            if middle == end_offset:
                return cold
            return sorted({*cold, *(await self._find(log, middle, end_offset))}, key=_first_offset)
        search = _Search(log, start_offset, end_offset)
        for following in self._refs_from(log, ref):
            if search.ends_in_memory(following):
                break
            _, index = await self._reader.index_of(log, following)
            if not search.goes_on_after(index):
                break
        return _ranges(search.found)

    def _refs_from(self, log: ReadableLog, ref: LedgerRef) -> list[LedgerRef]:
        return [one for one in self._reader.hot_ledgers(log) if one.base_offset >= ref.base_offset]


class _Search:
    """A search through hot ledgers, in order."""

    def __init__(self, log: ReadableLog, start_offset: int, end_offset: int) -> None:
        self._core = log.core
        self._start, self._end = start_offset, end_offset
        self.found: list[AbortedTransaction] = []

    def ends_in_memory(self, ref: LedgerRef) -> bool:
        """Whether the owner has everything from this ledger on in memory; then it is added, too."""
        if ref.base_offset < self._core.aborted_from:
            return False
        self.found += self._core.aborted_between(max(self._start, ref.base_offset), self._end)
        return True

    def goes_on_after(self, index: LedgerIndex) -> bool:
        """Add what a sealed ledger's index says; return whether the next ledger may have more.

        A ledger without batches, as an owner leaves that dies after opening it, says nothing of the transactions before it.
        """
        if not len(index):
            return True
        self.found += aborted_between(index.transactions.aborted, self._start, self._end)
        return index.end_offset < self._end or index.transactions.reach_beyond(self._end)


def _ranges(found: Iterable[AbortedTransaction]) -> list[AbortedRange]:
    return sorted(((one.producer_id, one.first_offset, one.last_offset) for one in found), key=_first_offset)


def _first_offset(aborted: AbortedRange) -> int:
    return aborted[1]
