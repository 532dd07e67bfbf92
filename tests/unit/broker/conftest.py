"""Fixtures of the broker's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster, until_served
from unit.broker.partitions.test_failover import create_topic
from unit.broker.raw_client import RawClient
from unit.broker.transactional import partition_of

FLIGHTS = "flights"


@pytest_asyncio.fixture
async def mini_cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    """One metadata node, one bookie, one broker."""
    async with run_cluster(tmp_path) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def flights(mini_cluster: MiniCluster) -> MiniCluster:
    """``mini_cluster`` with the topic ``flights``, whose only partition is served."""
    await in_thread(lambda: create_topic(mini_cluster, FLIGHTS, 1))
    await until_served(mini_cluster.broker, partition_of(mini_cluster, FLIGHTS).topic_id)
    return mini_cluster


@pytest_asyncio.fixture
async def client(flights: MiniCluster) -> RawClient:
    """Connected to the broker of ``flights``."""
    return await flights.connect()
