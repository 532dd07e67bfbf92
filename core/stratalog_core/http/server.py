"""A small HTTP/1.1 server: GET and HEAD, one request per connection. h11 parses, this module owns the sockets.

Bounds: ``HEAD_BYTES_MAX`` bytes of a request's head, ``CONNECTION_S`` seconds per connection, ``CONNECTIONS_MAX`` connections.
When one more client connects, the oldest connection is closed: silent clients cannot block others.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

import h11

from stratalog_core.http.endpoints import Answer
from stratalog_core.rpc.addresses import split_address
from stratalog_core.rpc.bound_sockets import bind_sockets, close_sockets, listen_on

HEAD_BYTES_MAX: Final = 8 * 1024
CONNECTIONS_MAX: Final = 16
CONNECTION_S: Final = 10.0
_READ_BYTES: Final = 4 * 1024
_log = logging.getLogger(__name__)


class HttpServer:
    """Answers GET and HEAD with ``answer``, which is called with the path."""

    def __init__(self, answer: Callable[[str], Awaitable[Answer]], *, connection_s: float = CONNECTION_S) -> None:
        self._answer = answer
        self._connection_s = connection_s
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._servers: list[asyncio.Server] = []
        self._sockets: list[socket.socket] = []
        self._host = ""

    @property
    def address(self) -> str:
        """``host:port`` of the server; empty before ``start``."""
        if not self._servers:
            return ""
        port = self._servers[0].sockets[0].getsockname()[1]
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    async def start(self, address: str) -> None:
        """Listen on ``host:port``. Raises ``Conflict`` if another process does, ``Invalid`` or ``OSError``."""
        self._host, port = split_address(address)
        sockets = await bind_sockets(self._host, port)
        try:
            listen_on(sockets)
        except BaseException:
            close_sockets(sockets)
            raise
        for bound in sockets:
            self._servers.append(await asyncio.start_server(self._serve, sock=bound, limit=HEAD_BYTES_MAX))

    async def close(self) -> None:
        """Close the port and all connections."""
        for server in self._servers:
            server.close()
        for writer in list(self._open):
            writer.transport.abort()
        for server in self._servers:
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= CONNECTIONS_MAX:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(self._connection_s):
                await self._exchange(reader, writer)
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError):
            pass  # The client is too slow, or gone.
        except Exception:
            _log.exception("an HTTP request failed")
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        try:
            request = await _request(connection, reader)
        except h11.RemoteProtocolError as malformed:
            # h11 still accepts a response after a malformed request head, so its state is not checked.
            answer, is_head = Answer(status=malformed.error_status_hint, body=f"{malformed}\n".encode()), False
        else:
            if request is None:
                return
            answer, is_head = await self._answer_to(request), request.method == b"HEAD"
        writer.write(_encoded(connection, answer, is_head=is_head))
        await writer.drain()

    async def _answer_to(self, request: h11.Request) -> Answer:
        if request.method not in (b"GET", b"HEAD"):
            return Answer(status=HTTPStatus.METHOD_NOT_ALLOWED, body=b"methods are GET and HEAD\n")
        return await self._answer(request.target.partition(b"?")[0].decode("ascii", "replace"))


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """Return the request's head; None if the client disconnected first. Raises ``h11.RemoteProtocolError``."""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            return None
        connection.receive_data(await reader.read(_READ_BYTES))


def _encoded(connection: h11.Connection, answer: Answer, *, is_head: bool) -> bytes:
    headers = [
        ("content-type", answer.content_type),
        ("content-length", str(len(answer.body))),
        ("cache-control", "no-store"),
        ("connection", "close"),
    ]
    if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("allow", "GET, HEAD"))
    reason = HTTPStatus(answer.status).phrase.encode()
    head = connection.send(h11.Response(status_code=answer.status, headers=headers, reason=reason)) or b""
    if is_head:
        return head
    return head + (connection.send(h11.Data(data=answer.body)) or b"")
