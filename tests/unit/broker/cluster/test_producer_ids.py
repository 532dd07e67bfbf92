"""Producer ids are allocated once: by brokers whose clocks differ, and after metadata was restored from an old copy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.embedded_quorum import embedded_quorum

from stratalog_broker.cluster.producer_ids import BLOCK, IDS_PER_S, ProducerIds
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import PRODUCER_IDS, Counter
from stratalog_metadata.state.commands import Command, Put


class WallClock:
    """A clock that is set by hand."""

    def __init__(self, now_s: int) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        return 0.0

    def wall_ms(self) -> int:
        return self.now_s * 1000 + 999


@asynccontextmanager
async def quorum(path: Path, counter: int = 0) -> AsyncIterator[MetadataClient]:
    """A quorum whose counter of producer ids is at ``counter``."""
    transport = TcpTransport()
    async with embedded_quorum(path, transport) as running:
        await running.client.propose(Command(updates=(Put(record=Counter(name=PRODUCER_IDS, next_value=counter)),)))
        yield running.client
    await transport.close()


@pytest.mark.parametrize("counter", [0, BLOCK, 77 * IDS_PER_S])
async def test_ids_that_were_allocated_after_the_copy_are_not_allocated_again(tmp_path: Path, counter: int) -> None:
    async with quorum(tmp_path / "lost", counter) as metadata:
        lost = ProducerIds(metadata, WallClock(100))
        known = {await lost.take() for _ in range(3 * BLOCK)}
    async with quorum(tmp_path / "restored", counter) as metadata:
        restored = ProducerIds(metadata, WallClock(101))
        assert known.isdisjoint({await restored.take() for _ in range(3 * BLOCK)})


async def test_brokers_whose_clocks_differ_and_go_back_get_different_ids(tmp_path: Path) -> None:
    async with quorum(tmp_path) as metadata:
        clocks = [WallClock(now_s) for now_s in (100, 100, 90, 110)]
        brokers = [ProducerIds(metadata, clock) for clock in clocks]
        ids: list[int] = []
        for now_s in (100, 105, 50):
            for _ in range(BLOCK // 2 + 1):
                ids += await asyncio.gather(*(broker.take() for broker in brokers))
            for clock in clocks:
                clock.now_s = now_s
        assert len(set(ids)) == len(ids)
        assert min(ids) >= 90 * IDS_PER_S


async def test_a_counter_beyond_the_clock_goes_on(tmp_path: Path) -> None:
    """The clock was ahead once, or a restore from the bucket has raised the counter."""
    ahead = 2**50
    async with quorum(tmp_path, ahead) as metadata:
        ids = ProducerIds(metadata, WallClock(100))
        assert [await ids.take() for _ in range(2 * BLOCK)] == list(range(ahead, ahead + 2 * BLOCK))
