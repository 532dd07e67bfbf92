"""The task's half of a read: reads the rows of one split from footers and blocks. Independent of Spark."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final

import pyarrow as pa

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.errors import Corrupt
from stratalog_pipeline.arrow.decode import BatchDecoder, OnCorrupt, SkipBatch
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.planning import SegmentSlice, Split
from stratalog_pipeline.pruning import ANY_TIME, TimeRange
from stratalog_pipeline.segments import located, read_blocks, wanted_blocks
from stratalog_tiering.format.footer import AbortedTransaction, BlockEntry, SegmentFooter

REPORTED_MAX: Final = 20
"""Blocks and batches that a split reports one by one."""
_LOGGER: Final = logging.getLogger(__name__)


def scan_split(
    bucket: Bucket,
    split: Split,
    columns: Sequence[str],
    *,
    read_committed: bool,
    times: TimeRange = ANY_TIME,
    skips_corrupt: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one split as Arrow record batches. Raises ``Corrupt`` with segment, block and offsets.

    Blocks without a record within ``times`` are not read. ``skips_corrupt``: blocks that are damaged and batches that cannot be
    read are left out and reported in the log; a segment that is missing, or whose footer is damaged, raises all the same.
    """
    report = _Report(split) if skips_corrupt else None
    decoder = BatchDecoder(
        topic=split.name.topic,
        partition=split.name.partition,
        columns=columns,
        first_offset=split.offsets.first,
        end_offset=split.offsets.end,
    )
    for piece in split.slices:
        footer = bucket.run(bucket.source.footer(piece.segment))
        skip = skip_aborted(footer.aborted_transactions) if read_committed else None
        blocks = wanted_blocks(footer, piece, split.offsets, times)
        yield from chain.from_iterable(_decoded(bucket, decoder, piece, footer, blocks, skip, report))
    yield from decoder.finish()
    if report is not None:
        report.end()


def _decoded(
    bucket: Bucket,
    decoder: BatchDecoder,
    piece: SegmentSlice,
    footer: SegmentFooter,
    blocks: Sequence[BlockEntry],
    skip: SkipBatch | None,
    report: _Report | None,
) -> Iterator[Iterator[pa.RecordBatch]]:
    for block, content in read_blocks(bucket, piece.segment, footer, blocks, report):
        on_corrupt = None if report is None else _with_place(report, piece, block)
        yield _located(decoder.decode(content, skip, on_corrupt), piece, block)


def _with_place(report: OnCorrupt, piece: SegmentSlice, block: BlockEntry) -> OnCorrupt:
    return lambda bad: report(located(piece.segment, block, bad))


def _located(batches: Iterator[pa.RecordBatch], piece: SegmentSlice, block: BlockEntry) -> Iterator[pa.RecordBatch]:
    try:
        yield from batches
    except Corrupt as bad:
        raise located(piece.segment, block, bad) from bad


class _Report:
    """Logs what a split leaves out: the first places one by one, at the end their number."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._count = 0

    def __call__(self, bad: Corrupt) -> None:
        self._count += 1
        if self._count <= REPORTED_MAX:
            _LOGGER.warning("%s: left out (onCorruptBatch=skip): %s", self._split.name, bad.message)

    def end(self) -> None:
        if self._count:
            place = f"{self._split.name}, offsets {self._split.offsets.first}..{self._split.offsets.end - 1}"
            _LOGGER.warning("%s: %d damaged blocks and batches were left out (onCorruptBatch=skip)", place, self._count)


def skip_aborted(aborted: Sequence[AbortedTransaction]) -> Callable[[BatchHeader], bool] | None:
    """Return a function that says whether a batch belongs to an aborted transaction; None if there are none."""
    if not aborted:
        return None
    by_producer: dict[int, list[AbortedTransaction]] = {}
    for transaction in aborted:
        by_producer.setdefault(transaction.producer_id, []).append(transaction)

    def skip(header: BatchHeader) -> bool:
        return header.is_transactional and any(
            transaction.first_offset <= header.base_offset <= transaction.last_offset
            for transaction in by_producer.get(header.producer_id, ())
        )

    return skip
