"""Locates the records of a batch without decoding them, for compaction and erasure.

Compiled (``record_kernels.py``), because it runs for each record of a compacted topic: 0.03 us for a record, where
:func:`iterate_records` takes 4. Importing this module loads numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from stratalog_core.batches import record_kernels as kernels
from stratalog_core.batches.batch import HEADER_BYTES, LOCATED_RECORDS_MAX, BatchHeader
from stratalog_core.batches.compression import NONE, decompress
from stratalog_core.batches.records import decode_varint
from stratalog_core.compiled.jit import Bools, Bytes, Ints64
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer

_RECORD_BYTES_MIN: Final = 6
"""Length, attributes, two deltas, and the lengths of key and value take at least one byte each."""
_REASONS: Final = {
    kernels.BAD_LENGTH: "a record exceeds its batch, or is missing",
    kernels.BAD_RECORD: "a record is malformed",
    kernels.TRAILING_BYTES: "bytes follow the last record",
}


@dataclass(frozen=True)
class RecordSpans:
    """The records of a batch: its decompressed ``body``, and for each record a row of positions in it (``record_kernels``)."""

    body: bytes
    rows: Ints64

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def content(self) -> Bytes:
        """The body as an array."""
        return np.frombuffer(self.body, np.uint8)

    @property
    def offset_deltas(self) -> Ints64:
        return self.rows[:, kernels.OFFSET_DELTA]

    @property
    def have_keys(self) -> Bools:
        found: Bools = self.rows[:, kernels.KEY_BYTES] >= 0
        return found

    @property
    def have_values(self) -> Bools:
        """False for tombstones."""
        found: Bools = self.rows[:, kernels.HAS_VALUE] != 0
        return found

    def key(self, row: int) -> bytes | None:
        start, length = int(self.rows[row, kernels.KEY_AT]), int(self.rows[row, kernels.KEY_BYTES])
        return self.body[start : start + length] if length >= 0 else None

    def keys(self) -> list[bytes | None]:
        """The key of each record."""
        return [self.key(row) for row in range(len(self.rows))]

    def expiry_ms(self, header_name: bytes) -> Ints64:
        """The wall time at which each record expires by the header (``record_expiry.py``); ``kernels.NEVER`` if it does not."""
        found = np.full(len(self.rows), kernels.NEVER, np.int64)
        if header_name in self.body:
            kernels.read_expiry(self.content, self.rows, np.frombuffer(header_name, np.uint8), found)
        return found

    def headers(self, row: int) -> list[tuple[bytes, bytes | None]]:
        """Names and values of a record's headers. Raises ``Corrupt`` unless they end with the record."""
        record_end = int(self.rows[row, kernels.END])
        _, position = decode_varint(self.body, int(self.rows[row, kernels.OFFSET_AT]))
        fields: list[bytes | None] = []
        left = 2  # key and value, then a name and a value for each header
        while left:
            length, position = decode_varint(self.body, position)
            end = position + max(length, 0)
            if end > record_end:
                raise Corrupt(f"a field of {length} bytes exceeds its record")
            fields.append(self.body[position:end] if length >= 0 else None)
            position, left = end, left - 1
            if len(fields) == 2:
                count, position = decode_varint(self.body, position)
                if not 0 <= count <= record_end - position:
                    raise Corrupt(f"record claims {count} headers in {record_end - position} bytes")
                left = 2 * count
        if position != record_end:
            raise Corrupt(f"record ends at byte {position} instead of {record_end}")
        return [(name or b"", content) for name, content in zip(fields[2::2], fields[3::2], strict=True)]


def batch_body(batch: Buffer, header: BatchHeader) -> bytes:
    """The batch's records, decompressed. Raises ``Corrupt``, also if they are more than ``LOCATED_RECORDS_MAX``."""
    if header.record_count > LOCATED_RECORDS_MAX:
        raise Corrupt(
            f"batch at offset {header.base_offset} has {header.record_count} records; at most {LOCATED_RECORDS_MAX} are located"
        )
    packed = memoryview(batch)[HEADER_BYTES : header.size_bytes]
    return bytes(packed) if header.compression == NONE else decompress(header.compression, packed)


def record_spans(body: bytes, header: BatchHeader) -> RecordSpans:
    """The spans of a batch's records, in order. Raises ``Corrupt`` unless they are exactly its records."""
    records = max(0, header.record_count)
    rows = np.empty((min(records, len(body) // _RECORD_BYTES_MIN), kernels.PLACES), np.int64)
    found = RecordSpans(body, rows)
    code = int(kernels.locate(found.content, header.last_offset_delta, records, rows))
    if code != kernels.SOUND:
        raise Corrupt(f"batch at offset {header.base_offset}: {_REASONS[code]}")
    return found
