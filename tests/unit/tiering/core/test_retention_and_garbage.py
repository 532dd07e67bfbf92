"""Retention takes whole segments from the front by Kafka's rules; garbage is only what is proved to be."""

from __future__ import annotations

import hashlib
from uuid import UUID

import msgspec
import pytest

from stratalog_tiering.core.garbage import manifest_garbage, orphans
from stratalog_tiering.core.policy import TierPolicy
from stratalog_tiering.core.retention import expiry_reason
from stratalog_tiering.format.manifest import Reason, SegmentEntry
from stratalog_tiering.format.object_keys import manifest_key, marker_key
from stratalog_tiering.store import ObjectInfo

TOPIC = UUID(int=1)
NOTHING: frozenset[str] = frozenset()
DIGEST = hashlib.sha256(b"").digest()


def entry(number: int, timestamp_ms: int = 1000) -> SegmentEntry:
    return SegmentEntry(
        key=f"s{number}", base_offset=number * 10, end_offset=number * 10 + 10, object_bytes=100, data_bytes=90,
        record_count=10, max_timestamp_ms=timestamp_ms, first_timestamp_min_ms=0, merkle_root=DIGEST, footer_sha256=DIGEST,
        leader_epochs=(), created_at_ms=5000,
    )  # fmt: skip


def drop(
    *entries: SegmentEntry, now_ms: int = 0, start: int = 0, hot_bytes: int = 0, days: int = -1, size: int = -1
) -> int | None:
    policy = TierPolicy(retention_ms=days, retention_bytes=size)
    total, end = sum(e.object_bytes for e in entries) + hot_bytes, None
    for each in entries:
        if expiry_reason(each, policy, total_bytes=total, log_start_offset=start, now_ms=now_ms) is None:
            break
        total, end = total - each.object_bytes, each.end_offset
    return end


def test_nothing_goes_for_ever_by_default_of_minus_one() -> None:
    assert drop(entry(0), entry(1), now_ms=10**15) is None


def test_age_counts_from_the_greatest_timestamp() -> None:
    old, young = entry(0, 1000), entry(1, 2000)
    assert drop(old, young, now_ms=1500, days=500) is None
    assert drop(old, young, now_ms=1501, days=500) == 10
    assert drop(old, young, now_ms=9999, days=500) == 20


def test_an_older_segment_behind_a_younger_one_waits() -> None:
    assert drop(entry(0, 5000), entry(1, 1000), now_ms=4000, days=500) is None


def test_without_timestamps_age_counts_from_creation() -> None:
    assert drop(entry(0, -1), now_ms=5400, days=500) is None
    assert drop(entry(0, -1), now_ms=5501, days=500) == 10


def test_size_keeps_at_least_what_was_asked_for() -> None:
    entries = [entry(n) for n in range(5)]
    assert drop(*entries, size=300) == 20
    assert drop(*entries, size=301) == 10
    assert drop(*entries, size=500) is None
    assert drop(*entries, size=300, hot_bytes=50) == 20
    assert drop(*entries, size=300, hot_bytes=100) == 30


@pytest.mark.parametrize(("start", "expected"), [(0, None), (9, None), (10, 10), (25, 20)])
def test_what_lies_below_the_start_goes(start: int, expected: int | None) -> None:
    assert drop(entry(0), entry(1), entry(2), start=start) == expected


def test_the_reason_names_the_rule() -> None:
    policy = TierPolicy(retention_ms=500, retention_bytes=300)
    reasons = [
        expiry_reason(entry(0, time), policy, total_bytes=total, log_start_offset=start, now_ms=2000)
        for time, total, start in ((1499, 100, 10), (1499, 100, 0), (1500, 400, 0), (1500, 399, 0))
    ]
    assert reasons == [Reason.LOG_START, Reason.RETENTION_MS, Reason.RETENTION_BYTES, None]


def info(key: str, written_ms: int) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=1, etag="", last_modified_ms=written_ms)


def test_orphans_are_old_and_unreferenced() -> None:
    listed = [info("a", 10), info("b", 10), info("c", 99)]
    assert orphans(listed, frozenset({"a"}), 50) == ["b"]


def test_superseded_versions_go_by_their_successors_age_and_losers_by_their_own() -> None:
    names = {version: manifest_key(TOPIC, 0, version, 1) for version in range(1, 5)}
    loser_old, loser_new = manifest_key(TOPIC, 0, 4, 2), manifest_key(TOPIC, 0, 5, 3)
    listed = [info(names[version], version * 100) for version in names]
    listed += [info(marker_key(names[version]), version * 100 + 1) for version in names]
    listed += [info(loser_old, 150), info(loser_new, 900)]
    garbage = manifest_garbage(listed, 4, names[4], NOTHING, 350)
    assert set(garbage) == {names[1], names[2], marker_key(names[1]), marker_key(names[2]), loser_old}
    assert garbage.index(marker_key(names[2])) > garbage.index(names[2])
    removed = frozenset({names[1], marker_key(names[2])})
    assert set(manifest_garbage(listed, 4, names[4], removed, 350)) == set(garbage) - removed
    assert names[4] not in manifest_garbage(listed, 4, names[4], NOTHING, 10**9)
    assert marker_key(names[4]) not in manifest_garbage(listed, 4, names[4], NOTHING, 10**9)


def test_a_version_whose_successor_is_not_listed_goes_by_the_next_one() -> None:
    """The successor is gone already, or it is so young that the listing does not show it yet."""
    first, loser, current = (manifest_key(TOPIC, 0, version, 1) for version in (1, 2, 9))
    listed = [info(first, 100), info(loser, 150), info(marker_key(current), 900)]
    assert manifest_garbage(listed, 9, current, NOTHING, 900) == []
    assert manifest_garbage(listed, 9, current, NOTHING, 901) == [loser, first]
    assert manifest_garbage(listed[:2], 9, current, NOTHING, 10**9) == []


def test_segment_entries_can_grow() -> None:
    longer = msgspec.msgpack.encode([*msgspec.to_builtins(entry(0), builtin_types=(bytes,)), "a later member"])
    assert msgspec.msgpack.decode(longer, type=SegmentEntry) == entry(0)
