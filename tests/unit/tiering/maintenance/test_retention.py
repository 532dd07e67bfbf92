"""Retention by a running worker: cold and hot copies of a record count once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from unit.tiering.unreliable_metadata import UnreliableMetadata

from stratalog_core.errors import Refused, StratalogError
from stratalog_core.system import SystemClock
from stratalog_metadata.records import ManifestPointer
from stratalog_metadata.state.commands import Applied, Command, Put
from stratalog_tiering.format.manifest import decode_manifest
from stratalog_tiering.format.object_keys import segment_key
from stratalog_tiering.offload.commit import RENEWAL_SHARE
from stratalog_tiering.store import Locked

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]
RECORDS = 30
GRACE_MS = 2_000


async def test_kafka_20732_a_new_worker_counts_no_record_twice(cluster: Cluster, make_batches: Batches) -> None:
    """Hot copies remain besides the cold ones, a commit's answer is lost, another worker takes over: live data stays."""
    cluster.metadata = unreliable = UnreliableMetadata(cluster.metadata, [True])
    worker = await cluster.start_worker(deletion_lag_ms=3_600_000)
    for first in range(0, 4 * RECORDS, RECORDS):
        await add_ledger(cluster, make_batches, first)
    configs = {"retention.ms": "-1", "retention.bytes": str(cluster.pointer().cold_bytes // 4 * 7 // 2)}
    await cluster.metadata.propose(Command(updates=(Put(record=msgspec.structs.replace(cluster.topic, configs=configs)),)))
    await worker.close()
    assert cluster.pointer().start_offset == 0, "three segments are less than retention.bytes, so all four stay"
    await cluster.start_worker("worker-2", deletion_lag_ms=3_600_000)
    await add_ledger(cluster, make_batches, 4 * RECORDS)
    await cluster.until(lambda: cluster.log().log_start_offset > 0)
    assert (cluster.pointer().start_offset, cluster.log().log_start_offset) == (RECORDS, RECORDS), "only the oldest expired"
    await cluster.until(lambda: len(cluster.log().ledgers) == 4)
    assert unreliable.lost == 1


async def test_an_owner_that_keeps_opening_ledgers_does_not_delay_retention(cluster: Cluster, make_batches: Batches) -> None:
    """The log changes during each of the first commits that move its start: the same manifest is committed all the same."""
    real, interfered = cluster.metadata, 0

    async def interfere(command: Command, timeout_s: float = 10.0) -> Applied:
        nonlocal interfered
        first = command.updates[0]
        moves_start = isinstance(first, Put) and isinstance(first.record, ManifestPointer) and len(command.updates) == 2
        if moves_start and interfered < 3:
            interfered += 1
            await cluster.add_ledger(make_batches((1 + interfered) * RECORDS, [RECORDS]), (1 + interfered) * RECORDS)
        result: Applied = await real.propose(command, timeout_s)
        return result

    cluster.metadata = UnreliableMetadata(real, [])
    cluster.metadata.propose = interfere
    worker = await cluster.start_worker(deletion_lag_ms=3_600_000)
    await expire_half(cluster, make_batches)
    await worker.close()
    assert interfered == 3
    assert not [key for name, key in cluster.store.calls if name == "delete" and key.startswith("manifests/")]


async def test_a_manifest_that_is_late_is_made_anew_so_that_the_grace_period_begins_at_its_commit(
    cluster: Cluster, make_batches: Batches
) -> None:
    """Objects are deleted a grace period after the time in the manifest that removed them, so that time must not be old."""
    real = cluster.metadata
    proposed: list[str] = []

    async def interfere(command: Command, timeout_s: float = 10.0) -> Applied:
        first = command.updates[0]
        if isinstance(first, Put) and isinstance(first.record, ManifestPointer) and len(command.updates) == 2:
            proposed.append(first.record.sha256)
            if len(proposed) == 1:
                await cluster.add_ledger(make_batches(2 * RECORDS, [RECORDS]), 2 * RECORDS)
                await asyncio.sleep(2 * GRACE_MS * RENEWAL_SHARE / 1000)
        result: Applied = await real.propose(command, timeout_s)
        return result

    cluster.metadata = UnreliableMetadata(real, [])
    cluster.metadata.propose = interfere
    worker = await cluster.start_worker(deletion_lag_ms=3_600_000, grace_ms=GRACE_MS)
    await expire_half(cluster, make_batches)
    await worker.close()
    assert proposed.count(proposed[0]) == 1
    assert cluster.pointer().sha256 != proposed[0]


async def test_expired_segments_stay_until_their_removal_is_committed(cluster: Cluster, make_batches: Batches) -> None:
    """With a grace period of 0 too: the commit can be refused, and then the committed version still refers to them."""
    real = cluster.metadata
    missing: list[str] = []
    dated: list[tuple[set[int], int]] = []

    async def look(command: Command, timeout_s: float = 10.0) -> Applied:
        first = command.updates[0]
        if isinstance(first, Put) and isinstance(first.record, ManifestPointer) and len(command.updates) == 2:
            committed = decode_manifest(await cluster.store.get(cluster.pointer().object_key))
            missing.extend([each.key for each in committed.segments if ("delete", each.key) in cluster.store.calls])
            removing = decode_manifest(first.record.content)
            dated.append(({each.removed_at_ms for each in removing.removed}, removing.created_at_ms))
        result: Applied = await real.propose(command, timeout_s)
        return result

    cluster.metadata = UnreliableMetadata(real, [])
    cluster.metadata.propose = look
    worker = await cluster.start_worker(deletion_lag_ms=3_600_000, grace_ms=0)
    await expire_half(cluster, make_batches)
    await worker.close()
    assert missing == []
    removed_at_ms, created_at_ms = dated[0]
    assert removed_at_ms == {created_at_ms}, "the grace period begins when the version that removes them is made"


@pytest.mark.parametrize("failure", [Locked, Refused])
async def test_retention_goes_on_while_the_store_keeps_an_object(
    cluster: Cluster, make_batches: Batches, failure: type[StratalogError]
) -> None:
    """As under a legal hold, or a retention policy of the bucket, or if its policy allows no deletion: no worker locked it."""
    if failure is Locked:
        cluster.store.held = lambda key: key.startswith("segments/")
    else:
        cluster.store.before = lambda name, key: failure("held") if (name, key[:4]) == ("delete", "segm") else None
    await cluster.start_worker(grace_ms=0)
    await expire_half(cluster, make_batches)
    await cluster.until(lambda: "held" in cluster.last_error())
    await add_ledger(cluster, make_batches, 2 * RECORDS)
    await cluster.until(lambda: cluster.log().log_start_offset == 2 * RECORDS)
    await cluster.until(lambda: "held" in cluster.last_error())
    assert len([info async for info in cluster.store.list("segments/")]) == 3
    cluster.store.held, cluster.store.before = (lambda key: False), (lambda name, key: None)
    async with asyncio.timeout(60):
        while len([info async for info in cluster.store.list("segments/")]) > 1:  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.02)
    await cluster.until(lambda: cluster.last_error() == "")


async def test_offloading_goes_on_while_maintenance_fails_each_time(cluster: Cluster, make_batches: Batches) -> None:
    """Both tasks are due again sooner than the worker pauses after failures."""
    refusals = 0

    def refuse_deletions(name: str, key: str) -> StratalogError | None:
        nonlocal refusals
        refusals += name == "delete"
        return Refused("no deletions") if name == "delete" else None

    cluster.store.before = refuse_deletions
    await cluster.start_worker(grace_ms=0, retention_interval_ms=20, sweep_interval_ms=20, retry_ms_max=200)
    await expire_half(cluster, make_batches)
    async with asyncio.timeout(60):
        while refusals < 8:  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.02)
    for first in (2 * RECORDS, 3 * RECORDS):
        await add_ledger(cluster, make_batches, first)
        await cluster.until(lambda first=first: cluster.log().log_start_offset == first)


async def test_an_object_under_a_hold_keeps_no_other(cluster: Cluster, make_batches: Batches) -> None:
    """The first of the segments that expire, and the first of two orphans."""
    held, other = (segment_key(cluster.topic.topic_id, 0, 0, 0, number) for number in (1, 2))
    cluster.store.held = lambda key: key == held
    for orphan in (held, other):
        await cluster.store.put(orphan, [b"left by a worker that died"])
    await cluster.start_worker(grace_ms=0, deletes_per_s=3, sweep_interval_ms=100, retention_interval_ms=100, segment_bytes=1)
    for first in (0, RECORDS, 2 * RECORDS):
        await add_ledger(cluster, make_batches, first)
    listed = [info.key async for info in cluster.store.list("segments/")]
    kept, *_, newest = [key for key in listed if key not in (held, other)]
    cluster.store.held = lambda key: key in (kept, held)
    configs = {"retention.ms": "-1", "retention.bytes": "1"}
    await cluster.metadata.propose(Command(updates=(Put(record=msgspec.structs.replace(cluster.topic, configs=configs)),)))
    await only_left(cluster, {kept, held, newest})
    cluster.store.held = lambda key: False
    await only_left(cluster, {newest})


async def only_left(cluster: Cluster, segments: set[str]) -> None:
    async with asyncio.timeout(120):
        while {info.key async for info in cluster.store.list("segments/")} != segments:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)


async def expire_half(cluster: Cluster, make_batches: Batches) -> None:
    """Offload two ledgers, let retention keep the bytes of one, and wait until the log's start has moved."""
    await add_ledger(cluster, make_batches, 0)
    await add_ledger(cluster, make_batches, RECORDS)
    configs = {"retention.ms": "-1", "retention.bytes": str(cluster.pointer().cold_bytes // 2)}
    await cluster.metadata.propose(Command(updates=(Put(record=msgspec.structs.replace(cluster.topic, configs=configs)),)))
    await cluster.until(lambda: cluster.log().log_start_offset > 0)


async def add_ledger(cluster: Cluster, make_batches: Batches, first: int) -> None:
    """Seal a ledger and wait until it is cold as well."""
    now_ms = SystemClock().wall_ms()
    await cluster.add_ledger(make_batches(first, [RECORDS], timestamps=[now_ms] * RECORDS), first)
    await cluster.until(lambda: (p := cluster.pointer()) is not None and p.end_offset == first + RECORDS)
