"""Which entry of a ledger holds which offsets: compact arrays built from batch headers, one line per batch.

Entries of batches have neighbouring ids, from the first after the checkpoint on. Producers' timestamps do not rise, so each
batch keeps its own greatest one, and a search by time goes over them in memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from stratalog_core.batches.batch_run import BatchRun
from stratalog_core.ports import Buffer

BYTES_PER_BATCH: Final = 20


class EntryRun(NamedTuple):
    """Neighbouring entries to read, both ends included."""

    first_entry: int
    last_entry: int


class LedgerIndex:
    """Positions are 0-based over the ledger's batches."""

    __slots__ = ("_base_offsets", "_sizes", "_timestamps", "end_offset", "first_entry", "greatest_timestamp_ms")

    def __init__(self, base_offset: int) -> None:
        self.end_offset = base_offset
        """Offset after the last batch."""
        self.first_entry = 0
        """Entry id of the first batch; meaningful once there is one."""
        self.greatest_timestamp_ms = -1
        self._base_offsets = array("q")
        self._timestamps = array("q")
        self._sizes = array("I")

    def __len__(self) -> int:
        return len(self._base_offsets)

    @property
    def memory_bytes(self) -> int:
        return 200 + BYTES_PER_BATCH * len(self._base_offsets)

    def append(self, entry_id: int, base_offset: int, end_offset: int, max_timestamp_ms: int, size_bytes: int) -> int:
        """Add the next batch; returns how many there are."""
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
        """Entries from the batch that contains ``offset`` on, below ``end_offset``, of at most ``bytes_max`` bytes but at
        least one. None: no batch."""
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
        """What was read of a run, from its ``first_entry`` on, with the offsets that are known here."""
        first = first_entry - self.first_entry
        stop = first + len(batches)
        end_offset = self._base_offsets[stop] if stop < len(self._base_offsets) else self.end_offset
        return BatchRun(batches, self._base_offsets[first:stop], end_offset)

    def reaching(self, timestamp_ms: int, start_offset: int) -> Iterator[int]:
        """Entry ids of the batches, from the one with ``start_offset`` on, that hold a record as late as this; in the first of
        them it may lie before ``start_offset``.
        """
        if timestamp_ms > self.greatest_timestamp_ms:
            return
        first = max(bisect_right(self._base_offsets, start_offset) - 1, 0)
        for position in range(first, len(self._timestamps)):
            if self._timestamps[position] >= timestamp_ms:
                yield self.first_entry + position

    def last_entry(self) -> int:
        return self.first_entry + len(self._base_offsets) - 1
