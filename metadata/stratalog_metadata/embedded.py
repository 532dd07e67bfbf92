"""A whole metadata quorum inside one event loop: one node by default, as the all-in-one node and tests use it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random as SeededRandom
from typing import Any

from stratalog_core.ports import Clock, Random, Transport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.client import QuorumClient
from stratalog_metadata.config import MetadataSettings
from stratalog_metadata.server import MetadataServer


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedQuorum:
    """Started servers and a started client of them."""

    servers: tuple[MetadataServer, ...]
    client: QuorumClient

    @property
    def server(self) -> MetadataServer:
        """The first node, which is all there is by default."""
        return self.servers[0]

    @property
    def addresses(self) -> Sequence[str]:
        """What other clients are given."""
        return tuple(server.address for server in self.servers)


@asynccontextmanager
async def embedded_quorum(
    path: Path,
    transport: Transport,
    *,
    nodes: int = 1,
    clock: Clock | None = None,
    random: Random | None = None,
    **settings: Any,
) -> AsyncIterator[EmbeddedQuorum]:
    """``nodes`` servers with data in ``path/1`` …, listening on free loopback ports, and a client.

    ``settings`` are fields of ``MetadataSettings``. Starting again on the same path goes on with what is there.
    """
    clock = clock if clock is not None else SystemClock()
    random = random if random is not None else SeededRandom()
    background = ThreadBackground(2 * nodes, "metadata")
    servers = [_server(path, number + 1, transport, clock, random, background, settings) for number in range(nodes)]
    client: QuorumClient | None = None
    try:
        for server in servers:
            await server.bind()
        addresses = {number + 1: server.address for number, server in enumerate(servers)}
        for server in servers:
            await server.start(addresses)
        client = QuorumClient(list(addresses.values()), transport, clock, random)
        await client.start()
        yield EmbeddedQuorum(servers=tuple(servers), client=client)
    finally:
        if client is not None:
            await client.close()
        for server in servers:
            await server.close()
        background.close()


def _server(
    path: Path,
    node_id: int,
    transport: Transport,
    clock: Clock,
    random: Random,
    background: ThreadBackground,
    settings: dict[str, Any],
) -> MetadataServer:
    directory = path / str(node_id)
    fields = {"listen": "127.0.0.1:0", **settings, "data_dir": str(directory), "node_id": node_id}
    return MetadataServer(MetadataSettings(**fields), transport, SystemFiles(directory), clock, random, background)
