"""Which partition of ``__consumer_offsets`` a group belongs to: Java's string hash, as Kafka's own coordinators use it."""

from __future__ import annotations

import struct


def java_string_hash(text: str) -> int:
    """``String.hashCode``: over UTF-16 code units, modulo 2**32, as a signed number."""
    encoded = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for (unit,) in struct.iter_unpack(">H", encoded):
        value = (31 * value + unit) & 0xFFFF_FFFF
    return value - (1 << 32) if value >> 31 else value


def partition_of(group_id: str, partition_count: int) -> int:
    """The coordinator partition of a group (the sign bit is cleared, not negated)."""
    return (java_string_hash(group_id) & 0x7FFF_FFFF) % partition_count
