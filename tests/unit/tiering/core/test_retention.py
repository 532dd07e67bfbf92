"""Retention drops whole segments from the front, by Kafka's rules."""

from __future__ import annotations

import msgspec
import pytest
from support.segment_entries import entry_of

from stratalog_tiering.core.policy import TierPolicy
from stratalog_tiering.core.retention import expiry_reason
from stratalog_tiering.format.manifest import Reason, SegmentEntry


def entry(number: int, timestamp_ms: int = 1000) -> SegmentEntry:
    return entry_of(f"s{number}", number * 10, number * 10 + 10, max_timestamp_ms=timestamp_ms, created_at_ms=5000)


def drop(
    *entries: SegmentEntry, now_ms: int = 0, start: int = 0, hot_bytes: int = 0, days: int = -1, size: int = -1
) -> int | None:
    policy = TierPolicy(retention_ms=days, retention_bytes=size)
    total, end = sum(e.stored_bytes for e in entries) + hot_bytes, None
    for each in entries:
        if expiry_reason(each, policy, total_bytes=total, log_start_offset=start, now_ms=now_ms) is None:
            break
        total, end = total - each.stored_bytes, each.end_offset
    return end


def test_minus_one_disables_retention() -> None:
    assert drop(entry(0), entry(1), now_ms=10**15) is None


def test_age_counts_from_the_greatest_timestamp() -> None:
    old, young = entry(0, 1000), entry(1, 2000)
    assert drop(old, young, now_ms=1500, days=500) is None
    assert drop(old, young, now_ms=1501, days=500) == 10
    assert drop(old, young, now_ms=9999, days=500) == 20


def test_an_older_segment_after_a_younger_one_stays() -> None:
    assert drop(entry(0, 5000), entry(1, 1000), now_ms=4000, days=500) is None


def test_without_timestamps_age_counts_from_creation() -> None:
    assert drop(entry(0, -1), now_ms=5400, days=500) is None
    assert drop(entry(0, -1), now_ms=5501, days=500) == 10


def test_retention_by_size_keeps_at_least_the_configured_size() -> None:
    entries = [entry(n) for n in range(5)]
    assert drop(*entries, size=300) == 20
    assert drop(*entries, size=301) == 10
    assert drop(*entries, size=500) is None
    assert drop(*entries, size=300, hot_bytes=50) == 20
    assert drop(*entries, size=300, hot_bytes=100) == 30


@pytest.mark.parametrize(("start", "expected"), [(0, None), (9, None), (10, 10), (25, 20)])
def test_segments_below_the_log_start_are_removed(start: int, expected: int | None) -> None:
    assert drop(entry(0), entry(1), entry(2), start=start) == expected


def test_the_reason_names_the_rule() -> None:
    policy = TierPolicy(retention_ms=500, retention_bytes=300)
    reasons = [
        expiry_reason(entry(0, time), policy, total_bytes=total, log_start_offset=start, now_ms=2000)
        for time, total, start in ((1499, 100, 10), (1499, 100, 0), (1500, 400, 0), (1500, 399, 0))
    ]
    assert reasons == [Reason.LOG_START, Reason.RETENTION_MS, Reason.RETENTION_BYTES, None]


def test_segment_entries_can_grow() -> None:
    longer = msgspec.msgpack.encode([*msgspec.to_builtins(entry(0), builtin_types=(bytes,)), "a later member"])
    assert msgspec.msgpack.decode(longer, type=SegmentEntry) == entry(0)
