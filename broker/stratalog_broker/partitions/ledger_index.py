"""Index of a ledger's entries by offset and timestamp: compact arrays built from batch headers, one element per batch.

Batches are entries with consecutive ids, from the first after the checkpoint on. Producers' timestamps need not rise, so the
index keeps each batch's greatest one, and a search by time scans them in memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from stratalog_core.batches.batch_run import BatchRun
from stratalog_core.partition_state.transactions import NO_TRANSACTIONS, LedgerTransactions
from stratalog_core.ports import Buffer

BYTES_PER_BATCH: Final = 20
BYTES_PER_TRANSACTION: Final = 240
"""A tuple of up to four integers as Python objects."""


class EntryRun(NamedTuple):
    """Consecutive entries to read, both ends included."""

    first_entry: int
    last_entry: int


class LedgerIndex:
    """Positions are 0-based over the ledger's batches."""

    __slots__ = (
        "_base_offsets",
        "_sizes",
        "_timestamps",
        "end_offset",
        "first_entry",
        "greatest_timestamp_ms",
        "transactions",
    )

    def __init__(self, base_offset: int) -> None:
        self.end_offset = base_offset
        """Offset after the last batch."""
        self.first_entry = 0
        """Entry id of the first batch; undefined while there is none."""
        self.greatest_timestamp_ms = -1
        self.transactions: LedgerTransactions = NO_TRANSACTIONS
        """Valid once the ledger takes no more batches."""
        self._base_offsets = array("q")
        self._timestamps = array("q")
        self._sizes = array("I")

    def __len__(self) -> int:
        return len(self._base_offsets)

    @property
    def memory_bytes(self) -> int:
        transactions = len(self.transactions.aborted) + len(self.transactions.open)
        return 200 + BYTES_PER_BATCH * len(self._base_offsets) + BYTES_PER_TRANSACTION * transactions

    def append(self, entry_id: int, base_offset: int, end_offset: int, max_timestamp_ms: int, size_bytes: int) -> int:
        """Add the next batch; return the number of batches."""
        timestamps = self._timestamps
        if not timestamps:
            self.first_entry = entry_id
        else:
            assert entry_id == self.first_entry + len(timestamps), "batches are neighbouring entries"
        timestamps.append(max_timestamp_ms)
        if max_timestamp_ms > self.greatest_timestamp_ms:
            self.greatest_timestamp_ms = max_timestamp_ms
        self._base_offsets.append(base_offset)
        self._sizes.append(size_bytes)
        self.end_offset = end_offset
        return len(timestamps)

    def run_from(self, offset: int, end_offset: int, bytes_max: int) -> EntryRun | None:
        """Return the entries below ``end_offset`` from the batch that contains ``offset`` on; None if there is none.

        At least one entry, and otherwise at most ``bytes_max`` bytes.
        """
        position = max(bisect_right(self._base_offsets, offset) - 1, 0)
        last = bisect_left(self._base_offsets, end_offset)
        if offset >= self.end_offset or position >= last:
            return None
        stop, total = position + 1, self._sizes[position]
        while stop < last and total + self._sizes[stop] <= bytes_max:
            total += self._sizes[stop]
            stop += 1
        return EntryRun(self.first_entry + position, self.first_entry + stop - 1)

    def run_of(self, first_entry: int, batches: Sequence[Buffer]) -> BatchRun:
        """Return ``batches``, read from ``first_entry`` on, as a run with their offsets from this index."""
        first = first_entry - self.first_entry
        stop = first + len(batches)
        end_offset = self._base_offsets[stop] if stop < len(self._base_offsets) else self.end_offset
        return BatchRun(batches, self._base_offsets[first:stop], end_offset)

    def reaching(self, timestamp_ms: int, start_offset: int) -> Iterator[int]:
        """Yield the entry ids of batches, from the one with ``start_offset`` on, that hold a record at or after the timestamp.

        In the first batch, that record may be before ``start_offset``.
        """
        if timestamp_ms > self.greatest_timestamp_ms:
            return
        first = max(bisect_right(self._base_offsets, start_offset) - 1, 0)
        for position in range(first, len(self._timestamps)):
            if self._timestamps[position] >= timestamp_ms:
                yield self.first_entry + position

    def last_entry(self) -> int:
        return self.first_entry + len(self._base_offsets) - 1
