"""A second copy that somebody empties, or replaces by an empty bucket, while a worker runs is made again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.directory_store import object_contents
from unit.tiering.worker.test_copying import counters, findings, is_copied, until
from unit.tiering.worker.test_second_copy_of_gone_topics import detach_after_another_version, until_last_version
from unit.tiering.worker.test_worker import Batches, Cluster

from stratalog_tiering.cold.archive import Archive, read_owner
from stratalog_tiering.store import ObjectStore


def empty(directory: Path) -> None:
    for key in object_contents(directory):
        (directory / key).unlink()


async def is_whole(cluster: Cluster, second: ObjectStore) -> bool:
    is_sound = await findings(second, cluster.background) == []
    return is_sound and await read_owner(second) == await read_owner(cluster.store)


async def test_a_partition_that_is_not_written_any_more_is_copied_again(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path
) -> None:
    worker = await cluster.start_worker(second=second, sweep_interval_ms=50)
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await until(lambda: is_copied(cluster, second_directory) and not cluster.pointer().content)
    for _ in range(2):
        empty(second_directory)
        await until(lambda: is_copied(cluster, second_directory) and counters(worker).lag_partitions == 0)
    await worker.close()
    assert await is_whole(cluster, second)


async def test_history_that_goes_on_is_copied_with_all_that_was_before_it(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path
) -> None:
    """The next commit comes before the next sweep."""
    worker = await cluster.start_worker(second=second, sweep_interval_ms=3_600_000)
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await cluster.until(lambda: not cluster.log().ledgers and not cluster.pointer().content)
    await until(lambda: is_copied(cluster, second_directory) and counters(worker).lag_partitions == 0)
    empty(second_directory)
    await cluster.add_ledger(make_batches(10, [10]), 10)
    await cluster.until(lambda: cluster.pointer().end_offset == 20)
    await until(lambda: is_copied(cluster, second_directory))
    await worker.close()
    assert await is_whole(cluster, second)


@pytest.mark.parametrize("copy_grace_ms", [0, 3_600_000])
async def test_a_detached_topic_is_copied_again(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path, copy_grace_ms: int
) -> None:
    worker = await cluster.start_worker(second=second, sweep_interval_ms=50, copy_grace_ms=copy_grace_ms)
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await until(lambda: is_copied(cluster, second_directory))
    last = await detach_after_another_version(cluster, make_batches)
    await until_last_version(second, last)
    empty(second_directory)
    async with asyncio.timeout(60):
        while not await Archive(second).topics():  # noqa: ASYNC110 - stores tell nobody
            await asyncio.sleep(0.02)
    await until_last_version(second, last)
    await worker.close()
    assert await is_whole(cluster, second)
