"""Fixtures of the command line's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.embedded_quorum import EmbeddedQuorum, embedded_quorum

from stratalog_core.rpc.tcp import TcpTransport
from stratalog_metadata.records import CLUSTER_KEY


@pytest.fixture
async def quorum(tmp_path: Path) -> AsyncIterator[EmbeddedQuorum]:
    """A metadata quorum of one node that knows its cluster."""
    transport = TcpTransport()
    async with embedded_quorum(tmp_path / "metadata", transport) as made:
        changed = asyncio.Event()
        stop = made.client.view.subscribe(lambda changes: changed.set())
        while made.client.view.get(CLUSTER_KEY) is None:
            await changed.wait()
            changed.clear()
        stop()
        yield made
    await transport.close()
