"""Servers of the event loop: they serve, close, report ports in use, and do not spin while the process lacks descriptors."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from stratalog_core.errors import Conflict
from stratalog_core.event_loop import ServerLoop, run_server

TIMEOUT_S = 60.0

EXHAUSTED = """
import asyncio, os, resource, sys, time
from stratalog_core.event_loop import run_server

class Echo(asyncio.Protocol):
    def connection_made(self, transport): self.transport = transport
    def data_received(self, data): self.transport.write(data)

async def main():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Echo, "127.0.0.1", 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
    taken = []
    def take_all():
        try:
            while True: taken.append(os.open("/", os.O_RDONLY))
        except OSError: pass
    take_all()
    print(server.sockets[0].getsockname()[1], flush=True)
    # As another thread of the process may: take whatever descriptor the loop gives up for a moment.
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        await asyncio.sleep(0)
        take_all()
    before = time.process_time()
    await asyncio.sleep(1.0)
    print(time.process_time() - before, flush=True)
    for descriptor in taken: os.close(descriptor)
    await asyncio.Event().wait()

run_server(main())
"""


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        with socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno())) as connection:
            self.sends_at_once = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        self.transport.write(data)


async def ask(port: int) -> bytes:
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello")
        answer = await reader.readexactly(5)
        writer.close()
        await writer.wait_closed()
        return answer


def test_it_serves_many_at_once_until_it_is_closed() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ServerLoop)
        accepted: list[Echo] = []

        def factory() -> Echo:
            accepted.append(Echo())
            return accepted[-1]

        server = await loop.create_server(factory, "127.0.0.1", 0, start_serving=False)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            await ask(port)
        await server.start_serving()
        assert set(await asyncio.gather(*(ask(port) for _ in range(50)))) == {b"hello"}
        assert len(accepted) == 50
        assert all(each.sends_at_once for each in accepted), "TCP_NODELAY is set"
        server.close()
        await server.wait_closed()
        assert not server.is_serving()
        with pytest.raises(ConnectionRefusedError):
            await ask(port)

    run_server(main())


def test_a_port_in_use_is_named() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        first = await loop.create_server(Echo, "127.0.0.1", 0)
        port = first.sockets[0].getsockname()[1]
        with pytest.raises(Conflict, match=f"127.0.0.1:{port} is in use by another process"):
            await loop.create_server(Echo, "127.0.0.1", port)
        first.close()

    run_server(main())


def test_out_of_descriptors_it_waits_and_then_serves_all(tmp_path: Path) -> None:
    """libuv's own server spun on a full core once another thread had taken the spare descriptor."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = tmp_path / "exhausted.py"
    script.write_text(EXHAUSTED)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())

            async def clients() -> tuple[float, list[bytes]]:
                asked = [asyncio.ensure_future(ask(port)) for _ in range(10)]
                assert process.stdout is not None
                spent_s = float(await asyncio.to_thread(process.stdout.readline))
                return spent_s, await asyncio.gather(*asked)

            spent_s, answers = asyncio.run(clients())
        finally:
            process.kill()
    assert answers == [b"hello"] * 10, "no client is dropped"
    assert spent_s < 0.5, "it waits for descriptors and does not spin"
