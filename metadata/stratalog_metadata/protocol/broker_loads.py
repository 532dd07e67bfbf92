"""A broker's report of its load, sent with the renewals of its session. Not stored."""

from __future__ import annotations

from typing import Final

import msgspec

HEAVIEST_MAX: Final = 100


class PartitionLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes per second in and out of a partition; ``topic_id`` as sixteen bytes."""

    topic_id: bytes
    index: int
    bytes_per_s: int


class BrokerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A broker's total load, and that of its heaviest partitions (at most ``HEAVIEST_MAX``)."""

    broker_id: int
    partitions: int
    bytes_in_per_s: int
    bytes_out_per_s: int
    heaviest: list[PartitionLoad] = []
    unreadable_records: int = 0
    """Records of ``__consumer_offsets`` that the broker's coordinators skipped because they could not read them."""
