"""When a pass is due, where it begins and ends, and which segments it joins."""

from __future__ import annotations

import msgspec
import pytest
from support.segment_entries import entry_of

from stratalog_tiering.core.compaction_plan import cleanable, next_group
from stratalog_tiering.core.policy import CompactionPolicy, tier_policy
from stratalog_tiering.format.manifest import PresentBatches, SegmentEntry, SegmentOptions

NOW_MS = 1_000_000
EVERYTHING = 1 << 60


def segment(index: int, object_bytes: int = 100, *, age_ms: int = 5_000, clean: bool = False, **options: int) -> SegmentEntry:
    """The segment of offsets ``10 * index`` and so on; ``age_ms`` is that of its only record."""
    base, at_ms = 10 * index, NOW_MS - age_ms
    present = PresentBatches(base_offset=base, end_offset=base + 10, batch_count=1) if clean else None
    return entry_of(
        f"s{index}", base, base + 10, object_bytes, max_timestamp_ms=at_ms, min_timestamp_ms=at_ms,
        options=msgspec.structs.replace(SegmentOptions(present=present), **options),
    )  # fmt: skip


def test_what_was_compacted_is_clean_and_the_rest_is_dirty() -> None:
    segments = [segment(0, 300, clean=True), segment(1, 50, clean=True), segment(2, 350), segment(3, 50)]
    found = cleanable(segments, CompactionPolicy(), EVERYTHING, NOW_MS)
    assert (found.dirty_from, found.end_offset, found.clean_bytes, found.dirty_bytes) == (20, 40, 350, 400)
    assert found.due_at_ms == NOW_MS, "more than half is dirty"
    less = cleanable(segments[:3], CompactionPolicy(), EVERYTHING, NOW_MS)
    assert (less.dirty_ratio, less.due_at_ms) == (0.5, None), "the ratio must be exceeded, as in Kafka"


def test_a_segment_that_the_map_did_not_reach_to_its_end_is_dirty_from_there() -> None:
    segments = [segment(0, clean=True), segment(1, clean=True, dirty_from=13), segment(2)]
    found = cleanable(segments, CompactionPolicy(), EVERYTHING, NOW_MS)
    assert (found.dirty_from, found.end_offset, found.dirty_bytes) == (13, 30, 200)


def test_nothing_is_due_without_dirty_segments() -> None:
    for segments in ([], [segment(0, clean=True)]):
        found = cleanable(segments, CompactionPolicy(dirty_ratio_min=0, lag_ms_max=1), EVERYTHING, NOW_MS)
        assert found.dirty_from == found.end_offset
        assert found.due_at_ms is None


@pytest.mark.parametrize(
    ("segments", "hot_offset", "end", "due"),
    [
        ([segment(0), segment(1)], 15, 10, NOW_MS),
        ([segment(0), segment(1, age_ms=400), segment(2)], EVERYTHING, 10, NOW_MS),
        ([segment(0, age_ms=400), segment(1)], EVERYTHING, 0, NOW_MS + 600),
        ([segment(0, lock_until_ms=NOW_MS + 7), segment(1)], EVERYTHING, 0, NOW_MS + 7),
        ([segment(0, clean=True, age_ms=400), segment(1)], EVERYTHING, 20, None),
    ],
    ids=["hot", "young", "all young", "locked", "clean and young"],
)
def test_a_pass_ends_before_what_must_not_be_compacted(
    segments: list[SegmentEntry], hot_offset: int, end: int, due: int | None
) -> None:
    found = cleanable(segments, CompactionPolicy(lag_ms_min=1_000), hot_offset, NOW_MS)
    assert (found.end_offset, found.due_at_ms) == (end, due)


def test_without_a_lag_records_with_timestamps_ahead_of_the_clock_are_compacted() -> None:
    segments = [segment(0), segment(1, age_ms=-3_600_000), segment(2)]
    found = cleanable(segments, CompactionPolicy(), EVERYTHING, NOW_MS)
    assert (found.end_offset, found.due_at_ms) == (30, NOW_MS)


def test_the_age_of_the_oldest_dirty_record_makes_a_pass_due() -> None:
    segments = [segment(0, 1_000, clean=True, age_ms=90_000), segment(1, age_ms=5_000), segment(2, age_ms=1_000)]
    found = cleanable(segments, CompactionPolicy(lag_ms_max=7_000), EVERYTHING, NOW_MS)
    assert found.due_at_ms == NOW_MS + 2_001


def test_groups_are_as_large_as_a_segment_may_be() -> None:
    segments = [segment(0, 40), segment(1, 40), segment(2, 40), segment(3, 500), segment(4, 1)]
    groups, position = [], 0
    while group := next_group(segments, position, 45, 100, None):
        groups.append(len(group))
        position = group[-1].end_offset
    assert groups == [2, 1, 1, 1]
    assert next_group(segments, 20, 30, 1_000, None) == (segments[2],)
    assert next_group(segments, 20, 31, 1_000, None) == (segments[2], segments[3])
    assert next_group(segments, 50, 60, 100, None) == ()


def test_no_group_spans_more_time_than_retention_allows() -> None:
    segments = [segment(0, age_ms=9_000), segment(1, age_ms=8_000), segment(2, age_ms=6_000)]
    assert len(next_group(segments, 0, 30, 1_000, 2_000)) == 2


def test_the_policy_is_that_of_the_configs() -> None:
    assert tier_policy({}).compaction is None
    compacted = tier_policy({"cleanup.policy": "compact", "retention.ms": "5", "retention.bytes": "5"})
    assert compacted.compaction == CompactionPolicy(
        delete_retention_ms=86_400_000, lag_ms_min=0, lag_ms_max=None, dirty_ratio_min=0.5
    )
    assert (compacted.retention_ms, compacted.retention_bytes, compacted.segment_span_ms) == (-1, -1, None)
    both = tier_policy(
        {
            "cleanup.policy": "compact, delete", "retention.ms": "5", "delete.retention.ms": "1", "min.compaction.lag.ms": "2",
            "max.compaction.lag.ms": "3", "min.cleanable.dirty.ratio": "0.25",
        }
    )  # fmt: skip
    assert both.compaction == CompactionPolicy(delete_retention_ms=1, lag_ms_min=2, lag_ms_max=3, dirty_ratio_min=0.25)
    assert both.retention_ms == 5
