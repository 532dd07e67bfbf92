"""Readers of open ledgers: they read up to the LAC, wait for a greater one, and are told of fences, deletions and closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
from unit.bookies.bookie_cluster import PAYLOADS, SETTINGS, Cluster, eventually, run_cluster

from stratalog_bookies.client import LedgerClient
from stratalog_bookies.client.ledger_reads import LacNews
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import LedgerIds, LedgerTail, Status
from stratalog_core.errors import Overloaded, Unavailable
from stratalog_core.system import SystemClock
from stratalog_metadata.records import ledger_key
from stratalog_metadata.state.commands import Command, Delete


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with run_cluster(tmp_path) as made:
        for number in range(3):
            await made.start_bookie(f"b{number}", audit_delay_s=0.0, lac_waiters_max=2)
        yield made


async def test_a_reader_follows_an_open_ledger_to_its_end(cluster: Cluster) -> None:
    writer = await cluster.write(entries=0)
    reader = LedgerClient(cluster.metadata, cluster.transport, SystemClock(), Random(1), SETTINGS)
    ledger, seen = writer.ledger, list[bytes]()
    for payload in PAYLOADS[:10]:
        waiting = asyncio.create_task(reader.await_lac(ledger, len(seen) - 1, 60.0))
        writer.append(payload)
        news = await waiting
        assert not news.ended
        assert news.lac <= writer.lac, "nothing is told that is not confirmed"
        while len(seen) <= news.lac:
            found = await reader.read(ledger, len(seen), news.lac, 1 << 20)
            seen += [bytes(entry.payload) for entry in found]
    waiting = asyncio.create_task(reader.await_lac(ledger, 9, 60.0))
    closed = await cluster.client.recover([ledger.ledger_id])
    assert await waiting == LacNews(9, True)
    assert await reader.await_lac(closed[0], 3, 60.0) == LacNews(9, True)
    assert seen == PAYLOADS[:10]
    await reader.close()


async def test_a_wait_ends_by_itself_and_by_a_deletion(cluster: Cluster) -> None:
    writer = await cluster.write(entries=1)
    await eventually(lambda: writer.lac == 0)
    assert await cluster.client.await_lac(writer.ledger, 0, 0.05) == LacNews(0, False)
    waiting = asyncio.create_task(cluster.client.await_lac(writer.ledger, 0, 60.0))
    await asyncio.sleep(0)
    await cluster.metadata.propose(Command(updates=(Delete(key=ledger_key(writer.ledger.ledger_id)),)))
    await cluster.client.delete([writer.ledger.ledger_id])
    assert await waiting == LacNews(0, True)
    writer.abandon()


async def test_waiters_are_bounded_and_answered_at_the_end(cluster: Cluster) -> None:
    channel = cluster.transport.channel(cluster.bookies["b0"][0].address)
    body = [messages.encode(messages.AwaitLac(ledger_id=77, above=5, max_wait_ms=50_000))]
    waiting = [asyncio.create_task(channel.call(messages.AWAIT_LAC, body, 60.0)) for _ in range(2)]
    await channel.call(messages.INFO, [], 60.0)
    with pytest.raises(Overloaded, match="lac_waiters_max"):
        await channel.call(messages.AWAIT_LAC, body, 60.0)
    await channel.call(messages.FENCE, [messages.encode(LedgerIds(ledger_ids=(77,)))], 60.0)
    for answer in await asyncio.gather(*waiting):
        assert messages.decode(LedgerTail, answer) == LedgerTail(ledger_id=77, fenced=True)
    assert messages.decode(LedgerTail, await channel.call(messages.AWAIT_LAC, body, 60.0)).fenced


async def test_a_failed_bookie_is_passed_over(cluster: Cluster) -> None:
    writer = await cluster.write(entries=3)
    await eventually(lambda: writer.unconfirmed_bytes == 0)
    await eventually(lambda: writer.lac == 2)
    await cluster.stop_bookie("b0")
    for _ in range(3):
        assert (await cluster.client.await_lac(writer.ledger, 0, 60.0)).lac >= 1
    for name in ("b1", "b2"):
        disk = cluster.bookies[name][0]._disks[0]
        disk.core.fail("the disk failed")
    with pytest.raises(Unavailable, match=Status.STORAGE_FAILED.name):
        await cluster.client.await_lac(writer.ledger, 2, 60.0)
    writer.abandon()
