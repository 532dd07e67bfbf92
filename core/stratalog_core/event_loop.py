"""The event loop of every server process: uvloop, with servers that survive a lack of file descriptors.

libuv keeps one spare descriptor. When the process runs out, libuv gives the spare one up to accept and drop a connection. If
another thread takes it meanwhile, the listening socket stays readable and the loop spins on a full core until a descriptor is
free. Here a server that gets no descriptor stops accepting for ``ACCEPT_RETRY_S``, as asyncio's own loop does; its clients wait
in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from ssl import SSLContext
from typing import Any, Final, TypeVar

import uvloop

from stratalog_core.rpc.bound_sockets import bind_sockets, close_sockets, listen_on
from stratalog_core.transient_errors import lacks_resources

ACCEPT_RETRY_S: Final = 0.1
ACCEPTS_AT_ONCE: Final = 128
"""Connections accepted before other callbacks run."""
_log = logging.getLogger(__name__)

ProtocolFactory = Callable[[], asyncio.BaseProtocol]
Result = TypeVar("Result")


def run_server(main: Coroutine[Any, Any, Result]) -> Result:
    """Run ``main`` on a new :class:`ServerLoop`."""
    return uvloop.run(main, loop_factory=ServerLoop)


class ServerLoop(uvloop.Loop):
    """uvloop with another ``create_server``, of which only the parameters that our servers use exist."""

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: ProtocolFactory,
        host: str | None = None,
        port: int | None = None,
        *,
        sock: socket.socket | None = None,
        backlog: int = 100,
        ssl: SSLContext | None = None,
        start_serving: bool = True,
    ) -> PausingServer:
        """Bind ``host:port``, or take the bound socket.

        Raises ``Conflict`` if another process listens there, or ``OSError``.
        """
        if sock is None:
            if host is None or port is None:
                raise ValueError("a server needs a host and a port, or a socket")
            sockets = await bind_sockets(host, port)
        else:
            sock.setblocking(False)
            sockets = [sock]
        server = PausingServer(self, sockets, protocol_factory, backlog, ssl)
        if start_serving:
            try:
                await server.start_serving()
            except BaseException:
                close_sockets(sockets)
                raise
        return server


class PausingServer:
    """The part of ``asyncio.Server`` that our servers use. It pauses while the process lacks descriptors or memory."""

    def __init__(
        self,
        loop: ServerLoop,
        sockets: list[socket.socket],
        protocol_factory: ProtocolFactory,
        backlog: int,
        ssl: SSLContext | None,
    ) -> None:
        self._loop = loop
        self._sockets = sockets
        self._protocol_factory = protocol_factory
        self._backlog = backlog
        self._ssl = ssl
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._handshakes: set[asyncio.Task[None]] = set()
        self._serving = False
        self._lacks_descriptors = False

    @property
    def sockets(self) -> Sequence[socket.socket]:
        return tuple(self._sockets)

    def is_serving(self) -> bool:
        return self._serving

    async def start_serving(self) -> None:
        """Accept connections from now on. Raises ``Conflict`` if another process listens on the port, or ``OSError``."""
        if self._serving:
            return
        listen_on(self._sockets, self._backlog)
        for listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)
        self._serving = True

    def close(self) -> None:
        """Close the ports and what is being set up. Connections stay open."""
        for timer in self._paused.values():
            timer.cancel()
        self._paused.clear()
        for listening in self._sockets:
            self._loop.remove_reader(listening)
        close_sockets(self._sockets)
        for task in self._handshakes:
            task.cancel()
        self._serving = False

    async def wait_closed(self) -> None:
        """Wait until no connection is being set up; call ``close`` before."""
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                accepted, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as failure:
                if lacks_resources(failure):
                    self._pause(listening, failure)
                else:  # Of the client's connection, which ended in the queue: accept(2).
                    _log.debug("a connection was not accepted: %s", failure)
                return
            self._lacks_descriptors = False
            accepted.setblocking(False)
            task = self._loop.create_task(self._connect(accepted))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol_factory, accepted, ssl=self._ssl)
        except OSError as failure:  # The client is gone, or its handshake failed.
            _log.debug("a connection was not set up: %s", failure)
            accepted.close()

    def _pause(self, listening: socket.socket, failure: OSError) -> None:
        if not self._lacks_descriptors:
            _log.warning("no connection can be accepted: %s; retrying, raise the limit of open files (ulimit -n)", failure)
            self._lacks_descriptors = True
        self._loop.remove_reader(listening)
        self._paused[listening] = self._loop.call_later(ACCEPT_RETRY_S, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        del self._paused[listening]
        self._loop.add_reader(listening, self._accept, listening)
