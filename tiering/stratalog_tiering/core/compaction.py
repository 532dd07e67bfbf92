"""Compaction of a topic's cold history: which records stay, by Kafka's rules (its ``Cleaner`` and KIP-534). No I/O.

A pass has a map of the newest offset of each key in the dirty part of the history, and filters every batch up to the map's end
with it. A record stays if its key has no newer record in the map, and:

- it has a value, or the batch's delete horizon has not come. The horizon is set by the pass that first keeps the tombstone:
  ``delete.retention.ms`` later;
- it has not expired (``record_expiry.py``). An expired record counts as a tombstone: it stays, with its value, until the delete
  horizon, so that a consumer that has read an older record of the key can still see the newer one;
- its transaction was committed. Transaction markers stay until their transaction's records are gone, and then until their own
  delete horizon.

A batch keeps its base and last offset, leader epoch, producer, sequence and codec. The last batch of a segment, and the last
one of each producer that is still known, stay without records if they lose them all, so that the end of a segment, and the
sequences of producers, are never lost.

A batch whose bytes are not exactly its records, or that is too large to take apart, stays as it is: brokers may have checked
its header and its CRC only. Its keys are unknown, so what it replaced stays, too, and so do the tombstones after it, one of
which may be of a key that it has. Such batches are counted, and the first one of a pass is named.

The map (``offset_map.py``) is bounded: it ends where it is full, and the next pass continues there (ADR 137).

Compiled kernels locate records, find them in the map and copy them; the rules are expressions over all records of a batch.
Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Final

import numpy as np

from stratalog_core.batches.batch import DELETE_HORIZON_BIT, BatchHeader
from stratalog_core.batches.checkpoint import ProducerEntry
from stratalog_core.batches.record_kernels import NEVER
from stratalog_core.batches.record_spans import RecordSpans, batch_body, record_spans
from stratalog_core.compiled.jit import Bools, Ints64
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer
from stratalog_tiering.core.offset_map import OffsetMap
from stratalog_tiering.core.rewritten_batches import Filtered, LastBatches, emptied, rebuilt
from stratalog_tiering.format.footer import AbortedTransaction

_ABORT: Final = b"\x00\x00\x00\x00"
"""Key of an abort marker: version 0, type 0. A commit marker's type is 1."""
_HORIZON_MS_MAX: Final = 2**63 - 1
"""A batch holds its delete horizon in 64 bits, and ``delete.retention.ms`` may be as long."""


@dataclass(slots=True)
class TransactionFilter:
    """Follows transactions over batches in offset order. Add a segment's aborted transactions before its batches."""

    _coming: list[tuple[int, int, int, AbortedTransaction]] = field(default_factory=list)
    """Aborted transactions that begin later, after first offset, last offset and producer."""
    _aborting: dict[int, AbortedTransaction] = field(default_factory=dict)
    """The open transactions that will be aborted, by producer."""
    _read: set[int] = field(default_factory=set)
    """Those of these producers of whose transaction a batch was read."""
    _removed: set[AbortedTransaction] = field(default_factory=set)
    _committing: set[int] = field(default_factory=set)

    def add(self, aborted: Iterable[AbortedTransaction]) -> None:
        for each in aborted:
            heappush(self._coming, (each.first_offset, each.last_offset, each.producer_id, each))

    def is_aborted(self, header: BatchHeader) -> bool:
        """Whether a batch of records belongs to an aborted transaction."""
        self._begin(header)
        if not header.is_transactional:
            return False
        aborted = self._aborting.get(header.producer_id)
        if aborted is not None:
            self._read.add(header.producer_id)
            if header.record_count:
                self._removed.add(aborted)
            return True
        self._committing.add(header.producer_id)
        return False

    def is_marker_done(self, header: BatchHeader, key: bytes | None) -> bool:
        """Whether no batch of the transaction that a marker ends is left. ``key`` is None for a marker without its record."""
        self._begin(header)
        if key is None:
            return True
        if key == _ABORT:
            was_read = self._aborting.pop(header.producer_id, None) is not None and header.producer_id in self._read
            self._read.discard(header.producer_id)
            return not was_read
        was_read = header.producer_id in self._committing
        self._committing.discard(header.producer_id)
        return not was_read

    def _begin(self, header: BatchHeader) -> None:
        """Note the aborted transactions that have begun. Each segment that one overlaps lists it; one that ended is skipped."""
        while self._coming and self._coming[0][0] <= header.last_offset:
            _, last_offset, producer_id, aborted = heappop(self._coming)
            if last_offset >= header.base_offset:
                self._aborting.setdefault(producer_id, aborted)

    def take_removed(self) -> list[AbortedTransaction]:
        """The aborted transactions that had records in what was read since the last call, in the order of their markers.

        The segment that replaces it lists them once more, for readers that still have the older segment's batches.
        """
        removed, self._removed = self._removed, set()
        return sorted(removed, key=lambda each: (each.last_offset, each.producer_id))


class MapBuilder:
    """Fills a map from batches in offset order, from ``dirty_from`` on. ``end_offset``: the map is complete below it."""

    def __init__(self, offsets: OffsetMap, dirty_from: int) -> None:
        self.offsets = offsets
        self.end_offset = dirty_from
        self.transactions = TransactionFilter()
        self._dirty_from = dirty_from

    def add(self, batch: Buffer, header: BatchHeader) -> bool:
        """Note the batch's keys. False if the map was full before the batch ended; it is complete up to that record."""
        if header.is_control:
            spans = record_spans(batch_body(batch, header), header)
            self.transactions.is_marker_done(header, spans.key(0) if spans else None)
        elif not self.transactions.is_aborted(header) and header.last_offset >= self._dirty_from:
            found = records_of(batch, header)
            if isinstance(found, RecordSpans):
                noted = self.offsets.put(found, header.base_offset, self._dirty_from)
                if noted < len(found):
                    self.end_offset = max(self.end_offset, header.base_offset + int(found.offset_deltas[noted]))
                    return False
        self.end_offset = max(self.end_offset, header.next_offset)
        return True

    def filter(
        self, now_ms: int, delete_retention_ms: int, producers: Sequence[ProducerEntry] = (), expiry_header: bytes = b""
    ) -> BatchFilter:
        """The filter of the pass, when the map is complete; see :class:`BatchFilter`."""
        return BatchFilter(self.offsets, self.end_offset, now_ms, delete_retention_ms, producers, expiry_header)


@dataclass(slots=True, kw_only=True)
class CompactionCounts:
    """Counts of one pass so far."""

    records_read: int = 0
    records_kept: int = 0
    tombstones_kept: int = 0
    tombstones_deleted: int = 0
    keyless_deleted: int = 0
    batches_unreadable: int = 0
    first_unreadable: str = ""
    """Why the first of them is, with its offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedRecords:
    """The records of one batch as the rules see them, in order. ``newest`` is the newest offset of each one's key, or -1."""

    offsets: Ints64
    newest: Ints64
    have_keys: Bools
    have_values: Bools
    """False for tombstones and for what has expired."""


class BatchFilter:
    """The filter of one pass. ``now_ms`` is the wall time of its start; ``map_end``: later records stay as they are."""

    def __init__(
        self,
        offsets: OffsetMap,
        map_end: int,
        now_ms: int,
        delete_retention_ms: int,
        producers: Sequence[ProducerEntry] = (),
        expiry_header: bytes = b"",
    ) -> None:
        """``producers`` are those at the end of the history: the last batch of each stays.

        ``expiry_header`` names the header by which records expire; empty: none expire.
        """
        self._offsets = offsets
        self._map_end = map_end
        self._now_ms = now_ms
        self._horizon_ms = min(now_ms + delete_retention_ms, _HORIZON_MS_MAX)
        self._expiry_header = expiry_header
        self._last_batches = LastBatches(producers)
        self.transactions = TransactionFilter()
        self.counts = CompactionCounts()

    def fingerprint(self, batch: Buffer, header: BatchHeader) -> int:
        """Sum of hashes of the batch's records, to compare with those that must be there. Raises ``Corrupt``."""
        if header.is_control:
            return self._fingerprint(header, record_spans(batch_body(batch, header), header))
        spans = records_of(batch, header)
        return self._offsets.fingerprint_of(batch) if isinstance(spans, Corrupt) else self._fingerprint(header, spans)

    def trial(self) -> BatchFilter:
        """A filter that goes on as this one would, without changing it."""
        found = copy(self)
        found.transactions, found.counts = deepcopy(self.transactions), replace(self.counts)
        return found

    def begin_segment(self, aborted: Iterable[AbortedTransaction]) -> None:
        """Note the aborted transactions of the segment whose batches come next."""
        self.transactions.add(aborted)

    def take_aborted(self) -> Sequence[AbortedTransaction]:
        """The aborted transactions that the new segment lists."""
        return self.transactions.take_removed()

    def filter(self, batch: Buffer, header: BatchHeader, *, is_last: bool) -> Filtered:
        """The batch without the records that are to go; ``is_last``: it is the segment's last one. Raises ``Corrupt``."""
        self.counts.records_read += header.record_count
        stays = is_last or self._last_batches.has(header)
        if header.is_control:
            return self._marker(batch, header, stays=stays)
        if self.transactions.is_aborted(header):
            return _gone(header, stays=stays)
        if not header.record_count:
            return Filtered(batch=batch if stays else None, fingerprint=0)
        return self._records(batch, header, stays=stays)

    def _marker(self, batch: Buffer, header: BatchHeader, *, stays: bool) -> Filtered:
        spans = record_spans(batch_body(batch, header), header)
        is_done = self.transactions.is_marker_done(header, spans.key(0) if spans else None)
        horizon_ms = header.delete_horizon_ms
        if not spans:
            return Filtered(batch=batch if stays else None, fingerprint=0)
        if is_done and horizon_ms is not None and horizon_ms <= self._now_ms:
            return _gone(header, stays=stays)
        self.counts.records_kept += len(spans)
        if is_done and horizon_ms is None:
            batch = rebuilt(header, spans, np.ones(len(spans), np.bool_), self._horizon_ms)
        return Filtered(batch=batch, fingerprint=self._fingerprint(header, spans))

    def _records(self, batch: Buffer, header: BatchHeader, *, stays: bool) -> Filtered:
        spans = records_of(batch, header)
        if isinstance(spans, Corrupt):
            return self._unreadable(batch, header, spans)
        if header.base_offset >= self._map_end:
            self.counts.records_kept += header.record_count
            return Filtered(batch=batch, fingerprint=self._fingerprint(header, spans))
        records = self._mapped(header, spans)
        kept = self._keeps(header, records)
        kept_count, tombstones = int(np.count_nonzero(kept)), int(np.count_nonzero(kept & ~records.have_values))
        self._count(records, kept, kept_count, tombstones)
        fingerprint = self._fingerprint(header, spans, survivors(self._map_end, self._deletes_until_ms, header, records))
        if not kept_count:
            return Filtered(batch=emptied(header) if stays else None, fingerprint=fingerprint)
        sets_horizon = bool(tombstones) and header.delete_horizon_ms is None
        if kept_count == len(spans) and not sets_horizon:
            return Filtered(batch=batch, fingerprint=fingerprint)
        changed = rebuilt(header, spans, kept, self._horizon_ms if sets_horizon else None)
        return Filtered(batch=changed, fingerprint=fingerprint)

    @property
    def _deletes_until_ms(self) -> int:
        """Tombstones with a later delete horizon stay; all do after a batch that may hold older records of their keys."""
        return self._now_ms if not self.counts.batches_unreadable else -1

    def _unreadable(self, batch: Buffer, header: BatchHeader, reason: Corrupt) -> Filtered:
        self.counts.records_kept += header.record_count
        self.counts.batches_unreadable += 1
        if not self.counts.first_unreadable:
            self.counts.first_unreadable = f"offset {header.base_offset}: {reason.message}"
        return Filtered(batch=batch, fingerprint=self._offsets.fingerprint_of(batch))

    def _mapped(self, header: BatchHeader, spans: RecordSpans) -> MappedRecords:
        have_values = spans.have_values
        if self._expiry_header:
            have_values &= ~self._have_expired(spans.expiry_ms(self._expiry_header))
        return MappedRecords(
            offsets=header.base_offset + spans.offset_deltas, newest=self._offsets.newest(spans), have_keys=spans.have_keys,
            have_values=have_values,
        )  # fmt: skip

    def _have_expired(self, expiry_ms: Ints64) -> Bools:
        found: Bools = (expiry_ms != NEVER) & (expiry_ms <= self._now_ms)
        return found

    def _keeps(self, header: BatchHeader, records: MappedRecords) -> Bools:
        kept: Bools = records.have_keys & (records.offsets >= records.newest)
        horizon_ms = header.delete_horizon_ms
        if horizon_ms is not None and horizon_ms <= self._deletes_until_ms:
            kept &= records.have_values
        kept |= records.offsets >= self._map_end
        return kept

    def _count(self, records: MappedRecords, kept: Bools, kept_count: int, tombstones: int) -> None:
        counts = self.counts
        counts.records_kept += kept_count
        counts.tombstones_kept += tombstones
        if kept_count < len(kept):
            counts.tombstones_deleted += int(np.count_nonzero(~records.have_values)) - tombstones
            counts.keyless_deleted += int(np.count_nonzero(~kept & ~records.have_keys))

    def _fingerprint(self, header: BatchHeader, spans: RecordSpans, counted: Bools | None = None) -> int:
        every = np.ones(len(spans), np.bool_) if counted is None else counted
        return self._offsets.fingerprint(spans, every, header.base_offset)


def survivors(map_end: int, now_ms: int, header: BatchHeader, records: MappedRecords) -> Bools:
    """The records of a committed batch that compaction must not lose, decided apart from the filter, to check it.

    That is the newest record of each key, unless it is a tombstone whose time has come; and whatever the map does not reach.
    """
    found: Bools = records.have_keys & ((records.newest == -1) | (records.newest == records.offsets))
    if header.attributes & DELETE_HORIZON_BIT and header.base_timestamp_ms <= now_ms:
        found &= records.have_values
    found |= records.offsets >= map_end
    return found


def records_of(batch: Buffer, header: BatchHeader) -> RecordSpans | Corrupt:
    """The records of a batch that a client wrote, or why they cannot be read.

    That is what the client wrote: the block's and the batch's checksums have been compared.
    """
    try:
        return record_spans(batch_body(batch, header), header)
    except Corrupt as unreadable:
        return unreadable


def _gone(header: BatchHeader, *, stays: bool) -> Filtered:
    return Filtered(batch=emptied(header) if stays else None, fingerprint=0)
