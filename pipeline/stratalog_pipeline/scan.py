"""One read from its options to its rows: first what is there and how it is cut, then the rows of one split.

The driver's half (``plan_scan``) reads descriptors, manifests and, for bounds by time, one block per partition; the task's
half (``scan_split``) reads footers and blocks. Both know nothing of Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import pyarrow as pa

from stratalog_core.batch import BatchHeader
from stratalog_core.errors import Corrupt, Invalid
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.catalog import History, list_topics, load_history, load_segments
from stratalog_pipeline.decode import BatchDecoder, SkipBatch
from stratalog_pipeline.options import AllAt, AtOffsets, AtTimestamp, AtTimestamps, Bound, PerPartition, ReadOptions
from stratalog_pipeline.planning import (
    Cut,
    OffsetRange,
    PartitionName,
    SegmentSlice,
    Split,
    check_all_named,
    plan_splits,
    position,
    resolve_topics,
    within,
)
from stratalog_pipeline.pruning import EVERYTHING, Pruning
from stratalog_pipeline.segments import located, read_blocks
from stratalog_tiering.footer import AbortedTransaction, BlockEntry, SegmentFooter


def plan_scan(bucket: Bucket, options: ReadOptions, pruning: Pruning = EVERYTHING) -> list[Split]:
    """Splits of a read, with the manifest of each partition pinned. Raises ``Invalid`` or ``Corrupt``."""
    topics = list_topics(bucket)
    wanted = resolve_topics(options.wanted, {name: topic.partition_count for name, topic in topics.items()})
    _check_bounds(options, wanted)
    planned = []
    for topic, numbers in wanted.items():
        for number in numbers:
            name = PartitionName(topic=topic, topic_id=topics[topic].topic_id, partition=number)
            if pruning.allows(topic, number):
                history = load_history(bucket, name)
                offsets = pruning.narrowed(_wanted_offsets(bucket, options, history))
                planned.append((name, offsets, load_segments(bucket, history, offsets)))
    cut = Cut(split_bytes=options.split_bytes, records_max=options.records_per_split_max, splits_min=options.min_partitions)
    return plan_splits(planned, cut)


def _check_bounds(options: ReadOptions, wanted: Mapping[str, Sequence[int]]) -> None:
    for side, bound in (("starting", options.start), ("ending", options.end)):
        if isinstance(bound, AtOffsets):
            check_all_named(f"{side}Offsets", bound.offsets, wanted)
        elif isinstance(bound, AtTimestamps):
            check_all_named(f"{side}OffsetsByTimestamp", bound.timestamps_ms, wanted)


def _wanted_offsets(bucket: Bucket, options: ReadOptions, history: History) -> OffsetRange:
    cold = history.offsets
    first = _resolve(bucket, options.start, history)
    end = _resolve(bucket, options.end, history)
    if first is None and not options.missing_timestamp_is_latest:
        raise Invalid(
            f"{history.name}: no record is as late as the wanted start; "
            "set startingOffsetsByTimestampStrategy to latest to read nothing of such partitions"
        )
    found = OffsetRange(first=cold.end if first is None else first, end=cold.end if end is None else end)
    return within(history.name, found, cold, fail_on_data_loss=options.fail_on_data_loss)


def _resolve(bucket: Bucket, bound: Bound, history: History) -> int | None:
    """The bound as an offset; None where no record is as late as it asks for."""
    if isinstance(bound, AllAt):
        return position(bound.position, history.offsets)
    if isinstance(bound, AtOffsets):
        return position(_of(bound.offsets, history.name), history.offsets)
    timestamp_ms = bound.timestamp_ms if isinstance(bound, AtTimestamp) else _of(bound.timestamps_ms, history.name)
    return None if history.pointer is None else bucket.offset_at(history.pointer, timestamp_ms)


def _of(values: PerPartition, name: PartitionName) -> int:
    return values[name.topic][name.partition]


def scan_split(
    bucket: Bucket, split: Split, columns: Sequence[str], *, read_committed: bool, timestamp_from_ms: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Rows of one split as Arrow record batches. Raises ``Corrupt`` naming segment, block and offsets.

    Blocks whose every record is before ``timestamp_from_ms`` are not read.
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
        blocks = wanted_blocks(footer, piece, split.offsets, timestamp_from_ms)
        yield from chain.from_iterable(_decoded(bucket, decoder, piece, blocks, skip))
    yield from decoder.finish()


def _decoded(
    bucket: Bucket, decoder: BatchDecoder, piece: SegmentSlice, blocks: Sequence[BlockEntry], skip: SkipBatch | None
) -> Iterator[Iterator[pa.RecordBatch]]:
    for block, content in read_blocks(bucket, piece.segment, blocks):
        yield _located(decoder.decode(content, skip), piece, block)


def _located(batches: Iterator[pa.RecordBatch], piece: SegmentSlice, block: BlockEntry) -> Iterator[pa.RecordBatch]:
    try:
        yield from batches
    except Corrupt as bad:
        raise located(piece.segment, block, bad) from bad


def wanted_blocks(
    footer: SegmentFooter, piece: SegmentSlice, offsets: OffsetRange, timestamp_from_ms: int | None = None
) -> list[BlockEntry]:
    """Blocks of a footer that begin within ``piece`` and can hold a wanted record."""
    return [
        block
        for block in footer.blocks
        if piece.blocks_from <= block.base_offset < piece.blocks_end
        and block.last_offset >= offsets.first
        and block.base_offset < offsets.end
        and (timestamp_from_ms is None or block.max_timestamp_ms >= timestamp_from_ms)
    ]


def skip_aborted(aborted: Sequence[AbortedTransaction]) -> Callable[[BatchHeader], bool] | None:
    """Says of a batch whether it belongs to an aborted transaction; None where there is none."""
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
