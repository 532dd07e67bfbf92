"""A segment that is damaged in the store is written again from its hot copy, and only with the batches that were committed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stratalog_core.errors import Conflict, Corrupt, NotFound, Refused
from stratalog_core.system import SystemClock
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.bucket_scrub import BucketScrub
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.copies.hot_repair import HotLedgers
from stratalog_tiering.copies.repair import Repair, RepairedFrom, Repairer, RepairSources
from stratalog_tiering.format.manifest import Reason, SegmentEntry
from stratalog_tiering.format.object_keys import LEASES_PREFIX
from stratalog_tiering.offload.ports import worker_ports

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]
HOUR_MS = 3_600_000


async def offloaded(cluster: Cluster, make_batches: Batches, store_directory: Path) -> list[SegmentEntry]:
    """Three segments, whose hot copies stay."""
    for base in (0, 30, 60):
        await cluster.add_ledger(make_batches(base, [10, 10, 10]), base)
        worker = await cluster.start_worker(deletion_lag_ms=HOUR_MS, segment_bytes=1)
        await cluster.until(partial(is_stored, cluster, base + 30))
        await worker.close()
    return await segments(cluster)


def is_stored(cluster: Cluster, end_offset: int) -> bool:
    """Whether the version that ends there is in the store: until then the pointer has its content."""
    pointer = cluster.pointer()
    return pointer is not None and pointer.end_offset == end_offset and not pointer.content


async def segments(cluster: Cluster) -> list[SegmentEntry]:
    archive = Archive(cluster.store)
    manifest = await archive.manifest(cluster.pointer())
    return [entry async for entry in archive.segments(manifest)]


def hot(cluster: Cluster) -> HotLedgers:
    settings = TieringSettings(worker_id="repair", block_bytes=4096)
    ports = worker_ports(
        settings, cluster.metadata, cluster.store, cluster.ledgers, SystemClock(), random.Random(9), cluster.background
    )
    return HotLedgers(ports)


async def read_cold(cluster: Cluster) -> bytes:
    reader = ColdReader(cluster.store, ColdReaderSettings(), SystemClock())
    pieces = (await reader.fetch(cluster.pointer(), 0, 2**30, 60)).batches
    await reader.close()
    return b"".join(pieces)


async def unlimited(_: int) -> None:
    pass


async def test_a_missing_segment_is_written_again(cluster: Cluster, make_batches: Batches, store_directory: Path) -> None:
    before = await offloaded(cluster, make_batches, store_directory)
    content = await read_cold(cluster)
    (store_directory / before[1].key).unlink()
    scrub = BucketScrub(cluster.store, cluster.background, before_ms=0)
    limits = CopyLimits(background=cluster.background, clock=SystemClock(), take=unlimited)
    repairer = Repairer(scrub, cluster.store, RepairSources(hot=hot(cluster)), limits)
    (topic,) = (await scrub.inventory()).topics
    report, repairs = await repairer.partition(topic, 0)
    assert [found.key for found in report.findings] == [before[1].key]
    assert [*repairs.values()] == [Repair(source=RepairedFrom.HOT)]
    after = await segments(cluster)
    assert (after[0], after[2]) == (before[0], before[2])
    (old, new) = before[1], after[1]
    assert new.key != old.key
    kept = ("base_offset", "end_offset", "first_leaf", "leaf_count", "record_count", "created_at_ms", "leader_epochs")
    assert [getattr(new, name) for name in kept] == [getattr(old, name) for name in kept]
    assert await read_cold(cluster) == content
    manifest = await Archive(cluster.store).manifest(cluster.pointer())
    assert [(removed.key, removed.reason) for removed in manifest.removed][-1] == (old.key, Reason.REPAIRED)
    assert (await scrub.partition(topic, 0)).findings == ()


async def test_other_records_never_take_the_place_of_committed_ones(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    """Ledgers that hold as many records at the same offsets, but not the same: the partition's tree refuses them."""
    before = await offloaded(cluster, make_batches, store_directory)
    (store_directory / before[1].key).unlink()
    ledger = cluster.log().ledgers[1].ledger_id
    entries = cluster.ledgers.entries[ledger]
    cluster.ledgers.entries[ledger] = [entries[0], *make_batches(30, [10, 10, 10], epoch=1)]
    pointer = cluster.pointer()
    with pytest.raises(Corrupt, match="are not those of the partition's tree"):
        await hot(cluster).rewrite(cluster.topic.topic_id, 0, before[1].key)
    assert cluster.pointer() == pointer


async def test_a_segment_without_hot_copy_stays_as_it_is(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await cluster.start_worker()
    await cluster.until(lambda: not cluster.log().ledgers)
    (entry,) = await segments(cluster)
    pointer = cluster.pointer()
    with pytest.raises(NotFound, match=r"the bookies do not hold offsets 0\.\.9"):
        await hot(cluster).rewrite(cluster.topic.topic_id, 0, entry.key)
    with pytest.raises(NotFound, match="has no segment unknown"):
        await hot(cluster).rewrite(cluster.topic.topic_id, 0, "unknown")
    assert cluster.pointer() == pointer


async def test_a_commit_in_between_makes_the_repair_fail(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    before = await offloaded(cluster, make_batches, store_directory)
    (store_directory / before[1].key).unlink()
    await cluster.add_ledger(make_batches(90, [10]), 90)
    made = hot(cluster)
    uploads = 0

    async def commit() -> None:
        await cluster.start_worker(deletion_lag_ms=HOUR_MS, segment_bytes=1, sweep_interval_ms=HOUR_MS)
        await cluster.until(lambda: cluster.pointer().end_offset == 100)

    original = cluster.store.put

    async def put(key: str, *args: Any, **kwargs: Any) -> None:
        nonlocal uploads
        await original(key, *args, **kwargs)
        if key.startswith("segments/") and not uploads:
            uploads += 1
            await commit()

    cluster.store.put = put
    with pytest.raises(Conflict, match="has changed"):
        await made.rewrite(cluster.topic.topic_id, 0, before[1].key)
    assert cluster.pointer().end_offset == 100
    assert [entry.key for entry in await segments(cluster)][:3] == [entry.key for entry in before]


async def test_an_expired_lease_ends_one_repair_and_not_those_after_it(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    """The first repair gets no lease: what it writes may be swept before it is committed."""
    before = await offloaded(cluster, make_batches, store_directory)
    for entry in before[1:]:
        (store_directory / entry.key).unlink()
    refusals = [Refused("no leases")]

    def refuse_once(name: str, key: str) -> Refused | None:
        return refusals.pop() if refusals and name == "put" and key.startswith(LEASES_PREFIX) else None

    cluster.store.before = refuse_once
    scrub = BucketScrub(cluster.store, cluster.background, before_ms=0)
    limits = CopyLimits(background=cluster.background, clock=SystemClock(), take=unlimited)
    repairer = Repairer(scrub, cluster.store, RepairSources(hot=hot(cluster)), limits)
    (topic,) = (await scrub.inventory()).topics
    report, repairs = await repairer.partition(topic, 0)
    by_key = {found.key: repairs[found.kind, found.key] for found in report.findings}
    first, second = (by_key[entry.key] for entry in before[1:])
    assert first.source is None
    assert "the lease of the repair" in first.problem
    assert second == Repair(source=RepairedFrom.HOT)
