"""A broker's report of its load, sent with the renewals of its session. Not stored."""

from __future__ import annotations

from typing import Final

import msgspec

HEAVIEST_MAX: Final = 100


class PartitionLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes in and out; ``topic_id`` as sixteen bytes."""

    topic_id: bytes
    index: int
    bytes_per_s: int


class BrokerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker does on the whole, and in its heaviest partitions (``HEAVIEST_MAX`` at most)."""

    broker_id: int
    partitions: int
    bytes_in_per_s: int
    bytes_out_per_s: int
    heaviest: list[PartitionLoad] = []
    unreadable_records: int = 0
    """Records of ``__consumer_offsets`` that the broker's coordinators have skipped."""
