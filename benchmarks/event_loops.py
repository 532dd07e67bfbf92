"""Which event loop carries our requests at the least cost: `python -m benchmarks.event_loops`.

A client and a server of :class:`stratalog_core.rpc.tcp.TcpTransport` in two processes over loopback, some requests in flight at
a time. Prints requests per second and the CPU of both sides per request, for asyncio's own loop, for uvloop, and for rloop
where it is installed, in turns.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import multiprocessing
import resource
import statistics
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from stratalog_core.errors import StratalogError
from stratalog_core.ports import Request
from stratalog_core.rpc.tcp import TcpTransport

_METHOD = 0x0F01
_TURNS = 3
_LOADS = ((1_000, 1, 4_000), (1_000, 64, 20_000), (131_072, 8, 4_000), (1_000_000, 4, 800))
"""Bytes of a request, requests under way, requests in all."""
_LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
if importlib.util.find_spec("rloop") is not None:
    _LOOPS["rloop"] = importlib.import_module("rloop").new_event_loop


def main() -> None:
    print(f"{'request':>9} {'under way':>9} {'loop':>8} {'requests/s':>11} {'CPU µs each':>12}")
    for size, under_way, count in _LOADS:
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in _LOOPS}
        for _ in range(_TURNS):
            for name, taken in figures.items():
                taken.append(_measure(name, size, under_way, count))
        for name, taken in figures.items():
            rate, cpu = (statistics.median(column) for column in zip(*taken, strict=True))
            print(f"{size:9} {under_way:9} {name:>8} {rate:11,.0f} {cpu * 1e6:12.1f}")


def _measure(loop: str, size: int, under_way: int, count: int) -> tuple[float, float]:
    """Requests per second, and CPU seconds of client and server for one."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    server = context.Process(target=_serve, args=(loop, far))
    server.start()
    address = near.recv()
    client_near, client_far = context.Pipe()
    client = context.Process(target=_load, args=(loop, address, size, under_way, count, client_far))
    client.start()
    elapsed_s, client_cpu_s = client_near.recv()
    near.send("stop")
    server_cpu_s = near.recv()
    for process in (client, server):
        process.join()
    return count / elapsed_s, (client_cpu_s + server_cpu_s) / count


def _run(loop: str, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=_LOOPS[loop]) as runner:
        runner.run(main)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _serve(loop: str, pipe: Connection) -> None:
    async def serve() -> None:
        transport = TcpTransport()
        listener = await (await transport.bind("127.0.0.1:0")).listen(_answer)
        begun = _cpu_s()
        pipe.send(listener.address)
        await asyncio.to_thread(pipe.recv)
        pipe.send(_cpu_s() - begun)
        await listener.close()

    _run(loop, serve())


def _answer(request: Request) -> None:
    request.reply(b"ok")


def _load(loop: str, address: str, size: int, under_way: int, count: int, pipe: Connection) -> None:
    async def load() -> None:
        transport = TcpTransport()
        channel = transport.channel(address)
        await channel.call(_METHOD, (b"first",), 10)
        running, content = asyncio.get_running_loop(), bytes(size)
        done: asyncio.Future[None] = running.create_future()
        left, sent = count, 0

        def on_reply(answer: memoryview | StratalogError) -> None:
            nonlocal left
            if isinstance(answer, StratalogError):
                done.set_exception(answer)
                return
            left -= 1
            if not left:
                done.set_result(None)
            send()

        def send() -> None:
            nonlocal sent
            if sent < count:
                sent += 1
                channel.send(_METHOD, (content,), on_reply, 30)

        begun, cpu = running.time(), _cpu_s()
        for _ in range(under_way):
            send()
        await done
        pipe.send((running.time() - begun, _cpu_s() - cpu))
        await transport.close()

    _run(loop, load())


if __name__ == "__main__":
    main()
