"""``python -m chaos.proxy``: a TCP proxy of many links, each of which can be cut, slowed down or reset on command.

It speaks JSON lines: first it reads a table of link names and target addresses and answers with the address of each link's own
port; then it takes orders ``{"mode": …, "links": […], "delay_s": …}`` and answers each with the number of links, and questions
``{"count": […]}``, answered with the bytes that each link's target has sent.

| mode | effect |
| --- | --- |
| ``pass`` | everything passes |
| ``cut`` | nothing passes in either direction; bytes sent meanwhile arrive after the cut, like TCP's retransmissions |
| ``cut-forward``, ``cut-backward`` | the same in one direction |
| ``slow`` | each piece is delayed |
| ``late`` | each piece to the target is delayed by ``delay_s``, so that each small request takes this much longer |
| ``reset`` | connections are reset, new ones closed at once |
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any, Final, get_args

import uvloop

from chaos.modes import Mode
from chaos.tether import tether

_PIECE_BYTES: Final = 64 * 1024
_LINGER_NOT: Final = struct.pack("ii", 1, 0)
_SLOW_S: Final = (0.02, 0.25)
_BLOCKED: Final = {"cut": ("forward", "backward"), "cut-forward": ("forward",), "cut-backward": ("backward",)}


class ProxyLink:
    """One listening port, and all connections to it."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._mode: Mode = "pass"
        self._delay_s = 0.0
        self.backward_bytes = 0
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> str:
        """Accept connections; return the address."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_PIECE_BYTES)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def set_mode(self, mode: Mode, delay_s: float = 0.0) -> None:
        """Set the mode of existing and new connections. ``delay_s`` is for ``late``."""
        self._mode, self._delay_s = mode, delay_s
        self._changed.set()
        self._changed = asyncio.Event()
        if mode == "reset":
            for writer in list(self._writers):
                _reset(writer)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._join(reader, writer)
        except OSError:
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode == "reset":
            _reset(writer)
            return
        # A connection that starts while the forward way is cut waits until that ends.
        await self._may_pass("forward")
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port, limit=_PIECE_BYTES)
        self._writers.add(far_writer)
        try:
            ways = (self._pump(reader, far_writer, "forward"), self._pump(far_reader, writer, "backward"))
            tasks = [asyncio.ensure_future(way) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            far_writer.transport.abort()
            self._writers.discard(far_writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            await self._may_pass(way)
            if way == "backward":
                self.backward_bytes += len(piece)
            writer.write(piece)
            await writer.drain()

    async def _may_pass(self, way: str) -> None:
        if self._mode == "slow":
            await asyncio.sleep(random.uniform(*_SLOW_S))
        if self._mode == "late" and way == "forward":
            await asyncio.sleep(self._delay_s)
        while way in _BLOCKED.get(self._mode, ()):
            await self._changed.wait()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with RST instead of FIN; one that is already broken has no socket any more."""
    if not writer.transport.is_closing():
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        writer.transport.abort()


class Proxy:
    """All links by name."""

    def __init__(self) -> None:
        self._links: dict[str, ProxyLink] = {}

    async def open(self, targets: dict[str, str]) -> dict[str, str]:
        """Listen for each link; return their addresses."""
        self._links = {name: ProxyLink(target) for name, target in targets.items()}
        return {name: await link.listen() for name, link in self._links.items()}

    def set_mode(self, mode: Mode, names: Sequence[str], delay_s: float) -> int:
        for name in names:
            self._links[name].set_mode(mode, delay_s)
        return len(names)

    def count(self, names: Sequence[str]) -> dict[str, int]:
        return {name: self._links[name].backward_bytes for name in names}


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader(limit=1024 * 1024)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    proxy = Proxy()
    _answer(await proxy.open(json.loads(await orders.readline())))
    while line := await orders.readline():
        order = json.loads(line)
        if "count" in order:
            _answer(proxy.count(order["count"]))
            continue
        assert order["mode"] in get_args(Mode), order
        _answer(proxy.set_mode(order["mode"], order["links"], order["delay_s"]))


def _answer(document: Any) -> None:
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    tether()
    uvloop.run(_serve())
