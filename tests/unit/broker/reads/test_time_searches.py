"""ListOffsets by time looks into batches beside the event loop: others are served meanwhile, and who leaves ends its search."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from unit.broker.mini_cluster import run_cluster
from unit.broker.network.test_server_protocol import create
from unit.broker.raw_client import batch, list_offset, produce, request

from stratalog_broker.network.connection import ClientConnection
from stratalog_core.batches.compression import ZSTD
from stratalog_core.ports import Background

Result = TypeVar("Result")


class Held:
    """Threads that begin when they are let go."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self.began = 0
        self.go = threading.Event()

    def run(self, call: Callable[[], Result]) -> Awaitable[Result]:
        self.began += 1

        def waited() -> Result:
            self.go.wait(120)
            return call()

        return self._background.run(waited)

    def close(self) -> None:
        self.go.set()


async def test_the_event_loop_serves_others_while_batches_are_searched(tmp_path: Path) -> None:
    async with run_cluster(tmp_path) as cluster:
        await create(cluster, "flights")
        asking, leaving, other = [await cluster.connect() for _ in range(3)]
        assert (await produce(asking, "flights", batch(b"a", b"b", timestamp_ms=5, compression=ZSTD))).base_offset == 0
        searches = cluster.broker.searches
        held = searches._background = Held(searches._background)
        asked = asyncio.ensure_future(list_offset(asking, "flights", 6))
        left = asyncio.ensure_future(list_offset(leaving, "flights", 6))
        async with asyncio.timeout(60):
            while held.began < 2:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)
        await other.call(18, 0, request(18, 0, "ApiVersionsRequest"))
        connections = cluster.broker.connections._connections
        running = {each._running for each in connections if isinstance(each, ClientConnection) and each._running is not None}
        await leaving.close()
        (ended,), _ = await asyncio.wait(running, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert ended.cancelled(), "nobody waits for it any more"
        held.close()
        found = await asked
        assert (found.offset, found.timestamp) == (1, 6)
        await asyncio.gather(left, return_exceptions=True)
        async with asyncio.timeout(60):
            while searches.bytes_held:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)
        for client in (asking, other):
            await client.close()
