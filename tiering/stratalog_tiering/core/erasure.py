"""Erasure of records for data-protection requests: which records go, and what is left of their batches. No I/O.

A record goes if its key is one of those asked for, or if it has one of the headers, whatever became of its transaction. Every
batch stays, if need be without records, with its offsets, producer and sequence; control batches are never touched. So neither
offsets nor producers' states nor transactions change, and each batch is a leaf of the partition's tree as before.

A broker does not read the records of most topics, so a client may have written a batch whose records cannot be read. Such a
batch stays as it is and is counted: nobody can say whether a record in it goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.batches.record_spans import RecordSpans, batch_body, record_spans
from stratalog_core.batches.records import Record, iterate_records
from stratalog_core.compiled.jit import Bools
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer
from stratalog_tiering.core.rewritten_batches import Filtered, emptied, rebuilt
from stratalog_tiering.format.erased_leaves import ErasedLeaf
from stratalog_tiering.format.footer import AbortedTransaction
from stratalog_tiering.format.merkle import batch_leaf

NEEDLES_MAX = 32
"""Up to so many keys and header values, a batch is searched for their bytes before its records are located."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The records to erase: those with one of the ``keys``, or with one of the ``headers`` (name and value)."""

    keys: frozenset[bytes] = frozenset()
    headers: frozenset[tuple[bytes, bytes]] = frozenset()

    def selects(self, spans: RecordSpans, row: int) -> bool:
        """Whether a record of a batch goes. Raises ``Corrupt``."""
        if spans.key(row) in self.keys:
            return True
        return bool(self.headers) and not self.headers.isdisjoint(spans.headers(row))

    def selected(self, spans: RecordSpans) -> Bools:
        """Which records of a batch go. Raises ``Corrupt``."""
        return np.array([self.selects(spans, row) for row in range(len(spans))], np.bool_)

    def may_select(self, body: bytes) -> bool:
        """Whether a record of a body may go; False is certain."""
        needles = [*self.keys, *(value for _, value in self.headers)]
        return len(needles) > NEEDLES_MAX or any(needle in body for needle in needles)

    def selects_decoded(self, record: Record) -> bool:
        """:meth:`selects` for a record that the plain decoder has read."""
        headers = {(name.encode("utf-8", "surrogateescape"), value) for name, value in record.headers}
        return record.key in self.keys or not headers.isdisjoint(self.headers)


class _Split(NamedTuple):
    """The records of a batch: which of them go, and those that must be left, as the plain decoder reads them."""

    spans: RecordSpans
    gone: Bools
    rest: list[Record]


def _split(batch: Buffer, header: BatchHeader, selection: Selection) -> _Split | None:
    """Take a batch apart; None if no record goes. Raises ``Corrupt``, also if what would be left cannot be decoded."""
    if header.is_control or not header.record_count:
        return None
    body = batch_body(batch, header)
    if not selection.may_select(body):
        return None
    spans = record_spans(body, header)
    gone = selection.selected(spans)
    if not gone.any():
        return None
    # Decided by the plain decoder, apart from the filter, to check it.
    rest = [record for record in iterate_records(batch, header) if not selection.selects_decoded(record)]
    return _Split(spans, gone, rest)


def selected(batch: Buffer, header: BatchHeader, selection: Selection) -> int:
    """The number of a batch's records that go. Raises ``Corrupt``, also if what would be left cannot be decoded."""
    split = _split(batch, header, selection)
    return 0 if split is None else int(np.count_nonzero(split.gone))


def selected_or_unreadable(batch: Buffer, header: BatchHeader, selection: Selection) -> int | Corrupt:
    """:func:`selected`, or why the records cannot be read. The caller has compared the CRC: a client wrote the batch so."""
    try:
        return selected(batch, header, selection)
    except Corrupt as unreadable:
        return unreadable


@dataclass(slots=True, kw_only=True)
class EraseFilter:
    """Filters the batches of one segment. ``known`` are the leaves that earlier erasures have kept, by batch number.

    ``leaves`` holds the leaf of each batch as the segment had it; those in ``altered`` lost records now, with the records
    that must be left of each. ``unreadable_batches`` stay as they are, whatever is in them.
    """

    selection: Selection
    known: Mapping[int, bytes] = field(default_factory=dict)
    leaves: list[bytes] = field(default_factory=list)
    altered: dict[int, list[Record]] = field(default_factory=dict)
    records_erased: int = 0
    unreadable_batches: int = 0
    _aborted: list[AbortedTransaction] = field(default_factory=list)

    def begin_segment(self, aborted: Iterable[AbortedTransaction]) -> None:
        """The new segment lists the same aborted transactions."""
        self._aborted.extend(aborted)

    def take_aborted(self) -> Sequence[AbortedTransaction]:
        return self._aborted

    def filter(self, batch: Buffer, header: BatchHeader, *, is_last: bool) -> Filtered:
        """The batch without the records that go: the same buffer if there is none, or if its records cannot be read."""
        del is_last  # every batch stays
        self.leaves.append(batch_leaf(batch))
        try:
            split = _split(batch, header, self.selection)
        except Corrupt:
            self.unreadable_batches += 1
            split = None
        if split is None:
            return Filtered(batch=batch, fingerprint=0)
        self.records_erased += int(np.count_nonzero(split.gone))
        self.altered[len(self.leaves) - 1] = split.rest
        rest = emptied(header) if split.gone.all() else rebuilt(header, split.spans, ~split.gone, None)
        return Filtered(batch=rest, fingerprint=0)

    def erased_leaves(self) -> Iterator[ErasedLeaf]:
        """The leaves that the new segment must keep, in the order of their batches."""
        for index in sorted({*self.known, *self.altered}):
            yield ErasedLeaf(index, self.known.get(index) or self.leaves[index])
