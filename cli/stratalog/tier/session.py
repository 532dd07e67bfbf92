"""One command's connection to the metadata quorum, and to the object store."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_tiering.store import STORE_THREADS, ObjectStore, open_store


@asynccontextmanager
async def metadata_session(addresses: Sequence[str]) -> AsyncIterator[QuorumClient]:
    """A client with its view loaded. Raises ``Unavailable`` if no node answers."""
    transport = TcpTransport()
    client = QuorumClient(addresses, transport, SystemClock(), random.Random())
    try:
        await client.start()
        yield client
    finally:
        await client.close()
        await transport.close()


@asynccontextmanager
async def store_session(url: str) -> AsyncIterator[ObjectStore]:
    """The store at ``url``."""
    background = ThreadBackground(STORE_THREADS, "store")
    try:
        store = open_store(url, background=background, clock=SystemClock(), random=random.Random())
        try:
            yield store
        finally:
            await store.close()
    finally:
        background.close()
