"""Behind ``stratalog ready``: checks from outside that a role on this machine serves, by the role's own configuration."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from stratalog.roles import readiness
from stratalog.roles.node import NodeSettings
from stratalog.roles.readiness import ReadRecord
from stratalog.roles.runtime import Configuration
from stratalog_bookies.config import BookieSettings
from stratalog_broker.configs.listeners import parse_listeners
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_core.errors import Invalid
from stratalog_core.ports import Transport
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.node.config import SECTION, MetadataSettings
from stratalog_tiering.config import TieringSettings

Probe = Callable[[Configuration, float], Coroutine[Any, Any, str]]


async def probe_metadata_node(configuration: Configuration, timeout_s: float) -> str:
    settings = configuration.section(MetadataSettings, SECTION)
    async with _transport() as transport:
        return await readiness.check_metadata_node(transport, settings.listen, timeout_s)


async def probe_bookie(configuration: Configuration, timeout_s: float) -> str:
    settings = configuration.section(BookieSettings, "bookie")
    async with _transport() as transport:
        read = _record_reader(configuration, transport)
        return await readiness.check_bookie(transport, settings.listen, settings.bookie_id, read, timeout_s)


async def probe_broker(configuration: Configuration, timeout_s: float) -> str:
    settings = configuration.section(BrokerSettings, "broker")
    listeners = parse_listeners(settings.listen, "listen")
    async with _transport() as transport:
        return await readiness.check_broker(listeners, settings.broker_id, _record_reader(configuration, transport), timeout_s)


async def probe_tiering_worker(configuration: Configuration, timeout_s: float) -> str:
    worker_id = configuration.section(TieringSettings, "tiering").worker_id
    async with _transport() as transport:
        return await readiness.check_tiering_worker(worker_id, _record_reader(configuration, transport), timeout_s)


PROBES: Final[dict[str, Probe]] = {
    "metadata": probe_metadata_node,
    "bookie": probe_bookie,
    "broker": probe_broker,
    "tiering": probe_tiering_worker,
}
"""By role."""


@asynccontextmanager
async def _transport() -> AsyncIterator[Transport]:
    transport = TcpTransport()
    try:
        yield transport
    finally:
        await transport.close()


def _record_reader(configuration: Configuration, transport: Transport) -> ReadRecord:
    """Return a function that reads a record from the quorum of ``[node] metadata``. Raises ``Invalid`` if that is empty."""
    addresses = configuration.section(NodeSettings, "node").metadata
    if not addresses:
        raise Invalid("[node] metadata is empty: list the metadata nodes as HOST:PORT")

    async def read(key: str, timeout_s: float) -> object:
        client = QuorumClient(addresses, transport, SystemClock(), random.Random())
        try:
            (found,) = await client.read([key], timeout_s)
        finally:
            await client.close()
        return found.record if found is not None else None

    return read
