"""Decodes runs of record batches into Arrow record batches with the columns of Spark's Kafka source.

Every batch's CRC32C is checked before its contents are used; control batches (transaction markers) yield no rows. Results stay
within ``bounds``; a single record that exceeds them is yielded alone. This module does not filter aborted transactions: the
caller's ``skip`` leaves out the batches that must not be read. A batch that cannot be read yields no row, if ``on_corrupt`` is
given; without it ``Corrupt`` is raised, and rows of that batch may have been yielded before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from stratalog_core.batches import batch, compression
from stratalog_core.batches.batch import BatchHeader
from stratalog_core.compiled.jit import Bytes, Ints64
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer
from stratalog_pipeline.arrow import kernels
from stratalog_pipeline.arrow.columns import UNBOUNDED, ColumnBuffers
from stratalog_pipeline.arrow.kernels import Frame, Room

BOUNDS: Final = Room(rows=10_000, data_bytes=4 * 1024 * 1024, headers=80_000)
"""Spark takes batches of about this size fastest; 65 MB ones take twice as long (measured)."""
RECORD_BYTES_MIN: Final = 7
"""Minimum size of a record: length, attributes, two deltas, key, value and header count take at least one byte each."""
OFFSET_MAX: Final = 2**63 - 2**32
"""Larger base offsets are refused, because adding a delta could overflow; no partition ever reaches them."""

SkipBatch = Callable[[BatchHeader], bool]
OnCorrupt = Callable[[Corrupt], None]
"""Takes what is wrong with a batch that is left out."""


class BatchDecoder:
    """Decodes one partition's batches in order. Pass runs to ``decode``, then call ``finish``; both yield record batches."""

    def __init__(
        self,
        *,
        topic: str,
        partition: int,
        columns: Sequence[str],
        first_offset: int = 0,
        end_offset: int = OFFSET_MAX,
        bounds: Room = BOUNDS,
    ) -> None:
        self._topic = topic
        self._partition = partition
        self._columns = tuple(columns)
        self._wants_times = "timestamp" in self._columns
        self._first_offset = first_offset
        self._end_offset = end_offset
        self._bounds = bounds
        self._spans = np.empty((bounds.rows, kernels.SPAN_PLACES), np.int64)
        self._buffers = ColumnBuffers(self._columns, bounds)

    def decode(
        self, run: Buffer, skip: SkipBatch | None = None, on_corrupt: OnCorrupt | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Decode a run of whole batches. Raises ``Corrupt`` with topic, partition and the batch's base offset.

        With ``on_corrupt`` it gets the error and the batch is left out; after a bad length, so is the rest of the run.
        """
        view = memoryview(run)
        for position, header in _headers(view, on_corrupt):
            content = view[position : position + header.size_bytes]
            try:
                self._check(content, header)
                if header.is_control or self._is_outside(header) or (skip is not None and skip(header)):
                    continue
                body = self._body(content, header)
                if on_corrupt is not None:
                    self._check_records(body, header)
            except Corrupt as bad:
                if on_corrupt is None:
                    raise
                on_corrupt(bad)
                continue
            yield from self._decode_body(body, header)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yield the remaining rows that did not fill a record batch."""
        if self._buffers.rows:
            yield self._flush()

    def _check(self, content: memoryview, header: BatchHeader) -> None:
        if header.magic != batch.MAGIC:
            raise self._corrupt(header, f"magic {header.magic} is not {batch.MAGIC}")
        if not batch.crc_matches(content, header):
            raise self._corrupt(header, "it does not match its CRC")
        if not 0 <= header.base_offset <= OFFSET_MAX or header.last_offset_delta < 0:
            raise self._corrupt(header, f"offsets {header.base_offset}..{header.last_offset} cannot be")

    def _is_outside(self, header: BatchHeader) -> bool:
        return header.last_offset < self._first_offset or header.base_offset >= self._end_offset

    def _check_records(self, body: Bytes, header: BatchHeader) -> None:
        """Walk all records first, so that a batch that is left out has yielded none of them."""
        room = Room(rows=len(self._spans), data_bytes=UNBOUNDED, headers=UNBOUNDED)
        frame, cursor, code = self._frame(header), _cursor(), kernels.FULL
        while code == kernels.FULL:
            code = int(kernels.measure(body, frame, room, self._spans, cursor))
            if code not in (kernels.DONE, kernels.FULL):
                raise self._corrupt(header, kernels.MESSAGES[code])
            cursor[kernels.ROWS] = cursor[kernels.DATA_BYTES] = cursor[kernels.HEADERS] = 0

    def _decode_body(self, body: Bytes, header: BatchHeader) -> Iterator[pa.RecordBatch]:
        frame, cursor = self._frame(header), _cursor()
        code = kernels.FULL
        while code == kernels.FULL:
            code = int(kernels.measure(body, frame, self._buffers.room, self._spans, cursor))
            if code not in (kernels.DONE, kernels.FULL):
                raise self._corrupt(header, kernels.MESSAGES[code])
            self._buffers.append(body, self._spans, cursor, int(header.is_log_append_time))
            cursor[kernels.ROWS] = cursor[kernels.DATA_BYTES] = cursor[kernels.HEADERS] = 0
            if code == kernels.FULL:
                yield from self._make_room(len(body))

    def _make_room(self, body_bytes: int) -> Iterator[pa.RecordBatch]:
        if self._buffers.rows:
            yield self._flush()
        else:
            self._buffers = ColumnBuffers(self._columns, Room(rows=1, data_bytes=body_bytes, headers=body_bytes))

    def _body(self, content: memoryview, header: BatchHeader) -> Bytes:
        packed = content[batch.HEADER_BYTES :]
        try:
            body = packed if header.compression == compression.NONE else compression.decompress(header.compression, packed)
        except Corrupt as bad:
            raise self._corrupt(header, bad.message) from bad
        if not 0 <= header.record_count <= len(body) // RECORD_BYTES_MIN:
            raise self._corrupt(header, f"{header.record_count} records do not fit into {len(body)} bytes")
        return np.frombuffer(body, np.uint8)

    def _frame(self, header: BatchHeader) -> Frame:
        return Frame(
            base_offset=header.base_offset,
            last_offset_delta=header.last_offset_delta,
            record_count=header.record_count,
            base_timestamp_ms=header.base_timestamp_ms,
            fixed_timestamp_ms=header.max_timestamp_ms if self._wants_times else 0,
            # One time for all records: those that are not selected may be beyond what a row can hold.
            log_append_time=int(header.is_log_append_time or not self._wants_times),
            first_offset=self._first_offset,
            end_offset=self._end_offset,
        )

    def _flush(self) -> pa.RecordBatch:
        full, self._buffers = self._buffers, ColumnBuffers(self._columns, self._bounds)
        return full.to_arrow(self._topic, self._partition)

    def _corrupt(self, header: BatchHeader, reason: str) -> Corrupt:
        place = f"{self._topic}-{self._partition}: record batch at offsets {header.base_offset}..{header.last_offset}"
        return Corrupt(f"{place}: {reason}", topic=self._topic, partition=self._partition, base_offset=header.base_offset)


def _headers(run: memoryview, on_corrupt: OnCorrupt | None) -> Iterator[tuple[int, BatchHeader]]:
    headers = batch.iterate_headers(run)
    while True:
        try:
            found = next(headers, None)
        except Corrupt as bad:
            if on_corrupt is None:
                raise
            on_corrupt(bad)
            return
        if found is None:
            return
        yield found


def _cursor() -> Ints64:
    cursor = np.zeros(kernels.CURSOR_PLACES, np.int64)
    cursor[kernels.LAST_DELTA] = -1
    return cursor


def decode_run(
    run: Buffer,
    *,
    topic: str,
    partition: int,
    columns: Sequence[str],
    first_offset: int = 0,
    end_offset: int = OFFSET_MAX,
    bounds: Room = BOUNDS,
) -> Iterator[pa.RecordBatch]:
    """Decode a single run completely; see :class:`BatchDecoder`."""
    decoder = BatchDecoder(
        topic=topic, partition=partition, columns=columns, first_offset=first_offset, end_offset=end_offset, bounds=bounds
    )
    yield from decoder.decode(run)
    yield from decoder.finish()
