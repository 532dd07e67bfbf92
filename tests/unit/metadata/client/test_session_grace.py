"""Sessions with a grace, on real sockets: a lost connection ends the session of a dead process, not of a live one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.embedded_quorum import EmbeddedQuorum, embedded_quorum
from unit.metadata.watching import until

from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import session_key
from stratalog_metadata.state.commands import Command, ExpireSession

LONG_LEASE_MS = 120_000
GRACE_MS = 300
WAIT_S = 60.0
"""Far less than the lease: what happens within it did not wait for the lease's end."""


@asynccontextmanager
async def process(quorum: EmbeddedQuorum) -> AsyncIterator[tuple[QuorumClient, TcpTransport]]:
    """Return a client with its own connections."""
    transport = TcpTransport()
    client = QuorumClient(quorum.addresses, transport, SystemClock(), random.Random(5))
    await client.start()
    try:
        yield client, transport
    finally:
        await client.close()
        await transport.close()


def renewed_over_a_connection(quorum: EmbeddedQuorum, session_id: int) -> bool:
    """Return whether a leader has received a renewal over a connection. During an election there is none."""
    for server in quorum.servers:
        leadership = server._serving._leadership if server._serving is not None else None
        lease = leadership._controller._leases._leases.get(session_id) if leadership is not None else None
        if lease is not None and lease.carrier is not None:
            return True
    return False


async def until_renewed(quorum: EmbeddedQuorum, session_id: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while not renewed_over_a_connection(quorum, session_id):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("nodes", [1, 3])
async def test_a_lost_connection_reveals_a_dead_process(tmp_path: Path, transport: TcpTransport, nodes: int) -> None:
    async with embedded_quorum(tmp_path, transport, nodes=nodes) as quorum, process(quorum) as (living, _):
        await living.open_session("stays", LONG_LEASE_MS, lambda: None, GRACE_MS)
        async with process(quorum) as (dying, _):
            session_id = await dying.open_session("goes", LONG_LEASE_MS, lambda: None, GRACE_MS)
            await until_renewed(quorum, session_id)
        await until(living, lambda: living.view.get(session_key(session_id)) is None, WAIT_S)


async def test_a_session_is_renewed_over_the_next_connection(tmp_path: Path, transport: TcpTransport) -> None:
    lost: list[str] = []
    async with embedded_quorum(tmp_path, transport) as quorum, process(quorum) as (living, _):
        await living.open_session("other", LONG_LEASE_MS, lambda: None, GRACE_MS)
        async with process(quorum) as (flapping, wires):
            # A stall of the machine before the next connection must not use up the grace.
            session_id = await flapping.open_session("flaps", LONG_LEASE_MS, lambda: lost.append("it"), 60_000)
            for _ in range(20):
                await until_renewed(quorum, session_id)
                connection = wires.channel(quorum.addresses[0])._connection
                assert connection is not None
                broken = asyncio.Event()
                stop = wires.channel(quorum.addresses[0]).on_lost(broken.set)
                connection.abort()
                await broken.wait()
                stop()
                await flapping.refresh()
            await until_renewed(quorum, session_id)
            assert living.view.get(session_key(session_id)) is not None
            assert lost == []
            await flapping.close_session(session_id)


async def test_a_session_holder_learns_of_the_end_from_the_log(tmp_path: Path, transport: TcpTransport) -> None:
    """Without waiting for the next renewal."""
    over = asyncio.Event()
    async with embedded_quorum(tmp_path, transport) as quorum:
        session_id = await quorum.client.open_session("held", 4 * LONG_LEASE_MS, over.set, GRACE_MS)
        await until_renewed(quorum, session_id)
        async with process(quorum) as (other, _):
            await other.propose(Command(updates=(ExpireSession(session_id=session_id),)))
        async with asyncio.timeout(WAIT_S):
            await over.wait()


async def test_a_session_holder_that_reaches_no_node_stops_after_the_grace(tmp_path: Path, transport: TcpTransport) -> None:
    over = asyncio.Event()
    async with embedded_quorum(tmp_path, transport, nodes=3) as quorum:
        await quorum.client.open_session("alone", LONG_LEASE_MS, over.set, GRACE_MS)
        for server in quorum.servers:
            await server.close(hand_over=False)
        async with asyncio.timeout(WAIT_S):
            await over.wait()


async def test_a_change_of_leaders_ends_no_session(tmp_path: Path, transport: TcpTransport) -> None:
    lost: list[str] = []
    fast: dict[str, Any] = {"election_timeout_ms": 600, "heartbeat_ms": 50}
    async with embedded_quorum(tmp_path, transport, nodes=3, **fast) as quorum, process(quorum) as (other, _):
        await other.open_session("other", LONG_LEASE_MS, lambda: lost.append("other"), 50)
        session_id = await quorum.client.open_session("kept", LONG_LEASE_MS, lambda: lost.append("it"), 50)
        await until_renewed(quorum, session_id)
        leader = await quorum.leader()
        quorum.servers.remove(leader)
        await leader.close(hand_over=False)
        await quorum.client.refresh(WAIT_S)
        await until_renewed(quorum, session_id)
        assert quorum.client.view.get(session_key(session_id)) is not None
        assert lost == []
