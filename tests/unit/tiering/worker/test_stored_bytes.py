"""The bytes that history takes in the store, beside those that were produced: counted, all objects included."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

import pytest

from stratalog_core.batches.records import Record, build_batch
from stratalog_tiering.maintenance.merging import FAN_IN

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
KIB = 1024
DAY_MS = 86_400_000


def make_ledger(base_offset: int, batch_bytes: int, ledger_bytes: int) -> list[bytes]:
    """Batches of some ``batch_bytes`` with records of 1 KiB, which do not compress."""
    count = batch_bytes // KIB
    batches, offset, size = [], base_offset, 0
    while size < ledger_bytes:
        records = [Record(offset=offset + n, timestamp_ms=n, key=b"key-%d" % n, value=os.urandom(KIB)) for n in range(count)]
        batches.append(bytes(build_batch(records, leader_epoch=0)))
        offset, size = offset + count, size + len(batches[-1])
    return batches


def is_at(cluster: Cluster, offset: int) -> bool:
    pointer = cluster.pointer(0)
    return pointer is not None and pointer.end_offset == offset and not pointer.content


async def produce(cluster: Cluster, batch_bytes: int, ledger_bytes: int, ledgers: int) -> int:
    """Have ledgers offloaded; returns the bytes of their batches."""
    offset = produced = 0
    for _ in range(ledgers):
        batches = make_ledger(offset, batch_bytes, ledger_bytes)
        await cluster.add_ledger(batches, offset, partition=0)
        offset += len(batches) * (batch_bytes // KIB)
        produced += sum(map(len, batches))
        await cluster.until(partial(is_at, cluster, offset), 60)
    return produced


async def objects(cluster: Cluster, kind: str = "") -> list[int]:
    """Sizes of the bucket's objects of a kind, of all without one."""
    return [info.size_bytes async for info in cluster.store.list(kind)]


@pytest.mark.parametrize(
    ("batch_bytes", "ledger_bytes"),
    [(KIB, 512 * KIB), (16 * KIB, 256 * KIB), (128 * KIB, 1024 * KIB), (1024 * KIB, 4096 * KIB)],
)
async def test_stored_bytes_are_at_most_a_hundredth_more_than_was_produced(
    cluster: Cluster, batch_bytes: int, ledger_bytes: int
) -> None:
    """All objects count, the manifests that are superseded and stay for a day included."""
    await cluster.start_worker(
        block_bytes=KIB * KIB, sweep_interval_ms=DAY_MS, retention_interval_ms=DAY_MS, segment_bytes=ledger_bytes
    )
    produced = await produce(cluster, batch_bytes, ledger_bytes, 8)
    assert len(await objects(cluster, "segments/")) == 8
    assert produced < sum(await objects(cluster)) <= 1.01 * produced


async def test_small_segments_are_within_it_when_they_are_merged(cluster: Cluster) -> None:
    """What a merge replaced goes after the grace period, which is short here."""
    await cluster.start_worker(block_bytes=KIB * KIB, sweep_interval_ms=100, retention_interval_ms=50, grace_ms=200)
    produced = await produce(cluster, 4 * KIB, 32 * KIB, FAN_IN)
    async with asyncio.timeout(60):
        while len(sizes := await objects(cluster, "segments/")) > 1:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.05)
    assert produced < sum(sizes) <= 1.003 * produced
    async with asyncio.timeout(60):
        while sum(await objects(cluster)) > 1.02 * produced:  # noqa: ASYNC110 - superseded manifests go, too
            await asyncio.sleep(0.05)
