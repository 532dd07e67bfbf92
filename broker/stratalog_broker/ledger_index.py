"""Which entry of a ledger holds which offsets: compact arrays built from batch headers, one line per batch.

Entries of batches have neighbouring ids, from the first after the checkpoint on. Timestamps are kept as running maxima, because
producers' timestamps do not rise: the first batch whose maximum reaches a time is found by bisection all the same.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Final, NamedTuple

BYTES_PER_BATCH: Final = 20


class EntryRun(NamedTuple):
    """Neighbouring entries to read, both ends included."""

    first_entry: int
    last_entry: int


class LedgerIndex:
    """Positions are 0-based over the ledger's batches."""

    __slots__ = ("_base_offsets", "_maximum_timestamps", "_sizes", "end_offset", "first_entry")

    def __init__(self, base_offset: int) -> None:
        self.end_offset = base_offset
        """Offset after the last batch."""
        self.first_entry = 0
        """Entry id of the first batch; meaningful once there is one."""
        self._base_offsets = array("q")
        self._maximum_timestamps = array("q")
        self._sizes = array("I")

    def __len__(self) -> int:
        return len(self._base_offsets)

    @property
    def memory_bytes(self) -> int:
        return 200 + BYTES_PER_BATCH * len(self._base_offsets)

    def append(self, entry_id: int, base_offset: int, end_offset: int, max_timestamp_ms: int, size_bytes: int) -> None:
        """Add the next batch."""
        maxima = self._maximum_timestamps
        if not maxima:
            self.first_entry = entry_id
            maxima.append(max_timestamp_ms)
        else:
            assert entry_id == self.first_entry + len(maxima), "batches are neighbouring entries"
            maxima.append(max(maxima[-1], max_timestamp_ms))
        self._base_offsets.append(base_offset)
        self._sizes.append(size_bytes)
        self.end_offset = end_offset

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

    def first_reaching(self, timestamp_ms: int, start_offset: int) -> int | None:
        """Entry id of the first batch at or after the one with ``start_offset`` that may hold a record as late as this.

        Exact from the ledger's beginning; later on the batch found may be one whose own records are all earlier, and the
        search goes on from the next.
        """
        position = bisect_left(self._maximum_timestamps, timestamp_ms)
        position = max(position, bisect_right(self._base_offsets, start_offset) - 1, 0)
        if position >= len(self._base_offsets):
            return None
        return self.first_entry + position

    def latest(self) -> tuple[int, int] | None:
        """``(max timestamp, entry id)`` of the first batch that has the ledger's greatest timestamp."""
        if not self._maximum_timestamps:
            return None
        greatest = self._maximum_timestamps[-1]
        return greatest, self.first_entry + bisect_left(self._maximum_timestamps, greatest)

    def last_entry(self) -> int:
        return self.first_entry + len(self._base_offsets) - 1
