"""Compiled kernels over the records of one decompressed batch: locate them, read when they expire, copy some of them.

``locate`` notes where each record is, in a row of integers; the others take these rows and trust them. Whatever the bytes are,
no index leaves the body or the rows. The layout of a record: ``batches/records.py``. ``locate`` does not look at headers.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from stratalog_core.batches.record_expiry import DIGITS_MAX
from stratalog_core.compiled.jit import Bools, Bytes, Int, Ints64, compiled, copy_bytes, inlined
from stratalog_core.compiled.varints import put_varint, read_field, read_varint, varint_bytes

# Places in a row. The record is from START to END, its length included; a key of -1 bytes is none.
START: Final = 0
END: Final = 1
TIMESTAMP_DELTA: Final = 2
OFFSET_AT: Final = 3
OFFSET_DELTA: Final = 4
KEY_AT: Final = 5
KEY_BYTES: Final = 6
HAS_VALUE: Final = 7
PLACES: Final = 8

SOUND: Final = 0
BAD_LENGTH: Final = 1
BAD_RECORD: Final = 2
TRAILING_BYTES: Final = 3

NEVER: Final = -1
"""Expiry of a record that has none."""
NO_ROOM: Final = -1
HEAD_BYTES_MAX: Final = 16
"""Length, attributes and timestamp delta."""
_INT64_MAX: Final = 2**63 - 1


@compiled
def locate(body: Bytes, last_offset_delta: Int, records: Int, rows: Ints64) -> Int:
    """Note each of ``records`` records in ``rows``. Returns ``SOUND``, or why the body is not exactly these records."""
    position: Int = np.int64(0)
    earlier: Int = np.int64(-1)
    for row in range(records):
        length, start = read_varint(body, position, len(body))
        if row >= len(rows) or length < 1 or length > len(body) - start:
            return BAD_LENGTH
        end = start + length
        timestamp_delta, offset_at = read_varint(body, start + 1, end)
        offset_delta, next_field = read_varint(body, offset_at, end)
        key_at, key_bytes, next_field = read_field(body, next_field, end)
        _, value_bytes, next_field = read_field(body, next_field, end)
        if next_field > end or not earlier < offset_delta <= last_offset_delta:
            return BAD_RECORD
        rows[row, START], rows[row, END], rows[row, TIMESTAMP_DELTA] = position, end, timestamp_delta
        rows[row, OFFSET_AT], rows[row, OFFSET_DELTA] = offset_at, offset_delta
        rows[row, KEY_AT], rows[row, KEY_BYTES], rows[row, HAS_VALUE] = key_at, key_bytes, value_bytes >= 0
        position, earlier = end, offset_delta
    return SOUND if position == len(body) else TRAILING_BYTES


@inlined
def _is_same(body: Bytes, at: Int, length: Int, name: Bytes) -> bool:
    if length != len(name):
        return False
    is_same = True
    for index in range(length):
        is_same &= body[at + index] == name[index]
    return is_same


@inlined
def _number(body: Bytes, at: Int, length: Int) -> Int:
    """The decimal number that a field is, at most what 63 bits hold; ``NEVER`` if it is none."""
    if not 0 < length <= DIGITS_MAX:
        return np.int64(NEVER)
    number = np.uint64(0)
    for index in range(at, at + length):
        if not 48 <= body[index] <= 57:
            return np.int64(NEVER)
        number = number * np.uint64(10) + np.uint64(body[index] - 48)
    return np.int64(min(number, np.uint64(_INT64_MAX)))


@compiled
def read_expiry(body: Bytes, rows: Ints64, name: Bytes, expiry_ms: Ints64) -> None:
    """Write to ``expiry_ms`` the number in the last header ``name`` of each record.

    ``NEVER`` if that is no number, there is no such header, or the headers do not end with the record.
    """
    for row in range(min(len(rows), len(expiry_ms))):
        end: Int = rows[row, END]
        found: Int = np.int64(NEVER)
        _, position = read_varint(body, rows[row, OFFSET_AT], end)
        _, _, position = read_field(body, position, end)
        _, _, position = read_field(body, position, end)
        count, position = read_varint(body, position, end)
        if not 0 <= count <= end - position:
            count, position = np.int64(0), end + 1
        for _ in range(count):
            name_at, name_bytes, position = read_field(body, position, end)
            value_at, value_bytes, position = read_field(body, position, end)
            if position > end:
                break
            if _is_same(body, name_at, name_bytes, name):
                found = _number(body, value_at, value_bytes)
        expiry_ms[row] = found if position == end else np.int64(NEVER)


@compiled
def copy_records(body: Bytes, rows: Ints64, kept: Bools, out: Bytes) -> Int:
    """Copy the records of the ``kept`` rows to ``out``; returns their bytes, or ``NO_ROOM``."""
    at = np.int64(0)
    for row in range(min(len(rows), len(kept))):
        if kept[row]:
            length = rows[row, END] - rows[row, START]
            if length > len(out) - at:
                return np.int64(NO_ROOM)
            copy_bytes(out, at, body, rows[row, START], length)
            at += length
    return at


@compiled
def copy_moved(body: Bytes, rows: Ints64, kept: Bools, delta_ms: Int, out: Bytes) -> Int:
    """As :func:`copy_records`, with ``delta_ms`` added to each timestamp delta, and attributes of 0.

    Each record may become ``HEAD_BYTES_MAX`` longer.
    """
    at: Int = np.int64(0)
    for row in range(min(len(rows), len(kept))):
        if kept[row]:
            rest = rows[row, END] - rows[row, OFFSET_AT]
            if rest + HEAD_BYTES_MAX > len(out) - at:
                return np.int64(NO_ROOM)
            delta = rows[row, TIMESTAMP_DELTA] + delta_ms
            at = put_varint(out, at, 1 + varint_bytes(delta) + rest)
            out[at] = 0
            at = put_varint(out, at + 1, delta)
            copy_bytes(out, at, body, rows[row, OFFSET_AT], rest)
            at += rest
    return at
