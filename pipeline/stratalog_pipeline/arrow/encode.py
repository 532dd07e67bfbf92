"""Encodes Arrow columns as Kafka record batches. No I/O, no Spark.

Columns are those of the sinks: ``value`` and ``key`` (binary or string), ``headers`` (list of key and value), ``timestamp``. A
row without a timestamp gets the given time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from stratalog_core.batches.batch import HEADER_BYTES, MAGIC, NO_PRODUCER_ID, NO_SEQUENCE, BatchHeader, write_header
from stratalog_core.batches.compression import NONE, compressor
from stratalog_core.compiled.jit import Bytes, Ints32, Ints64
from stratalog_core.errors import Invalid
from stratalog_core.ports import Buffer
from stratalog_pipeline.arrow.encode_kernels import HEADER_BYTES_MAX, RECORD_BYTES_MAX, hash_keys, write_records

BATCH_BYTES: Final = 256 * 1024
"""Target size of a batch before compression; one larger record makes a larger batch."""
_RECORD_BYTES_LIMIT: Final = 64 * 1024 * 1024
_NO_BYTES: Final = np.zeros(1, np.uint8)
_NOTHING: Final = np.zeros(0, np.int32)
_HEADER: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])


class _Field(NamedTuple):
    """A nullable binary column: the rows' offsets into ``data``, and which rows are valid."""

    offsets: Ints32
    data: Bytes
    valid: Bytes

    @property
    def sizes(self) -> Ints64:
        return np.diff(self.offsets).astype(np.int64)


def encode_batches(rows: pa.RecordBatch, base_offset: int, codec: int, now_ms: int) -> Iterator[bytearray]:
    """Yield record batches of all ``rows``, the first at ``base_offset``. Raises ``Invalid`` for a row that is too large."""
    count = rows.num_rows
    if not count:
        return
    key, value = _field(rows, "key"), _field(rows, "value")
    header_rows, names, contents = _headers(rows)
    times_ms = _times_ms(rows, now_ms)
    bounds = RECORD_BYTES_MAX + key.sizes + value.sizes
    if len(header_rows):
        sizes = np.concatenate(([0], np.cumsum(HEADER_BYTES_MAX + names.sizes + contents.sizes)))
        bounds = bounds + (sizes[header_rows[1:]] - sizes[header_rows[:-1]])
    if int(bounds.max()) > _RECORD_BYTES_LIMIT:
        raise Invalid(f"a row has {int(bounds.max())} bytes; maximum is {_RECORD_BYTES_LIMIT}")
    compress: Callable[[Buffer], Buffer] = compressor(codec) if codec != NONE else _as_is
    ends = np.cumsum(bounds)
    first = 0
    while first < count:
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + BATCH_BYTES, side="right")))
        body = np.empty(int(ends[last - 1]) - before, np.uint8)
        length = write_records(body, 0, first, last, times_ms, *key, *value, header_rows, *names, *contents)
        yield _batch(body[:length].data, base_offset + first, times_ms[first:last], codec, compress)
        first = last


def partitions_of(keys: pa.Array, count: int) -> pa.Array:
    """The partition of each key among ``count``, as Java's client chooses it; null for a null."""
    column = _binary(keys)
    offsets, data, valid = _parts(column)
    found = np.empty(len(column), np.int32)
    hash_keys(offsets, data, count, found)
    return pa.array(found, pa.int32(), mask=valid == 0)


def _as_is(body: Buffer) -> Buffer:
    return body


def _batch(body: memoryview, base_offset: int, times_ms: Ints64, codec: int, compress: Callable[[Buffer], Buffer]) -> bytearray:
    packed = compress(body)
    batch = bytearray(HEADER_BYTES + len(packed))
    batch[HEADER_BYTES:] = packed
    count = len(times_ms)
    header = BatchHeader(
        base_offset, 0, 0, MAGIC, 0, codec, count - 1, int(times_ms[0]), int(times_ms.max()), NO_PRODUCER_ID, -1, NO_SEQUENCE,
        count,
    )  # fmt: skip
    write_header(batch, header)
    return batch


def _column(rows: pa.RecordBatch, name: str) -> pa.Array | None:
    return rows.column(name) if name in rows.schema.names else None


def _field(rows: pa.RecordBatch, name: str) -> _Field:
    column = _column(rows, name)
    if column is None:
        count = rows.num_rows
        return _Field(np.zeros(count + 1, np.int32), _NO_BYTES, np.zeros(count, np.uint8))
    return _parts(_binary(column))


def _binary(column: pa.Array) -> pa.Array:
    return column if pa.types.is_binary(column.type) else column.cast(pa.binary())


def _parts(column: pa.Array) -> _Field:
    _, offsets, data = column.buffers()
    count, start = len(column), column.offset
    begins = np.frombuffer(offsets, np.int32, count + 1, 4 * start) if offsets is not None else np.zeros(1, np.int32)
    content = np.frombuffer(data, np.uint8) if data is not None and data.size else _NO_BYTES
    return _Field(begins, content, _valid(column))


def _valid(column: pa.Array) -> Bytes:
    if not column.null_count:
        return np.ones(len(column), np.uint8)
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False), np.uint8)


def _headers(rows: pa.RecordBatch) -> tuple[Ints32, _Field, _Field]:
    """Where each row's headers begin among all, their names, and their contents."""
    column = _column(rows, "headers")
    if column is None or column.null_count == len(column):
        empty = _Field(np.zeros(1, np.int32), _NO_BYTES, np.zeros(0, np.uint8))
        return _NOTHING, empty, empty
    column = column.cast(pa.list_(_HEADER)).fill_null([])
    flat = column.flatten()
    begins = np.concatenate(([0], np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False)))).astype(np.int32)
    names = _parts(flat.field("key").cast(pa.binary()))
    if flat.null_count or not names.valid.all():
        raise Invalid("a header has no key; give each header one")
    return begins, names, _parts(_binary(flat.field("value")))


def _times_ms(rows: pa.RecordBatch, now_ms: int) -> Ints64:
    column = _column(rows, "timestamp")
    if column is None:
        return np.full(rows.num_rows, now_ms, np.int64)
    micros = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).fill_null(now_ms * 1000).to_numpy()
    return np.ascontiguousarray(micros // 1000, np.int64)
