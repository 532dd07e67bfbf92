"""Maps a group to its partition of ``__consumer_offsets``, and a transactional id to its of ``__transaction_state``.

Difference from Apache Kafka: the sign bit of Java's string hash is cleared, where Kafka takes the absolute value
(``Utils.abs``). Half of all groups have their records in another partition than on Kafka. Clients ask FindCoordinator, so none
depends on the partition; a change would hide the offsets that existing clusters have committed.
"""

from __future__ import annotations

import struct


def java_string_hash(text: str) -> int:
    """Return Java's ``String.hashCode``: over UTF-16 code units, as a signed 32-bit number."""
    encoded = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for (unit,) in struct.iter_unpack(">H", encoded):
        value = (31 * value + unit) & 0xFFFF_FFFF
    return value - (1 << 32) if value >> 31 else value


def partition_of(group_id: str, partition_count: int) -> int:
    """Return the coordinator partition of a group or transactional id."""
    return (java_string_hash(group_id) & 0x7FFF_FFFF) % partition_count
