"""Fetches while history is held back for producers: those of history alone wait for their turn, all others do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.broker.mini_cluster import MiniCluster, run_cluster
from unit.broker.raw_client import RawClient, batch, fetch, fetch_request, produce
from unit.broker.reads.test_cold_reads import create, make_cold

from stratalog_broker.reads.replay_pace import HELD_BYTES

VALUE = b"v" * 100_000
COUNT = 25


class Turns:
    """A pace with a limit. A turn lasts ``delay``."""

    limit = 1.0

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.taken = 0
        self.waiting: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self.sent_bytes = 0

    def close(self) -> None:
        pass

    def wait(self, begin: Callable[[], None]) -> None:
        self.taken += 1
        self.waiting[begin] = asyncio.get_running_loop().call_later(self.delay, begin)

    def leave(self, begin: Callable[[], None]) -> None:
        self.waiting.pop(begin).cancel()

    def sent(self, size: int) -> None:
        self.sent_bytes += size


def hold(cluster: MiniCluster, delay: float = 0.0) -> Turns:
    turns = Turns(delay)
    handle: Any = cluster.broker.apis.by_key[1].handle_raw
    object.__setattr__(handle.__self__, "pace", turns)  # it is frozen
    cluster.broker.pending_reads._pace = turns  # type: ignore[assignment]
    return turns


async def history(cluster: MiniCluster, client: RawClient) -> None:
    """A topic ``cold`` with 2.5 MB in the object store only, and ``hot`` with a record in memory."""
    await cluster.start_tiering()
    topic_id = await create(cluster, "cold")
    await create(cluster, "hot")
    for _ in range(COUNT):
        await produce(client, "cold", batch(VALUE))
    await make_cold(cluster, topic_id)
    await produce(client, "hot", batch(b"new"))


async def test_a_fetch_of_history_takes_turns_and_gets_a_limited_amount(tmp_path: Path) -> None:
    async with run_cluster(tmp_path) as cluster:
        client = await cluster.connect()
        await history(cluster, client)
        turns = hold(cluster, 0.2)
        read = 0
        while read < COUNT * len(VALUE):
            before, began = turns.taken, asyncio.get_running_loop().time()
            found = await fetch(client, "cold", read // len(VALUE), max_wait_ms=500, max_bytes=50_000_000)
            assert len(found.records) <= HELD_BYTES
            assert turns.taken == before + 1
            assert asyncio.get_running_loop().time() - began >= 0.2
            read += len(found.records) // len(VALUE) * len(VALUE)
        assert turns.sent_bytes > COUNT * len(VALUE)


async def test_newer_records_do_not_wait_neither_alone_nor_with_history(tmp_path: Path) -> None:
    async with run_cluster(tmp_path) as cluster:
        client = await cluster.connect()
        await history(cluster, client)
        turns = hold(cluster, 600.0)
        assert (await fetch(client, "hot", 0, max_wait_ms=500)).records
        hot, cold = fetch_request("hot", 0, max_wait_ms=500), fetch_request("cold", 0, max_wait_ms=500)
        answer = await client.call(1, 11, replace(hot, topics=(*hot.topics, *cold.topics)))
        assert [len(topic.partitions) for topic in answer.responses] == [1, 1]
        assert turns.taken == 0


async def test_a_fetch_at_the_end_of_history_does_not_take_a_turn(tmp_path: Path) -> None:
    async with run_cluster(tmp_path) as cluster:
        client = await cluster.connect()
        await history(cluster, client)
        turns = hold(cluster, 600.0)
        assert not (await fetch(client, "cold", COUNT, max_wait_ms=10)).records
        assert turns.taken == 0


@pytest.mark.parametrize("is_stopped", [False, True], ids=["client leaves", "broker stops"])
async def test_who_leaves_or_stops_does_not_wait_for_the_turn(tmp_path: Path, is_stopped: bool) -> None:
    async with run_cluster(tmp_path) as cluster:
        client = await cluster.connect()
        await history(cluster, client)
        turns = hold(cluster, 600.0)
        waiting = asyncio.ensure_future(fetch(client, "cold", 0, max_wait_ms=500))
        while not turns.taken:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)
        if is_stopped:
            async with asyncio.timeout(30):
                await cluster.brokers.pop(1).stop()
        else:
            await client.close()
            while len(cluster.broker.connections):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
