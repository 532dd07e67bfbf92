"""Column buffers of one Arrow record batch while kernels fill them.

Capacity is fixed by bounds on rows, bytes and headers; a single record that exceeds them gets buffers of its own size. Finished
buffers are passed to Arrow without a copy and never modified again. Columns that are not selected are never filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stratalog_core.compiled.jit import Bytes, Ints32, Ints64
from stratalog_pipeline.arrow import kernels
from stratalog_pipeline.arrow.kernels import Room
from stratalog_pipeline.arrow.schema import ARROW_TYPES, HEADER_TYPE, arrow_schema

UNBOUNDED: Final = 2**62


class VariableColumn:
    """A nullable column of byte strings: Arrow's offsets, bitmap and data."""

    def __init__(self, rows_max: int, data_bytes_max: int) -> None:
        self.ends = np.empty(rows_max + 1, np.int32)
        self.ends[0] = 0
        self.valid = np.zeros((rows_max + 7) // 8, np.uint8)
        self.data = np.empty(data_bytes_max, np.uint8)

    def append(self, body: Bytes, spans: Ints64, place: int, rows: int, first_row: int) -> None:
        assert kernels.gather(body, spans, place, rows, first_row, self.data, self.ends, self.valid), "room was measured"

    def to_arrow(self, rows: int, kind: pa.DataType) -> pa.Array:
        data = _buffer(self.data, int(self.ends[rows]))
        return pa.Array.from_buffers(kind, rows, [_buffer(self.valid, (rows + 7) // 8), _buffer(self.ends, rows + 1), data])


class HeaderColumn:
    """A list of (name, value) pairs per row; null for a record without headers, as in Spark's Kafka source."""

    def __init__(self, rows_max: int, data_bytes_max: int, headers_max: int) -> None:
        self.list_ends = np.empty(rows_max + 1, np.int32)
        self.list_ends[0] = 0
        self.names = VariableColumn(headers_max, data_bytes_max)
        self.values = VariableColumn(headers_max, data_bytes_max)

    def append(self, body: Bytes, spans: Ints64, rows: int, first_row: int, headers: int) -> None:
        first_header = int(self.list_ends[first_row])
        header_spans = np.empty((headers, kernels.HEADER_SPAN_PLACES), np.int64)
        noted = int(kernels.list_headers(body, spans, rows, first_row, self.list_ends, header_spans))
        assert noted == headers, "headers were measured"
        self.names.append(body, header_spans, kernels.KEY, noted, first_header)
        self.values.append(body, header_spans, kernels.VALUE, noted, first_header)

    def to_arrow(self, rows: int) -> pa.Array:
        count = int(self.list_ends[rows])
        pairs = pa.StructArray.from_arrays(
            [self._texts(count), self.values.to_arrow(count, pa.binary())], fields=list(HEADER_TYPE)
        )
        valid = np.packbits(self.list_ends[1 : rows + 1] > self.list_ends[:rows], bitorder="little")
        buffers = [pa.py_buffer(valid), _buffer(self.list_ends, rows + 1)]
        return pa.Array.from_buffers(ARROW_TYPES["headers"], rows, buffers, children=[pairs])

    def _texts(self, count: int) -> pa.Array:
        """Names as UTF-8; malformed bytes become U+FFFD, as they do in Kafka's own client."""
        texts = self.names.to_arrow(count, pa.string())
        if kernels.has_high_bits(self.names.data, int(self.names.ends[count])):
            try:
                texts.validate(full=True)
            except pa.ArrowInvalid:
                raw = self.names.to_arrow(count, pa.binary()).to_pylist()
                return pa.array([name.decode("utf-8", "replace") for name in raw], pa.string())
        return texts


class ColumnBuffers:
    """Buffers for one Arrow record batch, filled from measured records."""

    def __init__(self, columns: Sequence[str], bounds: Room) -> None:
        self._columns = columns
        self._bounds = bounds
        self._data_bytes = 0
        self._headers_used = 0
        self.rows = 0
        self._offsets = np.empty(bounds.rows, np.int64)
        self._timestamps_us = np.empty(bounds.rows, np.int64)
        self._timestamp_types = np.empty(bounds.rows, np.int32)
        self._fields = {
            place: VariableColumn(bounds.rows, bounds.data_bytes)
            for name, place in (("key", kernels.KEY), ("value", kernels.VALUE))
            if name in columns
        }
        wants_headers = "headers" in columns
        self._headers = HeaderColumn(bounds.rows, bounds.data_bytes, bounds.headers) if wants_headers else None

    @property
    def room(self) -> Room:
        """The remaining capacity. Bytes and headers are unbounded if no selected column needs them."""
        wants_data = bool(self._fields) or self._headers is not None
        return Room(
            rows=self._bounds.rows - self.rows,
            data_bytes=self._bounds.data_bytes - self._data_bytes if wants_data else UNBOUNDED,
            headers=self._bounds.headers - self._headers_used if self._headers is not None else UNBOUNDED,
        )

    def append(self, body: Bytes, spans: Ints64, cursor: Ints64, timestamp_type: int) -> None:
        """Append all rows that ``cursor`` has measured within ``room``."""
        first_row, rows = self.rows, int(cursor[kernels.ROWS])
        kernels.gather_ints(spans, kernels.OFFSET, rows, first_row, self._offsets)
        kernels.gather_ints(spans, kernels.TIMESTAMP_US, rows, first_row, self._timestamps_us)
        self._timestamp_types[first_row : first_row + rows] = timestamp_type
        for place, field in self._fields.items():
            field.append(body, spans, place, rows, first_row)
        if self._headers is not None:
            self._headers.append(body, spans, rows, first_row, int(cursor[kernels.HEADERS]))
        self.rows += rows
        self._data_bytes += int(cursor[kernels.DATA_BYTES])
        self._headers_used += int(cursor[kernels.HEADERS])

    def to_arrow(self, topic: str, partition: int) -> pa.RecordBatch:
        """Return the selected columns as Arrow, sharing these buffers. Nothing may be appended afterwards."""
        made = [self._column(name, topic, partition) for name in self._columns]
        return pa.RecordBatch.from_arrays(made, schema=arrow_schema(self._columns))

    def _column(self, name: str, topic: str, partition: int) -> pa.Array:
        if name == "headers":
            assert self._headers is not None
            return self._headers.to_arrow(self.rows)
        if name == "topic":
            return _repeated(topic.encode(), self.rows)
        if name in _PLACES:
            return self._fields[_PLACES[name]].to_arrow(self.rows, ARROW_TYPES[name])
        return _fixed(name, self._fixed_width(name, partition), self.rows)

    def _fixed_width(self, name: str, partition: int) -> npt.NDArray[Any]:
        if name == "partition":
            return np.full(self.rows, partition, np.int32)
        made: dict[str, npt.NDArray[Any]] = {
            "offset": self._offsets,
            "timestamp": self._timestamps_us,
            "timestampType": self._timestamp_types,
        }
        return made[name]


_PLACES: Final = {"key": kernels.KEY, "value": kernels.VALUE}


def _buffer(array: npt.NDArray[Any], length: int) -> pa.Buffer:
    return pa.py_buffer(array[:length])


def _fixed(name: str, array: npt.NDArray[Any], rows: int) -> pa.Array:
    return pa.Array.from_buffers(ARROW_TYPES[name], rows, [None, _buffer(array, rows)], 0)


def _repeated(text: bytes, rows: int) -> pa.Array:
    ends: Ints32 = np.arange(rows + 1, dtype=np.int32) * np.int32(len(text))
    data = np.tile(np.frombuffer(text, np.uint8), rows)
    return pa.Array.from_buffers(ARROW_TYPES["topic"], rows, [None, pa.py_buffer(ends), pa.py_buffer(data)], 0)
