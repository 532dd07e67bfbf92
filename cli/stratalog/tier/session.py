"""A command's connections to the metadata quorum and to the object store, and its lease on the history that it reads."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from uuid import UUID

from stratalog.target import NoMetadata, note_unreachable
from stratalog_core.errors import Unavailable
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_tiering.cold.lease import DURATION_MS, HeldLease, held, holder_name
from stratalog_tiering.store import STORE_THREADS, ObjectStore, open_store


@asynccontextmanager
async def metadata_session(addresses: Sequence[str]) -> AsyncIterator[QuorumClient]:
    """A client with its view loaded. Raises ``NoMetadata`` if no node answers."""
    note_unreachable("metadata node", addresses)
    transport = TcpTransport()
    client = QuorumClient(addresses, transport, SystemClock(), random.Random())
    try:
        try:
            await client.start()
        except Unavailable as failure:
            raise NoMetadata(failure.message) from failure
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


@asynccontextmanager
async def reader_lease(store: ObjectStore, what: str, topic_ids: Sequence[UUID] = ()) -> AsyncIterator[None]:
    """Hold a lease: nothing of these topics (none: of the whole bucket) is deleted. Raises as ``held`` does."""
    clock = SystemClock()
    number = random.SystemRandom().getrandbits(64)
    async with held(HeldLease(store, clock, number, holder_name(what), topic_ids, DURATION_MS)):
        yield
