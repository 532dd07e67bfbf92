"""Stands before a broker and closes a client's connection instead of passing on some of its requests, as a crash does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from unit.broker.mini_cluster import MiniCluster, run_cluster

from stratalog_core.rpc.addresses import split_address

METADATA = 3
LIST_OFFSETS = 2
Matches = Callable[[int, bytes], bool]
"""Takes the key of a request's API, and the request."""


class CuttingProxy:
    """A proxy for one broker. ``times`` requests for which ``matches`` is true cost their client its connection."""

    def __init__(self) -> None:
        self.address = ""
        self.target = ""
        self.times = 0
        self.matches: Matches = lambda key, request: False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_connection(*split_address(self.target))
        answers = asyncio.create_task(_pass_on(upstream_reader, writer))
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    length = await reader.readexactly(4)
                    request = await reader.readexactly(int.from_bytes(length, "big"))
                    if self.times and self.matches(int.from_bytes(request[:2], "big"), request):
                        self.times -= 1
                        return
                    upstream.write(length + request)
        finally:
            answers.cancel()
            upstream.close()
            writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while content := await reader.read(65536):
            writer.write(content)


@asynccontextmanager
async def run_behind_proxy(path: Path) -> AsyncIterator[tuple[MiniCluster, CuttingProxy]]:
    """Run a cluster of one broker, which tells clients the address of its proxy."""
    proxy = CuttingProxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        proxy.address = f"{host}:{port}"
        async with run_cluster(path, advertised=(proxy.address,)) as cluster:
            proxy.target = cluster.bootstrap
            yield cluster, proxy
