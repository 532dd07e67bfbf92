"""Requests and replies between Stratalog's processes over TCP: the real :class:`~stratalog_core.ports.Transport`.

Optimisations with a measured effect: a connection writes once per turn of the event loop; frames stay in the buffer that the
socket was read into, which is reused when no view of it is left; nothing is copied for sending.

Bounds: a frame has ``framing.FRAME_BYTES_MAX`` bytes at most; a channel refuses (``Overloaded``) beyond
``IN_FLIGHT_BYTES_MAX`` unanswered request bytes; a server stops reading a connection whose unanswered requests or unsent
replies exceed the same bound, has ``CONNECTIONS_MAX`` connections at most, closes silent ones (``silent_clients.py``), and
bounds the memory of all connections by ``PORT_BYTES_MAX`` (``port_memory.py``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Final

from stratalog_core.connections import framing
from stratalog_core.connections.port_memory import PortMemory
from stratalog_core.connections.silent_clients import LOOK_S, SilentClients
from stratalog_core.errors import Corrupt, Invalid, OutcomeUnknown, Overloaded, StratalogError, Unavailable
from stratalog_core.memory.receive_buffers import ReceiveBuffers
from stratalog_core.ports import Buffer, Connection, Handler, OnReply
from stratalog_core.rpc.addresses import split_address
from stratalog_core.rpc.awaited_calls import call_by_send
from stratalog_core.rpc.bound_sockets import bind_sockets, close_sockets, end_if_untaken, listen_on
from stratalog_core.rpc.frame_protocol import FrameProtocol

IN_FLIGHT_BYTES_MAX: Final = 128 * 1024 * 1024
PORT_BYTES_MAX: Final = 256 * 1024 * 1024
CONNECTIONS_MAX: Final = 4096
CONNECT_TIMEOUT_S: Final = 2.0
SERVER_READ_BYTES: Final = 1024 * 1024
_SWEEP_INTERVAL_S: Final = 0.05

_log = logging.getLogger(__name__)


class TcpRequest:
    """A request and its connection; see :class:`stratalog_core.ports.Request`."""

    __slots__ = ("_answered", "_correlation", "body", "connection", "method")

    def __init__(self, connection: _ServerConnection, method: int, correlation: int, body: memoryview) -> None:
        self.method = method
        self.body = body
        self.connection: Final = connection
        self._correlation = correlation
        self._answered = False

    def reply(self, *parts: Buffer) -> None:
        self._answer(framing.REPLY, parts)

    def fail(self, error: StratalogError) -> None:
        self._answer(framing.ERROR, (framing.encode_error(error),))

    def _answer(self, kind: int, parts: Sequence[Buffer]) -> None:
        assert not self._answered, "a request is answered once"
        self._answered = True
        body_bytes = sum(map(len, parts))
        if body_bytes > framing.FRAME_BYTES_MAX - framing.HEADER_BYTES:
            limit = f"an answer of {body_bytes} bytes exceeds the frame limit of {framing.FRAME_BYTES_MAX}: ask for less"
            kind, parts = framing.ERROR, (framing.encode_error(Invalid(limit)),)
            body_bytes = len(parts[0])
        header = framing.pack_header(kind, self.method, self._correlation, body_bytes)
        self.connection.answered(len(self.body))
        self.connection.write((header, *parts))
        self.connection.replied()


class _ServerConnection(FrameProtocol):
    # Requests are short-lived, so several may share a large buffer: seven batches of 128 KiB.
    read_buffer_bytes = SERVER_READ_BYTES
    copied_bytes_max = 4 * 1024

    def __init__(
        self, handler: Handler, connections: set[_ServerConnection], memory: PortMemory, buffers: ReceiveBuffers
    ) -> None:
        super().__init__(buffers)
        self._handler = handler
        self._connections = connections
        self._memory = memory
        self._begun_bytes = 0
        self._is_lost = False
        self._frames = 0
        self._answers = 0
        self._unanswered_bytes = 0
        self._reading_paused = False
        self._writing_paused = False
        self._on_lost: set[Callable[[Connection], None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._connections) >= CONNECTIONS_MAX:
            self.close(f"{CONNECTIONS_MAX} connections are open, which is the limit")
        else:
            self._connections.add(self)

    @property
    def progress(self) -> tuple[int, int]:
        """See ``silent_clients.Client``, also for the next two properties."""
        return self._frames, self.unsent_bytes

    @property
    def partial_bytes(self) -> int:
        return 0 if self._reading_paused else self._end - self._start

    @property
    def is_owed(self) -> bool:
        return self._frames > self._answers and not self._writing_paused

    def close(self, reason: str) -> None:
        """Disconnect the client without a reply."""
        _log.warning("dropping a connection: %s", reason)
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        # Some handlers drop the requests of a lost connection, others still answer them: see ``answered``.
        self._memory.release(self._begun_bytes + self._unanswered_bytes)
        self._begun_bytes = 0
        self._is_lost = True
        told, self._on_lost = self._on_lost, set()
        for callback in told:
            callback(self)

    def on_lost(self, callback: Callable[[Connection], None]) -> Callable[[], None]:
        self._on_lost.add(callback)
        return lambda: self._on_lost.discard(callback)

    def frame_received(self, kind: int, method: int, correlation: int, body: memoryview) -> None:
        if kind != framing.REQUEST:
            raise Corrupt("a client sent an answer")
        self._frames += 1
        self._memory.hold(len(body) - self._begun_bytes)
        self._begun_bytes = 0
        self._unanswered_bytes += len(body)
        if self._unanswered_bytes > IN_FLIGHT_BYTES_MAX or self._memory.is_full:
            self.regulate()
        self._handler(TcpRequest(self, method, correlation, body))

    def answered(self, body_bytes: int) -> None:
        self._answers += 1
        self._unanswered_bytes -= body_bytes
        if self._is_lost:
            return
        self._memory.release(body_bytes)
        if self._reading_paused:
            self.regulate()

    def replied(self) -> None:
        """Account for a queued reply."""
        if self._writing_paused:
            self._memory.bound_replies()

    def _make_room(self, whole: int) -> None:
        if whole > self.read_buffer_bytes and not self._begun_bytes:
            self._begun_bytes = whole
            self._memory.hold(whole)
        super()._make_room(whole)

    def pause_writing(self) -> None:
        self._writing_paused = True
        self.regulate()

    def resume_writing(self) -> None:
        self._writing_paused = False
        self.regulate()

    def regulate(self) -> None:
        """See ``port_memory.PortConnection``, also for ``unsent_bytes``."""
        is_full = self._unanswered_bytes > IN_FLIGHT_BYTES_MAX or (self._memory.is_full and not self._begun_bytes)
        wanted = self._writing_paused or is_full
        if wanted == self._reading_paused or self._transport is None or self._transport.is_closing():
            return
        self._reading_paused = wanted
        if wanted:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0


class _Pending:
    __slots__ = ("body_bytes", "deadline", "on_reply")

    def __init__(self, on_reply: OnReply, deadline: float, body_bytes: int) -> None:
        self.on_reply = on_reply
        self.deadline = deadline
        self.body_bytes = body_bytes


class _ClientConnection(FrameProtocol):
    def __init__(self, channel: TcpChannel, buffers: ReceiveBuffers) -> None:
        super().__init__(buffers)
        self._channel = channel
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        end_if_untaken(transport)

    def frame_received(self, kind: int, method: int, correlation: int, body: memoryview) -> None:
        if kind == framing.REQUEST:
            raise Corrupt("a server sent a request")
        self._channel.answered(correlation, framing.decode_error(body) if kind == framing.ERROR else body)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._channel.disconnected(self)


class TcpChannel:
    """Requests to one address; see :class:`stratalog_core.ports.Channel`."""

    def __init__(self, address: str, buffers: ReceiveBuffers) -> None:
        self._host, self._port = split_address(address)
        self._buffers = buffers
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._connection: _ClientConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: dict[int, tuple[int, Sequence[Buffer]]] = {}
        self._pending: dict[int, _Pending] = {}
        self._pending_bytes = 0
        self._next_correlation = 0
        self._sweep: asyncio.TimerHandle | None = None
        self._on_lost: set[Callable[[], None]] = set()
        self._closed = False

    @property
    def address(self) -> str:
        return self._address

    def send(self, method: int, parts: Sequence[Buffer], on_reply: OnReply, timeout_s: float) -> None:
        body_bytes = sum(map(len, parts))
        refused = self._refusal(body_bytes)
        if refused is not None:
            self._loop.call_soon(on_reply, refused)
            return
        self._next_correlation = correlation = self._next_correlation + 1
        self._pending[correlation] = _Pending(on_reply, self._loop.time() + timeout_s, body_bytes)
        self._pending_bytes += body_bytes
        if self._sweep is None:
            self._sweep = self._loop.call_later(_SWEEP_INTERVAL_S, self._expire)
        if self._connection is not None:
            self._connection.write((framing.pack_header(framing.REQUEST, method, correlation, body_bytes), *parts))
        else:
            self._waiting[correlation] = (method, parts)
            if self._connecting is None:
                self._connecting = self._loop.create_task(self._connect())

    def _refusal(self, body_bytes: int) -> StratalogError | None:
        if self._closed:
            return Unavailable(f"the channel to {self._address} is closed")
        if self._pending and self._pending_bytes + body_bytes > IN_FLIGHT_BYTES_MAX:
            return Overloaded(f"{self._pending_bytes} bytes are unanswered by {self._address}")
        if body_bytes > framing.FRAME_BYTES_MAX - framing.HEADER_BYTES:
            return Invalid(f"a request of {body_bytes} bytes exceeds the frame limit of {framing.FRAME_BYTES_MAX}")
        return None

    async def call(self, method: int, parts: Sequence[Buffer], timeout_s: float) -> memoryview:
        return await call_by_send(self, method, parts, timeout_s)

    def on_lost(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._on_lost.add(callback)
        return lambda: self._on_lost.discard(callback)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await self._loop.create_connection(
                    lambda: _ClientConnection(self, self._buffers), self._host, self._port
                )
        except (OSError, TimeoutError, ValueError) as failure:
            # ``ValueError``: the host cannot be looked up at all, because of its length or its characters.
            self._not_connected(f"cannot connect to {self._address}: {str(failure) or 'timed out'}")
            return
        if connection.lost:
            self._not_connected(f"{self._address} closed the connection at once")
            return
        self._connecting = None
        self._connection = connection
        waiting, self._waiting = self._waiting, {}
        for correlation, (method, parts) in waiting.items():
            body_bytes = sum(map(len, parts))
            connection.write((framing.pack_header(framing.REQUEST, method, correlation, body_bytes), *parts))

    def _not_connected(self, reason: str) -> None:
        self._connecting = None
        self._fail_waiting(Unavailable(reason))

    def _fail_waiting(self, error: Unavailable) -> None:
        """Fail the requests that were not sent."""
        waiting, self._waiting = self._waiting, {}
        for correlation in waiting:
            self.answered(correlation, error)

    def answered(self, correlation: int, answer: memoryview | StratalogError) -> None:
        """Pass a reply to its caller. A reply that arrives after its timeout is discarded."""
        pending = self._pending.pop(correlation, None)
        if pending is not None:
            self._pending_bytes -= pending.body_bytes
            pending.on_reply(answer)

    def disconnected(self, connection: _ClientConnection) -> None:
        """Fail the requests sent over the broken connection: their outcome is unknown."""
        if connection is not self._connection:
            return
        self._connection = None
        lost = OutcomeUnknown(f"the connection to {self._address} was lost before the answer")
        for correlation in [number for number in self._pending if number not in self._waiting]:
            self.answered(correlation, lost)
        for callback in list(self._on_lost):
            callback()

    def _expire(self) -> None:
        self._sweep = None
        now = self._loop.time()
        for correlation in [number for number, pending in self._pending.items() if pending.deadline <= now]:
            if self._waiting.pop(correlation, None) is not None:
                self.answered(correlation, Unavailable(f"no connection to {self._address} in time"))
            else:
                self.answered(correlation, OutcomeUnknown(f"no answer from {self._address} in time"))
        if self._pending and self._sweep is None:
            self._sweep = self._loop.call_later(_SWEEP_INTERVAL_S, self._expire)

    async def close(self) -> None:
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        self._fail_waiting(Unavailable(f"the channel to {self._address} was closed"))
        for correlation in list(self._pending):
            self.answered(correlation, OutcomeUnknown(f"the channel to {self._address} was closed"))
        if self._sweep is not None:
            self._sweep.cancel()


class _Bound:
    """See :class:`stratalog_core.ports.Bound`; a host name may have several addresses."""

    def __init__(self, host: str, sockets: list[socket.socket], buffers: ReceiveBuffers) -> None:
        self.address = f"{host}:{sockets[0].getsockname()[1]}"
        self._sockets = sockets
        self._buffers = buffers

    async def listen(self, handler: Handler) -> _TcpListener:
        listen_on(self._sockets)
        connections: set[_ServerConnection] = set()
        memory = PortMemory(connections, PORT_BYTES_MAX)
        loop = asyncio.get_running_loop()
        sockets, self._sockets = self._sockets, []
        servers = [
            await loop.create_server(lambda: _ServerConnection(handler, connections, memory, self._buffers), sock=each)
            for each in sockets
        ]
        return _TcpListener(servers, connections, self.address)

    def close(self) -> None:
        close_sockets(self._sockets)


class _TcpListener:
    def __init__(self, servers: list[asyncio.Server], connections: set[_ServerConnection], address: str) -> None:
        self.address = address
        self._servers = servers
        self._connections = connections
        self._silent = SilentClients(connections)
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        self._silent.look()

    async def close(self) -> None:
        self._timer.cancel()
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.abort()
        for server in self._servers:
            await server.wait_closed()


class TcpTransport:
    """Channels and listeners over TCP; see :class:`stratalog_core.ports.Transport`."""

    def __init__(self) -> None:
        self._buffers = ReceiveBuffers()
        self._channels: dict[str, TcpChannel] = {}

    def channel(self, address: str) -> TcpChannel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = TcpChannel(address, self._buffers)
        return channel

    async def bind(self, address: str) -> _Bound:
        host, port = split_address(address)
        return _Bound(host, await bind_sockets(host, port), self._buffers)

    async def close(self) -> None:
        for channel in list(self._channels.values()):
            await channel.close()
        self._channels.clear()
