"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
from support.embedded_quorum import EmbeddedQuorum, embedded_quorum
from unit.metadata.watching import until

from stratalog_core.rpc.tcp import TcpTransport
from stratalog_metadata.records import CLUSTER_KEY

WAIT_S: Final = 60.0


@pytest.fixture
async def quorum(tmp_path: Path) -> AsyncIterator[EmbeddedQuorum]:
    """A metadata quorum of one node that knows its cluster."""
    transport = TcpTransport()
    async with embedded_quorum(tmp_path / "metadata", transport) as made:
        await until(made.client, lambda: made.client.view.get(CLUSTER_KEY) is not None, WAIT_S)
        yield made
    await transport.close()
