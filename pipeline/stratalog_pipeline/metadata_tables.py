"""Tables about a topic's history instead of its records: segments, blocks, batches, manifests, and the tail at the brokers.

They list counts, sizes, offsets, times, producers and compression. Only ``batches`` reads data, and it decompresses nothing.
Independent of Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from stratalog_core.batches.batch import iterate_headers
from stratalog_core.batches.compression import NAMES
from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Invalid
from stratalog_pipeline.brokers import Brokers
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.catalog import History, load_segments, load_wanted
from stratalog_pipeline.options import ReadOptions
from stratalog_pipeline.planning import OffsetRange, PartitionName
from stratalog_pipeline.pruning import ALL_OFFSETS
from stratalog_pipeline.segments import read_blocks
from stratalog_tiering.format.manifest import SegmentEntry

REQUESTS_MAX: Final = 16
"""Requests to the store at a time in one task."""
ROWS_MAX: Final = 10_000
"""Rows of one Arrow batch."""

TIMESTAMP_MS_MAX: Final = (2**63 - 1) // 1000

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataTable:
    """A table's columns, each with its type in Arrow and in Spark, and its rows for some partitions."""

    columns: Mapping[str, tuple[pa.DataType, str]]
    rows: Callable[[Bucket, ReadOptions, Sequence[History]], Iterator[Row]]


def read_table(options: ReadOptions, names: Sequence[PartitionName], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the table ``options.table`` for these partitions. Raises ``Corrupt``, ``Invalid``, ``Unavailable``."""
    table = TABLES[options.table]
    schema = pa.schema([(name, table.columns[name][0]) for name in columns])
    places = [list(table.columns).index(name) for name in columns]
    with Bucket(options.store, options.second_store) as bucket:
        histories = bucket.run(bounded_map(lambda name: load_wanted(bucket, options, name), names, REQUESTS_MAX))
        run: list[Row] = []
        for row in table.rows(bucket, options, histories):
            run.append(row)
            if len(run) == ROWS_MAX:
                yield _to_arrow(run, places, schema)
                run = []
        if run:
            yield _to_arrow(run, places, schema)


def _to_arrow(rows: Sequence[Row], places: Sequence[int], schema: pa.Schema) -> pa.RecordBatch:
    made = [pa.array([row[place] for row in rows], field.type) for place, field in zip(places, schema, strict=True)]
    return pa.RecordBatch.from_arrays(made, schema=schema)


def _segments_of(bucket: Bucket, history: History) -> list[SegmentEntry]:
    return bucket.run(load_segments(bucket, history, ALL_OFFSETS))


def _manifests(bucket: Bucket, options: ReadOptions, histories: Sequence[History]) -> Iterator[Row]:
    for history in histories:
        if history.pointer is not None:
            made = bucket.run(bucket.source.manifest(history.pointer))
            yield (
                *_place(history), made.version, history.pointer.object_key, _us(made.created_at_ms), made.writer,
                made.start_offset, made.end_offset, made.record_count, made.cold_bytes,
                sum(page.segment_count for page in made.pages) + len(made.segments), made.tree.size, made.tree.head.hex(),
            )  # fmt: skip


def _segments(bucket: Bucket, options: ReadOptions, histories: Sequence[History]) -> Iterator[Row]:
    for history in histories:
        for entry in _segments_of(bucket, history):
            yield (
                *_place(history), entry.base_offset, entry.end_offset, entry.kind.name.lower(), entry.record_count,
                entry.batch_count, entry.data_bytes, entry.stored_bytes, _us(entry.min_timestamp_ms),
                _us(entry.max_timestamp_ms), _us(entry.created_at_ms), entry.merge_count, entry.key, entry.object_sha256.hex(),
            )  # fmt: skip


def _blocks(bucket: Bucket, options: ReadOptions, histories: Sequence[History]) -> Iterator[Row]:
    for history in histories:
        for entry in _segments_of(bucket, history):
            for block in bucket.run(bucket.source.footer(entry)).blocks:
                yield (
                    *_place(history), block.base_offset, block.last_offset + 1, block.record_count, block.batch_count,
                    block.length, block.plain_length, _us(block.min_timestamp_ms), _us(block.max_timestamp_ms), entry.key,
                    entry.data_position + block.position,
                )  # fmt: skip


def _batches(bucket: Bucket, options: ReadOptions, histories: Sequence[History]) -> Iterator[Row]:
    for history in histories:
        for entry in _segments_of(bucket, history):
            footer = bucket.run(bucket.source.footer(entry))
            for _, content in read_blocks(bucket, entry, footer, footer.blocks):
                for _, header in iterate_headers(content):
                    has_producer = header.producer_id >= 0
                    yield (
                        *_place(history), header.base_offset, header.next_offset, header.record_count, header.size_bytes,
                        _COMPRESSION.get(header.compression, "unknown"), header.leader_epoch,
                        header.producer_id if has_producer else None, header.producer_epoch if has_producer else None,
                        header.base_sequence if has_producer else None,
                        header.is_transactional, header.is_control, _us(header.base_timestamp_ms), _us(header.max_timestamp_ms),
                    )  # fmt: skip


def _tail(bucket: Bucket, options: ReadOptions, histories: Sequence[History]) -> Iterator[Row]:
    if not options.client:
        raise Invalid("table 'tail' is about the brokers: set option kafka.bootstrap.servers")
    limits = Brokers(options).served_limits(options.wanted, (history.name for history in histories))
    for history in histories:
        log = limits.get(history.name)
        if log is None:
            continue
        cold_end = None if history.pointer is None else history.offsets.end
        hot = OffsetRange(first=log.first if cold_end is None else max(log.first, cold_end), end=log.end)
        committed_at = _us(history.committed_at_ms) if history.pointer is not None else None
        yield *_place(history), log.first, log.end, cold_end, committed_at, max(hot.end - hot.first, 0)


def _place(history: History) -> Row:
    return history.name.topic, str(history.name.topic_id), history.name.partition


def _us(timestamp_ms: int | None) -> int | None:
    """Return microseconds. Clients may send times that do not fit into 64 bits then: they become the nearest that does."""
    return None if timestamp_ms is None else max(-TIMESTAMP_MS_MAX, min(timestamp_ms, TIMESTAMP_MS_MAX)) * 1000


_COMPRESSION: Final = {code: name for name, code in NAMES.items()}
_TEXT: Final = (pa.string(), "string")
_INT: Final = (pa.int32(), "int")
_LONG: Final = (pa.int64(), "bigint")
_TIME: Final = (pa.timestamp("us", tz="UTC"), "timestamp")
_FLAG: Final = (pa.bool_(), "boolean")
_PLACE: Final = {"topic": _TEXT, "topic_id": _TEXT, "partition": _INT}
_OFFSETS: Final = {"base_offset": _LONG, "end_offset": _LONG}
_TIMES: Final = {"min_timestamp": _TIME, "max_timestamp": _TIME}

TABLES: Final[Mapping[str, MetadataTable]] = {
    "manifests": MetadataTable(
        columns={
            **_PLACE, "version": _LONG, "key": _TEXT, "committed_at": _TIME, "writer": _TEXT, "start_offset": _LONG,
            "end_offset": _LONG, "record_count": _LONG, "cold_bytes": _LONG, "segment_count": _LONG,
            "tree_size": _LONG, "tree_head": _TEXT,
        },
        rows=_manifests,
    ),
    "segments": MetadataTable(
        columns={
            **_PLACE, **_OFFSETS, "kind": _TEXT, "record_count": _LONG, "batch_count": _LONG, "data_bytes": _LONG,
            "stored_bytes": _LONG, **_TIMES, "created_at": _TIME, "merge_count": _LONG, "key": _TEXT, "sha256": _TEXT,
        },
        rows=_segments,
    ),
    "blocks": MetadataTable(
        columns={
            **_PLACE, **_OFFSETS, "record_count": _LONG, "batch_count": _LONG, "stored_bytes": _LONG, "plain_bytes": _LONG,
            **_TIMES, "key": _TEXT, "position": _LONG,
        },
        rows=_blocks,
    ),
    "batches": MetadataTable(
        columns={
            **_PLACE, **_OFFSETS, "record_count": _LONG, "size_bytes": _LONG, "compression": _TEXT, "leader_epoch": _INT,
            "producer_id": _LONG, "producer_epoch": _INT, "base_sequence": _INT, "is_transactional": _FLAG, "is_control": _FLAG,
            "base_timestamp": _TIME, "max_timestamp": _TIME,
        },
        rows=_batches,
    ),
    "tail": MetadataTable(
        columns={
            **_PLACE, "log_start_offset": _LONG, "log_end_offset": _LONG, "cold_end_offset": _LONG, "committed_at": _TIME,
            "hot_offsets": _LONG,
        },
        rows=_tail,
    ),
}  # fmt: skip
