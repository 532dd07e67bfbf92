"""Fixtures of the tests that talk to metadata nodes over TCP."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from stratalog_core.rpc.tcp import TcpTransport


@pytest_asyncio.fixture
async def transport() -> AsyncIterator[TcpTransport]:
    transport = TcpTransport()
    yield transport
    await transport.close()
