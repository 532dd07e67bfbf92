"""The task's half of a read: reads the rows of one split from footers and blocks. Independent of Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import pyarrow as pa

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.errors import Corrupt
from stratalog_pipeline.arrow.decode import BatchDecoder, SkipBatch
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.planning import SegmentSlice, Split
from stratalog_pipeline.pruning import ANY_TIME, TimeRange
from stratalog_pipeline.segments import located, read_blocks, wanted_blocks
from stratalog_tiering.format.footer import AbortedTransaction, BlockEntry, SegmentFooter


def scan_split(
    bucket: Bucket, split: Split, columns: Sequence[str], *, read_committed: bool, times: TimeRange = ANY_TIME
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one split as Arrow record batches. Raises ``Corrupt`` with segment, block and offsets.

    Blocks without a record within ``times`` are not read.
    """
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
        yield from chain.from_iterable(_decoded(bucket, decoder, piece, footer, blocks, skip))
    yield from decoder.finish()


def _decoded(
    bucket: Bucket,
    decoder: BatchDecoder,
    piece: SegmentSlice,
    footer: SegmentFooter,
    blocks: Sequence[BlockEntry],
    skip: SkipBatch | None,
) -> Iterator[Iterator[pa.RecordBatch]]:
    for block, content in read_blocks(bucket, piece.segment, footer, blocks):
        yield _located(decoder.decode(content, skip), piece, block)


def _located(batches: Iterator[pa.RecordBatch], piece: SegmentSlice, block: BlockEntry) -> Iterator[pa.RecordBatch]:
    try:
        yield from batches
    except Corrupt as bad:
        raise located(piece.segment, block, bad) from bad


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
