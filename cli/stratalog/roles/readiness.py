"""Checks that one role serves. Used by the role's own ``/readyz`` and by ``stratalog ready``.

A role serves when its port answers its protocol and the cluster knows it. A process that merely runs does not: it may still
recover its disk, wait for a quorum, or have lost its session. Each check returns what serves, or raises ``StratalogError``,
``TimeoutError`` or ``OSError``.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from stratalog_bookies.protocol import messages as bookie_messages
from stratalog_broker.configs.listeners import Listener
from stratalog_core.errors import Unavailable
from stratalog_core.ports import Transport
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import StatusAnswer, StatusRequest
from stratalog_metadata.records import Bookie, Broker, TieringWorker, bookie_key, broker_key

_API_VERSIONS: Final = struct.Struct(">ihhih")
_API_VERSIONS_KEY: Final = 18
_ANSWER: Final = struct.Struct(">iih")
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}

ReadRecord = Callable[[str, float], Awaitable[object]]
"""Reads a metadata record by key, linearizably, within a time in seconds. Returns None if there is none."""


async def check_metadata_node(transport: Transport, address: str, timeout_s: float) -> str:
    """Check that the node answers and knows the quorum's leader."""
    body = await transport.channel(address).call(messages.STATUS, (messages.encode(StatusRequest()),), timeout_s)
    status = messages.decode(body, StatusAnswer)
    if not status.leader:
        raise Unavailable(f"metadata node {status.node_id} knows no leader; start a majority of the metadata nodes")
    return f"metadata node {status.node_id} follows leader {status.leader}"


async def check_bookie(
    transport: Transport, address: str, bookie_id: str, read_record: ReadRecord, timeout_s: float
) -> str:  # fmt: skip
    """Check that the bookie has recovered its disks, answers, and has a session."""
    await transport.channel(address).call(bookie_messages.INFO, (), timeout_s)
    record = await read_record(bookie_key(bookie_id), timeout_s)
    if not isinstance(record, Bookie) or not record.session_id:
        raise Unavailable(f"bookie {bookie_id} has no session with the metadata quorum; see its log")
    return f"bookie {bookie_id} is registered"


async def check_broker(listeners: Sequence[Listener], broker_id: int, read_record: ReadRecord, timeout_s: float) -> str:
    """Check that every Kafka listener of the broker answers, and that the broker has a session and is not stopping."""
    for listener in listeners:
        await asyncio.wait_for(_ask_api_versions(listener), timeout_s)
    record = await read_record(broker_key(broker_id), timeout_s)
    if not isinstance(record, Broker):
        raise Unavailable(f"broker {broker_id} is not registered with the metadata quorum; see its log")
    if record.stopping:
        raise Unavailable(f"broker {broker_id} is stopping and is handing over its partitions")
    return f"broker {broker_id} is registered"


async def check_tiering_worker(worker_id: str, read_record: ReadRecord, timeout_s: float) -> str:
    """Check that the worker has a session."""
    record = await read_record(f"tiering_worker/{worker_id}", timeout_s)
    if not isinstance(record, TieringWorker):
        raise Unavailable(f"tiering worker {worker_id} is not registered with the metadata quorum; see its log")
    return f"tiering worker {worker_id} is registered"


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
        raise Unavailable(f"ApiVersions at {listener.address} failed with error {error} for correlation id {correlation}")
