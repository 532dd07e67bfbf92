"""Fixtures of the broker's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from unit.broker.mini_cluster import MiniCluster, run_cluster


@pytest_asyncio.fixture
async def mini_cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    """One metadata node, one bookie, one broker."""
    async with run_cluster(tmp_path) as cluster:
        yield cluster
