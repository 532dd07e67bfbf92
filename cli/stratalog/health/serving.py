"""Does one role of this machine serve? A probe for supervisors: cheap, and with the role's own configuration.

A role serves when its port answers its protocol and the cluster knows it. A process that merely runs does not: it may still
recover its disk, wait for a quorum, or have lost its session.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from stratalog.roles.node import NodeSettings
from stratalog.roles.runtime import Configuration
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.protocol import messages as bookie_messages
from stratalog_broker.config import BrokerSettings
from stratalog_broker.listeners import Listener, parse_listeners
from stratalog_core.errors import Invalid, Unavailable
from stratalog_core.ports import Transport
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.node.config import SECTION, MetadataSettings
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import StatusAnswer, StatusRequest
from stratalog_metadata.records import Bookie, Broker, TieringWorker, bookie_key, broker_key
from stratalog_tiering.config import TieringSettings

_API_VERSIONS: Final = struct.Struct(">ihhih")
_API_VERSIONS_KEY: Final = 18
_ANSWER: Final = struct.Struct(">iih")
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}

Probe = Callable[[Configuration, float], Coroutine[Any, Any, str]]


async def check_metadata_node(configuration: Configuration, timeout_s: float) -> str:
    """The node answers and knows the quorum's leader."""
    settings = configuration.section(MetadataSettings, SECTION)
    async with _transport() as transport:
        body = await transport.channel(settings.listen).call(
            messages.STATUS, (messages.encode(StatusRequest()),), timeout_s
        )  # fmt: skip
    status = messages.decode(body, StatusAnswer)
    if not status.leader:
        raise Unavailable(f"metadata node {status.node_id} knows no leader; start most of the metadata nodes")
    return f"metadata node {status.node_id} follows leader {status.leader}"


async def check_bookie(configuration: Configuration, timeout_s: float) -> str:
    """The bookie has recovered its disks, answers, and has a session."""
    settings = configuration.section(BookieSettings, "bookie")
    async with _transport() as transport:
        await transport.channel(settings.listen).call(bookie_messages.INFO, (), timeout_s)
        record = await _registered(configuration, transport, bookie_key(settings.bookie_id), timeout_s)
    if not isinstance(record, Bookie) or not record.session_id:
        raise Unavailable(f"bookie {settings.bookie_id} has no session with the metadata quorum; see its log")
    return f"bookie {settings.bookie_id} is registered"


async def check_broker(configuration: Configuration, timeout_s: float) -> str:
    """Every Kafka listener of the broker answers, and the broker has a session."""
    settings = configuration.section(BrokerSettings, "broker")
    for listener in parse_listeners(settings.listen, "listen"):
        await asyncio.wait_for(_ask_api_versions(listener), timeout_s)
    async with _transport() as transport:
        record = await _registered(configuration, transport, broker_key(settings.broker_id), timeout_s)
    if not isinstance(record, Broker) or record.stopping:
        raise Unavailable(f"broker {settings.broker_id} is not registered with the metadata quorum; see its log")
    return f"broker {settings.broker_id} is registered"


async def check_tiering_worker(configuration: Configuration, timeout_s: float) -> str:
    """The worker has a session."""
    worker_id = configuration.section(TieringSettings, "tiering").worker_id
    async with _transport() as transport:
        record = await _registered(configuration, transport, f"tiering_worker/{worker_id}", timeout_s)
    if not isinstance(record, TieringWorker):
        raise Unavailable(f"tiering worker {worker_id} is not registered with the metadata quorum; see its log")
    return f"tiering worker {worker_id} is registered"


PROBES: Final[dict[str, Probe]] = {
    "metadata": check_metadata_node,
    "bookie": check_bookie,
    "broker": check_broker,
    "tiering": check_tiering_worker,
}
"""By role."""


@asynccontextmanager
async def _transport() -> AsyncIterator[Transport]:
    transport = TcpTransport()
    try:
        yield transport
    finally:
        await transport.close()


async def _registered(configuration: Configuration, transport: Transport, key: str, timeout_s: float) -> object:
    """The record under ``key`` by a linearizable read; None if there is none."""
    addresses = configuration.section(NodeSettings, "node").metadata
    if not addresses:
        raise Invalid("[node] metadata is empty: name the metadata nodes, host:port each")
    client = QuorumClient(addresses, transport, SystemClock(), random.Random())
    try:
        (found,) = await client.read([key], timeout_s)
    finally:
        await client.close()
    return found.record if found is not None else None


async def _ask_api_versions(listener: Listener) -> None:
    """Send ApiVersions version 0 and wait for its response. Raises ``Unavailable``."""
    request = _API_VERSIONS.pack(_API_VERSIONS.size - 4, _API_VERSIONS_KEY, 0, 1, -1)
    try:
        reader, writer = await asyncio.open_connection(_WILDCARDS.get(listener.host, listener.host), listener.port)
        try:
            writer.write(request)
            _, correlation, error = _ANSWER.unpack(await reader.readexactly(_ANSWER.size))
        finally:
            writer.close()
    except (OSError, asyncio.IncompleteReadError) as failure:
        raise Unavailable(f"no Kafka broker answers at {listener.address}: {failure}") from failure
    if correlation != 1 or error:
        raise Unavailable(f"ApiVersions at {listener.address} answered error {error} to request {correlation}")
