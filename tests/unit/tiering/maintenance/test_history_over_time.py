"""Retention, merging and deletion over days and years of simulated time, by the functions that decide them in a worker."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.segment_entries import entry_of, leaves_of

from stratalog_tiering.core.policy import TierPolicy
from stratalog_tiering.core.retention import expiry_reason, newest_ms, oldest_ms
from stratalog_tiering.format.lookup import live_segments
from stratalog_tiering.format.manifest import (
    ManifestPage,
    PageRef,
    RemovedList,
    RemovedListRef,
    SegmentEntry,
    decode_page,
    decode_removed_list,
    empty_manifest,
)
from stratalog_tiering.format.manifest_edit import ManifestEdit, Previous, Removal
from stratalog_tiering.format.partition_tree import TreePage, decode_tree_page
from stratalog_tiering.maintenance.merging import FAN_IN, merge_limits, mergeable_run

pytestmark = pytest.mark.computes
TOPIC = UUID(int=0xAA)
SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
MIB = 2**20
SEGMENT_BYTES = 256 * MIB
DIGEST = hashlib.sha256(b"").digest()


class Partition:
    """Does a worker's work for a partition, on a dictionary instead of a store."""

    def __init__(self, policy: TierPolicy, *, segment_bytes: int = SEGMENT_BYTES, grace_ms: int = DAY_MS) -> None:
        counter = itertools.count(1)
        self._random_id: Callable[[], int] = lambda: next(counter)
        self.policy = policy
        self.segment_bytes = segment_bytes
        self.grace_ms = grace_ms
        self.previous = Previous(manifest=empty_manifest(TOPIC, "t", 0, 0))
        self.parts: dict[str, bytes] = {}
        self.objects: dict[str, int] = {}
        """Segments that are stored, live or removed, with their size."""
        self.offloaded_bytes = self.merged_bytes = self.root_bytes_max = self.commits = 0

    def _edit(self) -> ManifestEdit:
        return ManifestEdit(self.previous, writer="w", random_id=self._random_id)

    def _pages(self, refs: Sequence[PageRef]) -> dict[str, ManifestPage]:
        return {ref.key: decode_page(self.parts[ref.key], ref.sha256) for ref in refs}

    def _lists(self, refs: Sequence[RemovedListRef]) -> dict[str, RemovedList]:
        return {ref.key: decode_removed_list(self.parts[ref.key], ref.sha256) for ref in refs}

    def _tree(self, edit: ManifestEdit) -> dict[str, TreePage]:
        return {ref.key: decode_tree_page(self.parts[ref.key], ref.sha256) for ref in edit.tree_pages_to_merge()}

    def _commit(self, edit: ManifestEdit, now_ms: int) -> None:
        edit.move_to_pages(self._pages(edit.pages_to_merge()))
        new = edit.finish(created_at_ms=now_ms, lists=self._lists(edit.lists_to_merge()), tree_pages=self._tree(edit))
        self.parts.update(new.parts)
        self.previous = Previous(manifest=new.manifest, key=new.key, sha256=new.sha256)
        self.root_bytes_max = max(self.root_bytes_max, len(new.content))
        self.commits += 1

    def _entry(self, end: int, size: int, oldest: int, newest: int, **others: int) -> SegmentEntry:
        fields = {"base_offset": self.previous.manifest.end_offset, "created_at_ms": newest, **others}
        self.objects[key := f"s{self._random_id()}"] = size
        base = fields.pop("base_offset")
        fields.setdefault("leaf_count", 1)
        return entry_of(key, base, end, size, max_timestamp_ms=newest, first_timestamp_min_ms=oldest, **fields)

    def offload(self, *segments: tuple[int, int, int]) -> None:
        """Commit segments of so many bytes, each with the times of its oldest and its newest record."""
        edit = self._edit()
        for size, oldest, newest in segments:
            entry = self._entry(edit.end_offset + 10, size, oldest, newest, base_offset=edit.end_offset)
            edit.append(entry, leaves_of(entry))
            self.offloaded_bytes += size
        self._commit(edit, segments[-1][2])

    def live(self) -> list[SegmentEntry]:
        manifest = self.previous.manifest
        paged = (entry for ref in manifest.pages for entry in live_segments(manifest, self._pages([ref])[ref.key]))
        return [*paged, *manifest.segments]

    def keep_up(self, now_ms: int) -> None:
        """Apply retention and deletion, then merging, until nothing is left to do."""
        while self._retain(now_ms) or self._merge(now_ms):
            pass

    def _retain(self, now_ms: int) -> bool:
        edit, manifest = self._edit(), self.previous.manifest
        total, below = manifest.cold_bytes, manifest.start_offset
        oldest_page = self._pages(manifest.pages[:1]).values()
        for entry in [entry for page in oldest_page for entry in live_segments(manifest, page)] or manifest.segments:
            if expiry_reason(entry, self.policy, total_bytes=total, log_start_offset=0, now_ms=now_ms) is None:
                break
            total, below = total - entry.object_bytes, entry.end_offset
        edit.drop_below(below, lambda _: Removal(reason="expired"), self._pages(edit.pages_for_drop(below)))
        before_ms = now_ms - self.grace_ms
        gone = edit.forget_due(before_ms, 2000, self._lists(edit.lists_due(before_ms, 2000)))
        if not edit.is_changed:
            return False
        for key in gone:
            self.parts.pop(key, None)
            self.objects.pop(key, None)
        self._commit(edit, now_ms)
        return True

    def _merge(self, now_ms: int) -> bool:
        run = mergeable_run(self.previous.manifest.segments, merge_limits(self.policy, self.segment_bytes))
        if not run:
            return False
        size = sum(entry.object_bytes for entry in run)
        merged = self._entry(
            run[-1].end_offset, size, min(map(oldest_ms, run)), max(map(newest_ms, run)), base_offset=run[0].base_offset,
            created_at_ms=max(entry.created_at_ms for entry in run), merge_count=1 + max(entry.merge_count for entry in run),
            leaf_count=sum(entry.leaf_count for entry in run),
        )  # fmt: skip
        self.merged_bytes += size
        edit = self._edit()
        edit.replace(merged)
        self._commit(edit, now_ms)
        return True

    @property
    def write_amplification(self) -> float:
        return (self.offloaded_bytes + self.merged_bytes) / self.offloaded_bytes


@pytest.mark.parametrize("bytes_per_hour", [1_000, 1_000_000])
@pytest.mark.parametrize("retention_days", [7, -1])
def test_a_slow_partition_over_a_year(bytes_per_hour: int, retention_days: int) -> None:
    """Each byte is written three times at most, no record outlives retention by more than an eighth, segments are few."""
    retention_ms = retention_days * DAY_MS if retention_days > 0 else -1
    partition = Partition(TierPolicy(retention_ms=retention_ms))
    oldest_kept_ms = 0
    for hour in range(1, 365 * 24 + 1):
        now_ms = hour * HOUR_MS
        partition.offload((bytes_per_hour, now_ms - HOUR_MS, now_ms))
        partition.keep_up(now_ms)
        inline = partition.previous.manifest.segments
        oldest_kept_ms = max(oldest_kept_ms, now_ms - oldest_ms(inline[0]))
    assert partition.write_amplification <= 3
    assert len(partition.live()) <= 8 * FAN_IN
    if retention_ms > 0:
        assert retention_ms <= oldest_kept_ms <= retention_ms + max(HOUR_MS, retention_ms // 8)
    assert partition.root_bytes_max < 64_000
    assert sum(partition.objects.values()) <= 2.5 * partition.previous.manifest.cold_bytes


segment_shapes = st.lists(st.tuples(st.integers(1, 3_000), st.integers(0, 3 * HOUR_MS)), min_size=1, max_size=300)


@settings(max_examples=40)
@given(
    shapes=segment_shapes,
    retention_ms=st.sampled_from([-1, 2 * HOUR_MS, DAY_MS, 30 * DAY_MS]),
    retention_bytes=st.sampled_from([-1, 40_000]),
)
def test_no_merge_defeats_retention(shapes: list[tuple[int, int]], retention_ms: int, retention_bytes: int) -> None:
    policy = TierPolicy(retention_ms=retention_ms, retention_bytes=retention_bytes)
    partition = Partition(policy, segment_bytes=20_000)
    longest_ms, now_ms = HOUR_MS, 0
    for size, span_ms in shapes:
        now_ms += span_ms
        longest_ms = max(longest_ms, span_ms)
        partition.offload((size, now_ms - span_ms, now_ms))
        partition.keep_up(now_ms)
        live = partition.live()
        assert all(entry.created_at_ms == newest_ms(entry) for entry in live), "a merge renews no time"
        assert all(entry.merge_count <= 2 for entry in live)
        if retention_ms > 0 and live:
            assert now_ms - oldest_ms(live[0]) <= retention_ms + max(longest_ms, retention_ms // 8)
        if retention_bytes > 0:
            assert partition.previous.manifest.cold_bytes < retention_bytes + max(3_000, retention_bytes // 8)
    assert partition.write_amplification <= 3


def test_a_fast_partition_over_three_days() -> None:
    """50 MB/s with an hour of retention: live data and the manifest's root stay within their bounds."""
    second_bytes, hours = 50_000_000, 1
    partition = Partition(TierPolicy(retention_ms=hours * HOUR_MS), grace_ms=DAY_MS)
    target = second_bytes * 3600 * hours
    most_live = 0
    for minute in range(3, 3 * 24 * 60 + 1, 3):
        now_ms = minute * MINUTE_MS
        times = range(now_ms - 3 * MINUTE_MS, now_ms, 5 * SECOND_MS)
        partition.offload(*((5 * second_bytes, at, at + 5 * SECOND_MS) for at in times))
        commits = partition.commits
        partition.keep_up(now_ms)
        assert partition.commits - commits <= (2 if minute > 60 else 0), "no manifest without a change"
        most_live = max(most_live, partition.previous.manifest.cold_bytes)
    assert target <= most_live <= 1.1 * target
    assert partition.root_bytes_max < 64_000
    assert sum(partition.objects.values()) <= 1.1 * (target + second_bytes * 24 * 3600)
    tree_bytes = sum(len(content) for key, content in partition.parts.items() if key.startswith("tree/"))
    assert sum(map(len, partition.parts.values())) - tree_bytes < 10_000_000
    assert tree_bytes <= 100 * partition.previous.manifest.tree.size, "one leaf for each segment that was ever offloaded"
