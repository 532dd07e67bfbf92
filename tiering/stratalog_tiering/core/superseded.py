"""Removal of superseded records from segments, for ``stratalog job compact``. No I/O.

A record is superseded if a later record of its key was committed. Where those are was found before, over the whole cold history
(:class:`OffsetSet`). Only they go. The newest record of each key stays, tombstone or not, and so do records without a key,
records of aborted transactions, markers, and batches that cannot be read. No delete horizon is set, and aborted transactions
stay listed. So any number of such removals, and a pass of a worker, may alternate: none removes what another one relies on.

A batch that loses all records goes, too, unless it is its segment's last one, its producer's last one, or transactional: when
the marker of its transaction may go is for a worker to decide.

Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.batches.checkpoint import ProducerEntry
from stratalog_core.compiled.jit import Bools, Bytes, Ints64
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer
from stratalog_tiering.core.compaction import records_of
from stratalog_tiering.core.offset_map import OffsetMap
from stratalog_tiering.core.rewritten_batches import Filtered, LastBatches, emptied, rebuilt
from stratalog_tiering.format.footer import AbortedTransaction

CHUNK_BITS: Final = 16
CHUNK_OFFSETS: Final = 1 << CHUNK_BITS


class OffsetSet:
    """Offsets of one partition: a bit for each, in chunks of 65,536 offsets of which those without any take no memory."""

    def __init__(self) -> None:
        self._chunks: dict[int, Bytes] = {}

    def add(self, chunk: int, places: Sequence[int] | Ints64) -> None:
        """Add the offsets at ``places`` of a chunk, whose first offset is ``chunk * CHUNK_OFFSETS``."""
        bits = np.zeros(CHUNK_OFFSETS, np.bool_)
        bits[np.asarray(places, np.int64)] = True
        held = self._chunks.get(chunk)
        packed = np.packbits(bits)
        self._chunks[chunk] = packed if held is None else held | packed

    def add_all(self, offsets: Iterable[int]) -> None:
        by_chunk: dict[int, list[int]] = {}
        for offset in offsets:
            by_chunk.setdefault(offset >> CHUNK_BITS, []).append(offset % CHUNK_OFFSETS)
        for chunk, places in by_chunk.items():
            self.add(chunk, places)

    def has(self, offsets: Ints64) -> Bools:
        """Which of ``offsets`` are in the set."""
        found, chunks = np.zeros(len(offsets), np.bool_), offsets >> CHUNK_BITS
        for chunk in np.unique(chunks):
            packed = self._chunks.get(int(chunk))
            if packed is not None:
                here = chunks == chunk
                places = offsets[here] % CHUNK_OFFSETS
                found[here] = (packed[places >> 3] >> (7 - places % 8).astype(np.uint8)) & 1 != 0
        return found

    def count(self, first: int, end: int) -> int:
        """The number of offsets from ``first`` on, below ``end``."""
        return sum(int(np.count_nonzero(self._bits(chunk, first, end))) for chunk in self._between(first, end))

    def first_from(self, first: int, end: int) -> int | None:
        """The lowest offset from ``first`` on, below ``end``; None if there is none."""
        for chunk in sorted(self._between(first, end)):
            places = np.flatnonzero(self._bits(chunk, first, end))
            if len(places):
                return max(first, chunk << CHUNK_BITS) + int(places[0])
        return None

    def _between(self, first: int, end: int) -> Iterable[int]:
        return (chunk for chunk in self._chunks if first >> CHUNK_BITS <= chunk <= (end - 1) >> CHUNK_BITS)

    def _bits(self, chunk: int, first: int, end: int) -> Bytes:
        base = chunk << CHUNK_BITS
        bits: Bytes = np.unpackbits(self._chunks[chunk])[max(0, first - base) : max(0, end - base)]
        return bits


class SupersededFilter:
    """Filters the batches of one segment. ``producers`` are those at the end of the history, ``secret`` hides fingerprints."""

    def __init__(self, superseded: OffsetSet, producers: Sequence[ProducerEntry], secret: bytes) -> None:
        self._superseded = superseded
        self._last_batches = LastBatches(producers)
        self._hashes = OffsetMap(1, secret)
        self._aborted: list[AbortedTransaction] = []
        self._altered: set[int] = set()
        self.records_removed = 0
        self.batches_unreadable = 0
        self.first_unreadable = ""

    def begin_segment(self, aborted: Iterable[AbortedTransaction]) -> None:
        """The new segment lists the same aborted transactions, whose records stay."""
        self._aborted.extend(aborted)

    def take_aborted(self) -> Sequence[AbortedTransaction]:
        return self._aborted

    def filter(self, batch: Buffer, header: BatchHeader, *, is_last: bool) -> Filtered:
        """The batch without the superseded records: the same buffer if it has none, or if its records cannot be read."""
        if header.is_control or not header.record_count or self._is_aborted(header):
            return self._whole(batch)
        spans = records_of(batch, header)
        if isinstance(spans, Corrupt):
            if self._superseded.count(header.base_offset, header.next_offset):
                self.batches_unreadable += 1
                self.first_unreadable = self.first_unreadable or f"the batch at offset {header.base_offset}: {spans.message}"
            return self._whole(batch)
        gone = spans.have_keys & self._superseded.has(header.base_offset + spans.offset_deltas)
        if not gone.any():
            return self._whole(batch)
        self.records_removed += int(np.count_nonzero(gone))
        self._altered.add(header.base_offset)
        fingerprint = self._hashes.fingerprint(spans, ~gone, header.base_offset)
        if not gone.all():
            return Filtered(batch=rebuilt(header, spans, ~gone, None), fingerprint=fingerprint)
        stays = is_last or header.is_transactional or self._last_batches.has(header)
        return Filtered(batch=emptied(header) if stays else None, fingerprint=fingerprint)

    def fingerprint(self, batch: Buffer, header: BatchHeader) -> int:
        """Sum of hashes of the records of a batch that was altered, else hash of the whole batch. Raises ``Corrupt``."""
        if header.base_offset not in self._altered:
            return self._hashes.fingerprint_of(batch)
        spans = records_of(batch, header)
        if isinstance(spans, Corrupt):
            raise spans
        return self._hashes.fingerprint(spans, np.ones(len(spans), np.bool_), header.base_offset)

    def _whole(self, batch: Buffer) -> Filtered:
        return Filtered(batch=batch, fingerprint=self._hashes.fingerprint_of(batch))

    def _is_aborted(self, header: BatchHeader) -> bool:
        return header.is_transactional and any(
            each.producer_id == header.producer_id and each.first_offset <= header.base_offset <= each.last_offset
            for each in self._aborted
        )
