"""Kafka's variable-length integers and fields in compiled code. Inlined into kernels; layouts: ``batches/records.py``."""

from __future__ import annotations

from typing import Final

import numpy as np

from stratalog_core.compiled.jit import Bytes, Int, inlined

VARINT_BYTES_MAX: Final = 10


@inlined
def read_varint(body: Bytes, position: Int, end: Int) -> tuple[Int, Int]:
    """Return ``(value, next position)`` of a zig-zag integer; the position is past ``end`` if the integer is cut off.

    A position past the end stays there in all later reads, so one check at the record's end is enough.
    """
    if position < end and body[position] < 0x80:
        small = np.int64(body[position])
        return (small >> 1) ^ -(small & 1), position + 1
    result = np.uint64(0)
    shift = np.uint64(0)
    for index in range(position, min(end, position + VARINT_BYTES_MAX)):
        byte = np.uint64(body[index])
        result |= (byte & np.uint64(0x7F)) << shift
        if byte < 0x80:
            if shift == 63 and byte > 1:
                break
            return np.int64(result >> np.uint64(1)) ^ -np.int64(result & np.uint64(1)), index + 1
        shift += np.uint64(7)
    return np.int64(0), end + 1


@inlined
def read_field(body: Bytes, position: Int, end: Int) -> tuple[Int, Int, Int]:
    """Return ``(position of its bytes, length, next position)`` of a nullable field; the last is past ``end`` on overrun."""
    length, start = read_varint(body, position, end)
    if length < 0:
        return start, np.int64(-1), start
    if length > end - start:
        return start, length, end + 1
    return start, length, start + length


@inlined
def varint_bytes(value: Int) -> Int:
    """The number of bytes of ``value`` as a zig-zag integer."""
    left = (value << 1) ^ (value >> 63)
    size = 1
    while left < 0 or left > 0x7F:
        left = (left >> 7) & 0x1FFFFFFFFFFFFFF
        size += 1
    return size


@inlined
def put_varint(out: Bytes, at: Int, value: Int) -> Int:
    """Write ``value`` as a zig-zag integer; returns the position after it."""
    left = (value << 1) ^ (value >> 63)
    while left < 0 or left > 0x7F:
        out[at] = (left & 0x7F) | 0x80
        left = (left >> 7) & 0x1FFFFFFFFFFFFFF
        at += 1
    out[at] = left
    return at + 1
