"""Counts what a catch-up read costs: requests to bookies and tasks for each MB, not time. Each bound is today's count."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from unit.broker import mini_cluster as clusters
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster, until_all_served
from unit.broker.operation_tally import CountingTransport, Tally
from unit.broker.partitions.test_failover import create_topic
from unit.broker.raw_client import RawClient, batch, fetch, produce

from stratalog_broker.partitions.tail_cache import PartitionTail

pytestmark = pytest.mark.alone
BATCH = batch(b"x" * 300_000)
BATCHES = 14
"""4.2 MB: five fetches of up to 1 MB, three batches each."""


@pytest_asyncio.fixture
async def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[MiniCluster, RawClient, Tally]]:
    """A broker whose partition 0 has history, and the tally of what cluster and client do, all in one thread."""
    tally = Tally()
    monkeypatch.setattr(clusters, "TcpTransport", partial(CountingTransport, tally))
    with tally.hooked():
        async with run_cluster(tmp_path, lease_ms=30_000) as cluster:
            await in_thread(partial(create_topic, cluster, "topic", 1))
            await until_all_served(cluster)
            client = await cluster.connect()
            for _ in range(BATCHES):
                assert (await produce(client, "topic", BATCH)).error_code == 0
            yield cluster, client, tally


async def catch_up(cluster: MiniCluster, client: RawClient) -> None:
    """Read all of it, as if the broker had nothing of it in memory."""
    broker = cluster.broker
    log = broker.partitions.find_by_name(b"topic", 0)
    assert log is not None
    log.tail.clear()
    broker.pending_reads.runs.clear()
    offset = 0
    while offset < BATCHES:
        answer = await fetch(client, "topic", offset, max_wait_ms=10_000)
        assert answer.error_code == 0
        offset += len(answer.records) // len(BATCH)
    assert offset == BATCHES


async def test_catching_up_asks_bookies_for_large_pieces(counted: tuple[MiniCluster, RawClient, Tally]) -> None:
    cluster, client, tally = counted
    counts = await tally.of(partial(catch_up, cluster, client))
    assert counts["request 0x0202"] <= 3, "a read for each 2 MiB, not for each fetch"
    # A read and its answer at the bookie: two tasks each; one for the fetch that waits for the first of them.
    assert counts["create_task"] <= 3 * 2 + 2


async def test_the_tail_cache_is_asked_once_for_each_fetch(
    counted: tuple[MiniCluster, RawClient, Tally], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, client, _ = counted
    asked: list[int] = []
    read = PartitionTail.read

    def counting(self: PartitionTail, offset: int, end_offset: int, bytes_max: int) -> object:
        asked.append(offset)
        return read(self, offset, end_offset, bytes_max)

    monkeypatch.setattr(PartitionTail, "read", counting)
    await catch_up(cluster, client)
    assert asked == sorted(set(asked)), "each offset that a fetch wants, once"
