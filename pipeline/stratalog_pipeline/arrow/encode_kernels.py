"""Compiled kernels that write the records of a batch, and choose partitions as Java's client does.

The inverse of ``kernels.py``: ``write_records`` appends a run of rows to a record-batch body. The caller has made room for
``RECORD_BYTES_MAX`` and the fields of each row, and ``HEADER_BYTES_MAX`` and the fields of each header. Layout of a record:
``stratalog_core.batches.records``. The hash is MurmurHash2 with Kafka's seed (``org.apache.kafka.common.utils.Utils``).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from stratalog_core.compiled.jit import Bytes, Int, Ints32, Ints64, compiled, copy_bytes, inlined
from stratalog_core.compiled.varints import put_varint, varint_bytes

RECORD_BYTES_MAX: Final = 5 + 1 + 10 + 5 + 5 + 5 + 5
"""Length, attributes, timestamp and offset deltas, lengths of key and value, number of headers."""
HEADER_BYTES_MAX: Final = 5 + 5
_SEED: Final = 0x9747B28C
_MULTIPLIER: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF


@inlined
def _field_bytes(offsets: Ints32, valid: Bytes, row: Int) -> Int:
    """The size of a nullable field with its length."""
    if not valid[row]:
        return 1
    length: Int = np.int64(offsets[row + 1]) - offsets[row]
    return varint_bytes(length) + length


@inlined
def _put_field(out: Bytes, at: Int, offsets: Ints32, data: Bytes, valid: Bytes, row: Int) -> Int:
    if not valid[row]:
        out[at] = 1  # the length -1
        return at + 1
    length: Int = np.int64(offsets[row + 1]) - offsets[row]
    at = put_varint(out, at, length)
    copy_bytes(out, at, data, np.int64(offsets[row]), length)
    return at + length


@compiled
def write_records(
    out: Bytes,
    at: Int,
    first: int,
    last: int,
    times_ms: Ints64,
    key_offsets: Ints32,
    key_data: Bytes,
    key_valid: Bytes,
    value_offsets: Ints32,
    value_data: Bytes,
    value_valid: Bytes,
    header_rows: Ints32,
    name_offsets: Ints32,
    name_data: Bytes,
    name_valid: Bytes,
    content_offsets: Ints32,
    content_data: Bytes,
    content_valid: Bytes,
) -> Int:
    """Write rows ``first`` (inclusive) to ``last`` (exclusive) to ``out`` at position ``at``; return the position after them.

    The first row has delta 0. ``header_rows`` has for each row where its headers begin among all headers, and the end of the
    last row's; it is empty if no row has any.
    """
    has_headers = len(header_rows) > 0
    for row in range(first, last):
        time_delta, offset_delta = times_ms[row] - times_ms[first], row - first
        begin = np.int64(header_rows[row]) if has_headers else 0
        end = np.int64(header_rows[row + 1]) if has_headers else 0
        size = (
            1
            + varint_bytes(time_delta)
            + varint_bytes(offset_delta)
            + _field_bytes(key_offsets, key_valid, row)
            + _field_bytes(value_offsets, value_valid, row)
            + varint_bytes(end - begin)
        )
        for header in range(begin, end):
            size += _field_bytes(name_offsets, name_valid, header) + _field_bytes(content_offsets, content_valid, header)
        at = put_varint(out, at, size)
        out[at] = 0
        at = put_varint(out, at + 1, time_delta)
        at = put_varint(out, at, offset_delta)
        at = _put_field(out, at, key_offsets, key_data, key_valid, row)
        at = _put_field(out, at, value_offsets, value_data, value_valid, row)
        at = put_varint(out, at, end - begin)
        for header in range(begin, end):
            at = _put_field(out, at, name_offsets, name_data, name_valid, header)
            at = _put_field(out, at, content_offsets, content_data, content_valid, header)
    return at


@compiled
def hash_keys(offsets: Ints32, data: Bytes, count: int, out: Ints32) -> None:
    """Write to ``out`` the partition of each key among ``count``: its positive hash modulo ``count``."""
    for row in range(len(out)):
        begin, end = np.int64(offsets[row]), np.int64(offsets[row + 1])
        length = end - begin
        value = (_SEED ^ length) & _MASK
        at = begin
        while end - at >= 4:
            word = (
                np.int64(data[at])
                | (np.int64(data[at + 1]) << 8)
                | (np.int64(data[at + 2]) << 16)
                | (np.int64(data[at + 3]) << 24)
            )
            word = (word * _MULTIPLIER) & _MASK
            word ^= word >> 24
            word = (word * _MULTIPLIER) & _MASK
            value = ((value * _MULTIPLIER) & _MASK) ^ word
            at += 4
        left = end - at
        if left == 3:
            value ^= np.int64(data[at + 2]) << 16
        if left >= 2:
            value ^= np.int64(data[at + 1]) << 8
        if left >= 1:
            value ^= np.int64(data[at])
            value = (value * _MULTIPLIER) & _MASK
        value ^= value >> 13
        value = (value * _MULTIPLIER) & _MASK
        value ^= value >> 15
        out[row] = (value & 0x7FFFFFFF) % count
