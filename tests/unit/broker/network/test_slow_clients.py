"""Clients that send slowly, stop within a frame, announce too much or read no responses are closed and affect no other."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster, until_all_served
from unit.broker.partitions.test_failover import create_topic
from unit.broker.raw_client import RawClient, batch, fetch_request, produce, request

from stratalog_broker.network import connection
from stratalog_broker.network.connection import ClientConnection
from stratalog_broker.protocol.entities import encode_response as encode_entity
from stratalog_core.connections.silent_clients import FRAME_LOOKS_MAX, LOOK_S
from stratalog_core.ports import Buffer

MIB = 1024 * 1024
API_VERSIONS = struct.pack(">ihhih", 10, 18, 0, 7, -1)


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    async with run_cluster(tmp_path, frame_bytes_max=64 * MIB, memory_bytes=1024 * MIB, connection_idle_ms=60_000) as made:
        yield made


async def served(cluster: MiniCluster) -> None:
    client = await cluster.connect()
    await client.call(18, 0, request(18, 0, "ApiVersionsRequest"))
    await client.close()


async def half_sent(cluster: MiniCluster, said: bytes) -> RawClient:
    """Return a client that stops after these bytes, once they have arrived."""
    before = set(cluster.broker.connections._connections)
    client = await cluster.connect()
    client.send_bytes(said)
    await until(lambda: any(each.partial_bytes for each in set(cluster.broker.connections._connections) - before))
    return client


async def until(condition: Callable[[], object]) -> None:
    """Run the event loop until the condition holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in the code under test, which sets no event
            await asyncio.sleep(0.001)


async def test_a_request_may_arrive_byte_by_byte(cluster: MiniCluster) -> None:
    client = await cluster.connect()
    for at in range(len(API_VERSIONS)):
        client.send_bytes(API_VERSIONS[at : at + 1])
        await asyncio.sleep(0)
    assert await client.receive_bytes()
    await client.close()


async def test_an_incomplete_frame_times_out_and_frees_its_memory(cluster: MiniCluster) -> None:
    connections = cluster.broker.connections
    resident = psutil.Process().memory_info().rss
    clients = [await half_sent(cluster, said) for said in (b"\x00", API_VERSIONS[:9], struct.pack(">i", 64 * MIB) + bytes(100))]
    clients += [await half_sent(cluster, struct.pack(">i", 64 * MIB) + bytes(1)) for _ in range(2)]
    assert psutil.Process().memory_info().rss - resident < 64 * MIB, "what is only announced takes no memory"
    for _ in range(FRAME_LOOKS_MAX - 1):
        connections.sweep()
        await served(cluster)
    connections.sweep()
    for client in clients:
        assert await client.closed()
    await served(cluster)
    assert connections.bytes_held == 0


@pytest.mark.parametrize("is_completed", [True, False])
async def test_a_large_request_that_arrives_slowly_stops_no_small_ones(tmp_path: Path, is_completed: bool) -> None:
    """It holds most of the memory for requests. When another one did not fit beside it, no client was read any more."""
    async with run_cluster(tmp_path, memory_bytes=64 * MIB) as cluster:
        connections, other = cluster.broker.connections, await cluster.connect()
        slow = await half_sent(cluster, struct.pack(">i", 13 * MIB) + API_VERSIONS[4:])
        waiting = await cluster.connect()
        waiting.send_bytes(struct.pack(">i", 3 * MIB) + API_VERSIONS[4:])
        await until(lambda: connections._stalled)
        async with asyncio.timeout(60):
            for _ in range(3):
                await other.call(18, 0, request(18, 0, "ApiVersionsRequest"))
        if is_completed:
            slow.send_bytes(bytes(13 * MIB - len(API_VERSIONS) + 4))
            assert await slow.receive_bytes()
        await slow.close()
        waiting.send_bytes(bytes(3 * MIB - len(API_VERSIONS) + 4))
        assert await waiting.receive_bytes()
        await waiting.close()
        await until(lambda: not connections.bytes_held)
        assert (connections._arriving_bytes, connections.is_full) == (0, False)


async def test_an_idle_client_is_closed_and_a_waiting_one_is_not(cluster: MiniCluster) -> None:
    silent, lively = await cluster.connect(), await cluster.connect()
    for _ in range(round(60 / LOOK_S) + 1):
        await lively.call(18, 0, request(18, 0, "ApiVersionsRequest"))
        cluster.broker.connections.sweep()
    assert await silent.closed()
    await lively.call(18, 0, request(18, 0, "ApiVersionsRequest"))
    await lively.close()


@asynccontextmanager
async def a_client_that_reads_nothing(cluster: MiniCluster) -> AsyncIterator[tuple[socket.socket, ClientConnection]]:
    """A socket whose responses fit into no buffer of the kernel, and the broker's end of it."""
    connections = cluster.broker.connections
    before = set(connections._connections)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        host, port = cluster.broker.kafka_address.rsplit(":", 1)
        await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
        await until(lambda: len(connections._connections) > len(before))
        (held,) = set(connections._connections) - before
        assert isinstance(held, ClientConnection)
        assert held._transport is not None
        held._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield client, held


async def test_a_client_that_reads_no_responses_is_closed(cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit it would hold its responses, and the requests after them, indefinitely."""
    monkeypatch.setattr(connection, "_WRITE_HIGH_BYTES", 64 * 1024)
    connections = cluster.broker.connections
    async with a_client_that_reads_nothing(cluster) as (client, held):
        sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(client, API_VERSIONS * 10_000))
        await until(lambda: held._is_writing_paused)
        # Bytes that were in flight when it stopped may be received between the first checks.
        async with asyncio.timeout(60):
            while held in connections._connections:
                connections.sweep()
                await served(cluster)
        await asyncio.gather(sending, return_exceptions=True)


async def test_a_client_that_ends_its_requests_and_reads_no_responses_is_closed(cluster: MiniCluster) -> None:
    """Its connection was closing from the end of the requests on, and so was never aborted."""
    connections = cluster.broker.connections
    async with a_client_that_reads_nothing(cluster) as (client, held):
        await asyncio.get_running_loop().sock_sendall(client, API_VERSIONS * 1000)
        client.shutdown(socket.SHUT_WR)
        await until(lambda: held._transport is None or held._transport.is_closing())
        assert held.unsent_bytes
        held.close("a test")
        await until(lambda: held not in connections._connections)


async def test_a_pipelined_fetch_waits_until_the_response_before_it_is_charged(
    cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise clients that take nothing fill memory, before it is counted, with a response for each of their fetches."""
    written: list[int] = []
    flush = ClientConnection._flush

    def watched(self: ClientConnection) -> None:
        parts: Sequence[Buffer] = self._outgoing
        written.append(sum(map(len, parts)))
        flush(self)

    await in_thread(partial(create_topic, cluster, "topic", 1))
    await until_all_served(cluster)
    client = await cluster.connect()
    for _ in range(20):
        await produce(client, "topic", batch(b"x" * 100))
    body = encode_entity(fetch_request("topic", 0))
    monkeypatch.setattr(ClientConnection, "_flush", watched)
    for _ in range(30):
        client.send(1, 11, body)
    answers = [await client.receive() for _ in range(30)]
    (size,) = {len(answer.responses[0].partitions[0].records) for answer in answers}
    assert size > 20 * 100
    assert len(written) == 30
    assert max(written) < 2 * size
    await client.close()


async def test_a_request_whose_client_is_gone_before_it_begins_frees_its_memory(cluster: MiniCluster) -> None:
    """Its task is cancelled before its first step, as when a pipelined request is begun and the write before it fails."""
    connections = cluster.broker.connections
    async with a_client_that_reads_nothing(cluster) as (_, held):
        wanted = request(2, 1, "ListOffsetsPartition", partition_index=0, timestamp=5)
        topic = request(2, 1, "ListOffsetsTopic", name="topic", partitions=(wanted,))
        body = encode_entity(request(2, 1, "ListOffsetsRequest", replica_id=-1, topics=(topic,)))
        frame = struct.pack(">ihhih", 10 + len(body), 2, 1, 7, -1) + body
        held.get_buffer(-1)[: len(frame)] = frame
        held.buffer_updated(len(frame))
        running = held._running
        assert running is not None
        held.connection_lost(None)
        await asyncio.wait([running])
        assert running.cancelled()
        assert connections.bytes_held == 0
