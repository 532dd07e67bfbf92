"""Small neighbours are merged into one segment; readers see the same records before and after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.segment_entries import entry_of

from stratalog_core.batches.checkpoint import Checkpoint, ProducerEntry, SequencedBatch
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.cold.verifier import Verifier
from stratalog_tiering.core.policy import TierPolicy
from stratalog_tiering.format.manifest import Reason, SegmentEntry
from stratalog_tiering.maintenance.merging import FAN_IN, MergeLimits, merge_limits, mergeable_run

Cluster = Any
Batches = Callable[..., list[bytes]]


def segments(*sizes: int, merges: int = 0, apart_ms: int = 1) -> list[SegmentEntry]:
    return [
        entry_of(
            f"s{index}", index * 2, index * 2 + 2, size, max_timestamp_ms=index * apart_ms,
            first_timestamp_min_ms=index * apart_ms, merge_count=merges,
        )
        for index, size in enumerate(sizes)
    ]  # fmt: skip


LIMITS = MergeLimits(segment_bytes=1600)


@pytest.mark.parametrize(
    ("sizes", "run"),
    [
        ([10] * (FAN_IN - 1), (0, 0)),
        ([10] * FAN_IN, (0, FAN_IN)),
        ([900, *[10] * FAN_IN, 900], (1, 1 + FAN_IN)),
        ([10, 900, *[10] * FAN_IN], (2, 2 + FAN_IN)),
        ([100] * 20, (0, FAN_IN)),
        ([101] * 20, (0, 0)),
    ],
)
def test_runs_of_small_segments_are_found(sizes: list[int], run: tuple[int, int]) -> None:
    found = segments(*sizes)
    assert mergeable_run(found, LIMITS) == tuple(found[run[0] : run[1]])


def test_a_segment_is_merged_at_most_twice() -> None:
    for merges, expected in ((0, FAN_IN), (1, FAN_IN), (2, 0)):
        assert len(mergeable_run(segments(*[10] * 20, merges=merges), LIMITS)) == expected


def test_segments_between_merged_ones_are_included_and_newer_ones_are_not() -> None:
    kinds = [0, *[1] * 8, 0, 0, *[1] * 8, *[0] * 4]
    mixed = [
        msgspec.structs.replace(entry, merge_count=merges)
        for entry, merges in zip(segments(*[10] * len(kinds)), kinds, strict=True)
    ]
    assert mergeable_run(mixed, LIMITS) == tuple(mixed[:-4])


def test_no_run_spans_more_time_than_retention_allows() -> None:
    minutes = segments(*[10] * 40, apart_ms=60_000)
    day = TierPolicy(retention_ms=24 * 3_600_000, segment_ms=60_000)
    assert len(mergeable_run(minutes, merge_limits(day, 1600))) == FAN_IN
    assert mergeable_run(minutes, MergeLimits(segment_bytes=1600, span_ms=(FAN_IN - 1) * 60_000 - 1)) == ()
    short = TierPolicy(retention_ms=100 * 60_000, segment_ms=60_000)
    assert mergeable_run(minutes, merge_limits(short, 1600)) == (), "an eighth of it is 12.5 minutes"
    assert mergeable_run(minutes, merge_limits(TierPolicy(retention_ms=-1, retention_bytes=1000), 1600)) == ()


async def test_the_worker_merges_and_nothing_changes_for_readers(
    cluster: Cluster, make_batches: Batches, background: ThreadBackground, store_directory: Path
) -> None:
    await cluster.start_worker("worker-1", segment_bytes=1)
    written: list[bytes] = []
    producer = ProducerEntry(9, 1, (SequencedBatch(0, 0, 1, 5),), 3)
    for base in range(0, FAN_IN * 2, 2):
        written += make_batches(base, [2], epoch=base)
        checkpoint = Checkpoint(offset=base, producers=(producer,) if base else ())
        await cluster.add_ledger(written[-1:], base, leader_epoch=base, checkpoint=checkpoint)
    await cluster.until(lambda: not cluster.log().ledgers)
    assert len(list(all_segments(store_directory))) == FAN_IN
    await cluster.close()
    version = cluster.pointer().manifest_version
    before = (await ManifestSource(cluster.store).manifest(cluster.pointer())).segments
    await cluster.start_worker("worker-2")
    await cluster.until(lambda: cluster.pointer().manifest_version > version)
    pointer = cluster.pointer()
    manifest = await ManifestSource(cluster.store).manifest(pointer)
    assert [(entry.base_offset, entry.end_offset) for entry in manifest.segments] == [(0, FAN_IN * 2)]
    assert manifest.segments[0].created_at_ms == max(entry.created_at_ms for entry in before)
    assert manifest.segments[0].merge_count == 1
    assert [(removed.key, removed.reason, removed.object_bytes) for removed in manifest.removed] == [
        (entry.key, Reason.MERGED, entry.object_bytes) for entry in before
    ]
    reader = ColdReader(cluster.store, ColdReaderSettings(), SystemClock())
    assert b"".join((await reader.fetch(pointer, 0, 10**6, 10)).batches) == b"".join(written)
    assert await reader.leader_epochs(pointer) == [(base, base) for base in range(0, FAN_IN * 2, 2)]
    assert await reader.producer_snapshot(pointer) == (producer,)
    await reader.close()
    assert (await Verifier(cluster.store, background).partition("flights", pointer)).findings == ()


def all_segments(directory: Path) -> list[Path]:
    return list(directory.glob("segments/*/*/*"))
