"""Figures of merit of the metadata quorum: proposal latency and rate, failover, and large moves of partitions.

Three node processes on this machine with fsync, one client process: ``python benchmarks/metadata_proposals.py [--nodes 3]``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import uvloop

from stratalog_core.errors import OutcomeUnknown, Unavailable
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.node.config import MetadataSettings
from stratalog_metadata.node.server import MetadataServer
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import StatusAnswer, StatusRequest
from stratalog_metadata.records import Broker, DynamicConfig, Partition
from stratalog_metadata.state.commands import Command, Put

TOPIC = UUID(int=1)


async def serve(node_id: int, root: Path, peers: Sequence[str]) -> None:
    """One node, until it is told to stop."""
    directory = root / str(node_id)
    address = dict(peer.split("=") for peer in peers)[str(node_id)]
    settings = MetadataSettings(data_dir=str(directory), node_id=node_id, listen=address, peers=tuple(peers))
    background = ThreadBackground(2, "metadata")
    files = SystemFiles(directory)
    server = MetadataServer(settings, TcpTransport(), files, SystemClock(), random.Random(), background)
    await server.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await server.close()
    background.close()


def show(what: str, seconds: Sequence[float]) -> None:
    ordered = sorted(seconds)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    print(f"{what:<48} p50 {p50 * 1000:7.2f} ms   p99 {p99 * 1000:7.2f} ms   n {len(ordered)}")


def config(name: str) -> Command:
    return Command(updates=(Put(record=DynamicConfig(resource=name, configs={"key": "value"})),))


async def timed_proposal(client: QuorumClient, command: Command) -> float:
    began = time.perf_counter()
    await client.propose(command, timeout_s=60.0)
    return time.perf_counter() - began


async def measure_latency(client: QuorumClient) -> None:
    show("one proposal at a time", [await timed_proposal(client, config(str(n % 50))) for n in range(1000)])


async def measure_rate(client: QuorumClient) -> None:
    async def caller(number: int) -> list[float]:
        return [await timed_proposal(client, config(f"{number}")) for _ in range(100)]

    began = time.perf_counter()
    gathered = await asyncio.gather(*(caller(number) for number in range(64)))
    seconds = time.perf_counter() - began
    show("64 callers at once", [one for some in gathered for one in some])
    print(f"{'rate':<48} {6400 / seconds:7.0f} proposals/s")


async def measure_move(client: QuorumClient, count: int) -> None:
    """From the end of a broker's session to the last of its partitions with a new owner in a client's view."""
    sessions = [await register(client, broker_id) for broker_id in (1, 2)]
    began = time.perf_counter()
    for first in range(0, count, 10_000):
        records = [Partition(topic_id=TOPIC, index=index) for index in range(first, min(first + 10_000, count))]
        await client.propose(Command(updates=tuple(Put(record=record) for record in records)), timeout_s=60.0)
    await all_owned_by(client, {1, 2})
    print(f"{f'{count} partitions created and assigned':<48} {(time.perf_counter() - began) * 1000:7.0f} ms")
    began = time.perf_counter()
    await client.close_session(sessions[0])
    await all_owned_by(client, {2})
    print(f"{f'{count // 2} of {count} partitions moved':<48} {(time.perf_counter() - began) * 1000:7.0f} ms")
    await client.close_session(sessions[1])


async def register(client: QuorumClient, broker_id: int) -> int:
    session_id = await client.open_session(f"broker {broker_id}", 60_000, lambda: None)
    record = Broker(broker_id=broker_id, host="127.0.0.1", port=9092, session_id=session_id)
    await client.propose(Command(updates=(Put(record=record),)))
    return session_id


async def all_owned_by(client: QuorumClient, owners: set[int]) -> None:
    done = asyncio.Event()

    def check(_: object = None) -> None:
        if {partition.owner for partition in client.view.all(Partition)} == owners:
            done.set()

    stop = client.view.subscribe(check)
    check()
    await done.wait()
    stop()


async def measure_failover(client: QuorumClient, nodes: dict[str, subprocess.Popen[bytes]]) -> None:
    address = next(iter(nodes))
    body = await client._transport.channel(address).call(messages.STATUS, (messages.encode(StatusRequest()),), 5.0)
    leader = messages.decode(body, StatusAnswer).leader_address
    began = time.perf_counter()
    nodes[leader].kill()
    while True:
        try:
            await client.propose(config("after"), timeout_s=10.0)
            break
        except (OutcomeUnknown, Unavailable):
            continue
    print(f"{'leader killed -9 until the next proposal succeeds':<48} {(time.perf_counter() - began) * 1000:7.0f} ms")


async def measure(addresses: Sequence[str], nodes: dict[str, subprocess.Popen[bytes]]) -> None:
    transport = TcpTransport()
    client = QuorumClient(addresses, transport, SystemClock(), random.Random())
    await client.start()
    await measure_latency(client)
    await measure_rate(client)
    for count in (1_000, 10_000):
        await measure_move(client, count)
    if len(nodes) > 1:
        await measure_failover(client, nodes)
    await client.close()
    await transport.close()


def free_addresses(count: int) -> list[str]:
    import socket

    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--serve", type=int, help="run this node only (used by the benchmark itself)")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--peers", default="")
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(serve(arguments.serve, arguments.root, arguments.peers.split(",")))
        return
    addresses = free_addresses(arguments.nodes)
    peers = ",".join(f"{node_id}={address}" for node_id, address in enumerate(addresses, start=1))
    with tempfile.TemporaryDirectory(prefix="stratalog-metadata-") as root:
        nodes = {
            address: subprocess.Popen([sys.executable, __file__, "--serve", str(node_id), "--root", root, "--peers", peers])
            for node_id, address in enumerate(addresses, start=1)
        }
        try:
            uvloop.run(measure(addresses, nodes))
        finally:
            for node in nodes.values():
                node.terminate()
            for node in nodes.values():
                node.wait()


if __name__ == "__main__":
    main()
