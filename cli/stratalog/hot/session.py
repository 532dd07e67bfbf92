"""One command's connection to the metadata quorum and to the bookies that it names."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from stratalog.tier.session import metadata_session
from stratalog_bookies.client import LedgerClient
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.quorum_client import QuorumClient


@asynccontextmanager
async def ledger_session(addresses: Sequence[str]) -> AsyncIterator[tuple[QuorumClient, LedgerClient]]:
    """Yield a metadata client and a ledger client. Raises ``Unavailable`` if no metadata node answers."""
    async with metadata_session(addresses) as metadata, ledger_client(metadata) as ledgers:
        yield metadata, ledgers


@asynccontextmanager
async def ledger_client(metadata: MetadataClient) -> AsyncIterator[LedgerClient]:
    """Yield a client of the bookies that metadata names."""
    transport = TcpTransport()
    ledgers = LedgerClient(metadata, transport, SystemClock(), random.Random())
    try:
        yield ledgers
    finally:
        await ledgers.close()
        await transport.close()
