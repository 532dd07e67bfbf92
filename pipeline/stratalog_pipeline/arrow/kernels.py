"""Compiled kernels that convert one decompressed record-batch body to Arrow columns, in two passes.

``measure`` walks the body once, validates every record and notes where its fields are; ``gather`` then copies one field of all
those records into an Arrow column, so that unselected columns cost nothing. A record that exceeds the given room is left for
the next call: one body may fill many column sets, and many bodies one. Whatever the bytes are, no index leaves the body or the
columns: a checksum does not protect against a hostile writer. Malformed bytes end the walk with a code; the caller knows the
batch. Layout of a record: ``stratalog_core.batches.records``, the plain reference implementation.

Kernels take few arrays, and none inside a tuple, on purpose: numba counts a reference for each array taken out of a tuple,
which made one kernel with all columns in a tuple ten times slower. This module does not handle compression or batch headers,
and allocates nothing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from stratalog_core.compiled.jit import Bytes, Int, Ints32, Ints64, compiled, copy_bytes, inlined
from stratalog_core.compiled.varints import read_field, read_varint

DONE: Final = 0
"""The whole body was read."""
FULL: Final = 1
"""There is no room for the next record."""
BAD_LENGTH: Final = 2
BAD_RECORD: Final = 3
BAD_OFFSET: Final = 4
BAD_TIMESTAMP: Final = 5
TRAILING_BYTES: Final = 6

MESSAGES: Final = {
    BAD_LENGTH: "a record's length exceeds the batch",
    BAD_RECORD: "a record's fields do not fit its length",
    BAD_OFFSET: "a record's offset does not increase within the batch's range",
    BAD_TIMESTAMP: "a record's timestamp is beyond what microseconds in 64 bits can hold",
    TRAILING_BYTES: "bytes follow the last record",
}

# Indexes in a cursor: the next position in the body, and the totals measured since its rows were last gathered.
POSITION: Final = 0
RECORDS_READ: Final = 1
LAST_DELTA: Final = 2
ROWS: Final = 3
DATA_BYTES: Final = 4
HEADERS: Final = 5
CURSOR_PLACES: Final = 6

# Indexes in a row of spans. A length of -1 is a null.
KEY: Final = 0
VALUE: Final = 2
HEADERS_AT: Final = 4
OFFSET: Final = 5
TIMESTAMP_US: Final = 6
SPAN_PLACES: Final = 7
# Row width of header spans, in which KEY and VALUE mean the same.
HEADER_SPAN_PLACES: Final = 4

TIMESTAMP_MS_MAX: Final = (2**63 - 1) // 1000


class Frame(NamedTuple):
    """The batch's fields that the kernel needs, and the selected offsets.

    ``fixed_timestamp_ms`` is the broker's time, used if ``log_append_time`` is 1. Records outside ``first_offset`` (inclusive)
    to ``end_offset`` (exclusive) are validated and left out.
    """

    base_offset: int
    last_offset_delta: int
    record_count: int
    base_timestamp_ms: int
    fixed_timestamp_ms: int
    log_append_time: int
    first_offset: int
    end_offset: int


class Room(NamedTuple):
    """Limits of one call of ``measure``: rows, bytes of keys, values and headers together, and headers."""

    rows: int
    data_bytes: int
    headers: int


@inlined
def _within(value: Int, bound: Int) -> bool:
    """Return whether ``value`` is in -bound..bound. Two-sided because ``abs`` of the minimum integer is negative."""
    return bool(-bound <= value <= bound)


@inlined
def _timestamp_ms(frame: Frame, delta: Int) -> Int:
    """Return the time of a record; ``TIMESTAMP_MS_MAX + 1`` if the base or the delta is out of range."""
    if frame.log_append_time:
        return frame.fixed_timestamp_ms
    if not _within(frame.base_timestamp_ms, TIMESTAMP_MS_MAX) or not _within(delta, 2 * TIMESTAMP_MS_MAX):
        return np.int64(TIMESTAMP_MS_MAX + 1)
    return frame.base_timestamp_ms + delta


@inlined
def _measure_headers(body: Bytes, position: Int, end: Int) -> tuple[Int, Int, Int]:
    """Return ``(count, bytes of names and values, next position)``; past the end if the headers exceed their record."""
    count, position = read_varint(body, position, end)
    if count < 0 or count > end - position:
        return np.int64(0), np.int64(0), end + 1
    data_bytes = np.int64(0)
    for _ in range(2 * count):
        _, length, position = read_field(body, position, end)
        if position > end:
            break
        data_bytes += max(length, 0)
    return count, data_bytes, position


@compiled
def measure(body: Bytes, frame: Frame, room: Room, spans: Ints64, cursor: Ints64) -> Int:
    """Note the fields of further records in ``spans`` until the body's end, the end of room or a malformed record.

    Returns ``DONE``, ``FULL`` or one of the codes in ``MESSAGES``. ``room.rows`` must not exceed the rows of ``spans``.
    """
    position, records, last_delta = cursor[POSITION], cursor[RECORDS_READ], cursor[LAST_DELTA]
    rows, data_bytes, headers = cursor[ROWS], cursor[DATA_BYTES], cursor[HEADERS]
    code: Int = DONE
    while records < frame.record_count:
        length, start = read_varint(body, position, len(body))
        if length < 1 or length > len(body) - start:
            code = BAD_LENGTH
            break
        end = start + length
        timestamp_delta, next_field = read_varint(body, start + 1, end)
        offset_delta, next_field = read_varint(body, next_field, end)
        key_at, key_bytes, next_field = read_field(body, next_field, end)
        value_at, value_bytes, headers_at = read_field(body, next_field, end)
        header_count, header_bytes, next_field = _measure_headers(body, headers_at, end)
        timestamp_ms = _timestamp_ms(frame, timestamp_delta)
        code = _check(next_field != end, last_delta, offset_delta, frame.last_offset_delta, timestamp_ms)
        if code != DONE:
            break
        offset = frame.base_offset + offset_delta
        if frame.first_offset <= offset < frame.end_offset:
            record_bytes = max(key_bytes, 0) + max(value_bytes, 0) + header_bytes
            if rows >= room.rows or record_bytes > room.data_bytes - data_bytes or header_count > room.headers - headers:
                code = FULL
                break
            spans[rows, KEY], spans[rows, KEY + 1] = key_at, key_bytes
            spans[rows, VALUE], spans[rows, VALUE + 1] = value_at, value_bytes
            spans[rows, HEADERS_AT], spans[rows, OFFSET] = headers_at, offset
            spans[rows, TIMESTAMP_US] = timestamp_ms * 1000
            rows += 1
            data_bytes += record_bytes
            headers += header_count
        position, records, last_delta = end, records + 1, offset_delta
    if code == DONE and position != len(body):
        code = TRAILING_BYTES
    cursor[POSITION], cursor[RECORDS_READ], cursor[LAST_DELTA] = position, records, last_delta
    cursor[ROWS], cursor[DATA_BYTES], cursor[HEADERS] = rows, data_bytes, headers
    return code


@inlined
def _check(misfit: bool, last_delta: Int, offset_delta: Int, offset_delta_max: Int, timestamp_ms: Int) -> Int:
    if misfit:
        return BAD_RECORD
    if offset_delta <= last_delta or offset_delta > offset_delta_max:
        return BAD_OFFSET
    return DONE if _within(timestamp_ms, TIMESTAMP_MS_MAX) else BAD_TIMESTAMP


@compiled
def gather(body: Bytes, spans: Ints64, place: Int, rows: Int, first_row: Int, data: Bytes, ends: Ints32, valid: Bytes) -> bool:
    """Append one field of ``rows`` spans as rows ``first_row`` … of a variable-length column, whose bitmap must be zeroed.

    Returns False, having stopped, if ``data``, ``ends`` or ``valid`` is full (never after ``measure`` with the correct room).
    """
    used = np.int64(ends[first_row])
    for row in range(rows):
        at, length = spans[row, place], spans[row, place + 1]
        target = first_row + row
        if target + 1 >= len(ends) or (target >> 3) >= len(valid) or length > len(data) - used:
            return False
        if length >= 0:
            copy_bytes(data, used, body, at, length)
            used += length
            valid[target >> 3] |= np.uint8(1 << (target & 7))
        ends[target + 1] = used
    return True


@compiled
def gather_ints(spans: Ints64, place: Int, rows: Int, first_row: Int, column: Ints64) -> None:
    """Append one of the fixed-width fields ``OFFSET`` and ``TIMESTAMP_US`` to a column."""
    for row in range(min(rows, len(column) - first_row)):
        column[first_row + row] = spans[row, place]


@compiled
def list_headers(body: Bytes, spans: Ints64, rows: Int, first_row: Int, list_ends: Ints32, header_spans: Ints64) -> Int:
    """Note names and values of the headers of ``rows`` measured records. Returns the number of headers, or -1 if full.

    A missing name counts as an empty one. ``list_ends`` continues from its ``first_row``.
    """
    noted = np.int64(0)
    for row in range(rows):
        count, position = read_varint(body, spans[row, HEADERS_AT], len(body))
        if count > len(header_spans) - noted or first_row + row + 1 >= len(list_ends):
            return np.int64(-1)
        for _ in range(count):
            key_at, key_bytes, position = read_field(body, position, len(body))
            value_at, value_bytes, position = read_field(body, position, len(body))
            header_spans[noted, KEY], header_spans[noted, KEY + 1] = key_at, max(key_bytes, 0)
            header_spans[noted, VALUE], header_spans[noted, VALUE + 1] = value_at, value_bytes
            noted += 1
        list_ends[first_row + row + 1] = list_ends[first_row] + noted
    return noted


@compiled
def has_high_bits(data: Bytes, length: Int) -> bool:
    """Return whether any of the first ``length`` bytes is beyond ASCII."""
    gathered = np.uint8(0)
    for index in range(min(length, len(data))):
        gathered |= data[index]
    return bool(gathered >= 0x80)
