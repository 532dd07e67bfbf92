"""A whole metadata quorum in one event loop, for the all-in-one node and for tests: one node by default."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random as SeededRandom
from typing import Any

from stratalog.local.ports import free_ports
from stratalog_core.ports import Clock, Random, Transport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.node.config import MetadataSettings
from stratalog_metadata.node.server import MetadataServer


class EmbeddedQuorum:
    """The servers of one quorum and a client; made by :func:`embedded_quorum`."""

    def __init__(
        self, path: Path, transport: Transport, nodes: int, clock: Clock, random: Random, settings: dict[str, Any]
    ) -> None:
        self._path = path
        self._transport = transport
        self._clock = clock
        self._random = random
        self._settings = settings
        self._background = ThreadBackground(2 * nodes, "metadata")
        self._addresses: dict[int, str] = {}
        # A node that is restarted needs its port again, which nobody must have taken meanwhile as one of port 0.
        ports = free_ports(nodes) if nodes > 1 else [0]
        self.servers = [self._server(node_id, f"127.0.0.1:{port}") for node_id, port in enumerate(ports, start=1)]
        self._client: QuorumClient | None = None

    @property
    def server(self) -> MetadataServer:
        """The first node; by default the only one."""
        return self.servers[0]

    @property
    def client(self) -> QuorumClient:
        assert self._client is not None
        return self._client

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses for other clients; they do not change when nodes stop."""
        return tuple(self._addresses.values())

    async def leader(self) -> MetadataServer:
        """Wait until one node leads: if the machine stalls for longer than an election timeout, none or two may do so."""
        async with asyncio.timeout(60):
            while True:
                leading = [server for server in self.servers if server.is_leader]
                if len(leading) == 1:
                    return leading[0]
                await asyncio.sleep(0.01)

    async def start(self) -> None:
        for node_id, server in enumerate(self.servers, start=1):
            await server.bind()
            self._addresses[node_id] = server.address
        for server in self.servers:
            await server.start(self._addresses)
        self._client = QuorumClient(self.addresses, self._transport, self._clock, self._random)
        await self._client.start()

    async def restart(self, node_id: int) -> MetadataServer:
        """Restart node ``node_id`` (from 1 on), which was closed, on its data and address."""
        server = self.servers[node_id - 1] = self._server(node_id, self._addresses[node_id])
        await server.start(self._addresses)
        return server

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        for server in self.servers:
            await server.close()
        self._background.close()

    def _server(self, node_id: int, listen: str) -> MetadataServer:
        directory = self._path / str(node_id)
        settings = MetadataSettings(**{"listen": listen, **self._settings, "data_dir": str(directory), "node_id": node_id})
        files = SystemFiles(directory)
        return MetadataServer(settings, self._transport, files, self._clock, self._random, self._background)


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
    """Start ``nodes`` servers with data in ``path/1`` … on free loopback ports, and a client.

    ``settings`` are fields of ``MetadataSettings``. A later start on the same path continues with its data.
    """
    quorum = EmbeddedQuorum(
        path,
        transport,
        nodes,
        clock if clock is not None else SystemClock(),
        random if random is not None else SeededRandom(),
        settings,
    )
    try:
        await quorum.start()
        yield quorum
    finally:
        await quorum.close()
