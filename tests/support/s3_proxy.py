"""A proxy before an S3 server, or Azurite, that answers chosen requests wrongly, late, or not at all.

| fault | what the client sees | has the request taken effect? |
| --- | --- | --- |
| ``slow-down``, ``too-many``, ``timeout`` | 503 SlowDown, 429, 400 RequestTimeout | no |
| ``error`` | 500 InternalError | no, but the client cannot know |
| ``reset`` | the connection breaks before the request is forwarded | no, but the client cannot know |
| ``lost`` | the connection breaks instead of an answer | yes |
| ``cut`` | the answer's body ends half way | yes |
| ``slow`` | the answer's body arrives in pieces | yes |
| ``etag`` | HEAD and GET report another etag | yes |
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final, Literal, get_args
from urllib.parse import urlsplit

Fault = Literal["slow-down", "too-many", "timeout", "error", "reset", "lost", "cut", "slow", "etag"]
FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
Refusals = Mapping[Fault, tuple[str, str]]
"""Status and code of the answers to requests that are not forwarded."""
S3_REFUSALS: Final[Refusals] = {
    "slow-down": ("503 Slow Down", "SlowDown"),
    "too-many": ("429 Too Many Requests", "TooManyRequests"),
    "timeout": ("400 Bad Request", "RequestTimeout"),
    "error": ("500 Internal Server Error", "InternalError"),
}
AZURE_REFUSALS: Final[Refusals] = {
    "slow-down": ("503 Server Busy", "ServerBusy"),
    "too-many": ("429 Too Many Requests", "TooManyRequests"),
    "timeout": ("500 Operation Timed Out", "OperationTimedOut"),
    "error": ("500 Internal Server Error", "InternalError"),
}
GCS_REFUSALS: Final[Refusals] = {
    "slow-down": ("503 Service Unavailable", "backendError"),
    "too-many": ("429 Too Many Requests", "rateLimitExceeded"),
    "timeout": ("408 Request Timeout", "uploadBrokenConnection"),
    "error": ("500 Internal Server Error", "backendError"),
}
_NO_LINGER: Final = struct.pack("ii", 1, 0)
_PIECES: Final = 4
_IN_A_ROW_MAX: Final = 3
_PIECE_PAUSE_S: Final = 0.02


class S3Proxy:
    """Forwards HTTP connections to ``target``. ``choose`` names the fault of a request by its first line; None: no fault."""

    def __init__(self, target: str, refusals: Refusals = S3_REFUSALS) -> None:
        parts = urlsplit(target)
        self._refusals = refusals
        self._host, self._port = parts.hostname, parts.port
        self._server: asyncio.Server | None = None
        self.choose: Callable[[str], Fault | None] = lambda line: None
        self.requests = 0
        self.faults: Counter[Fault] = Counter()
        self._connections: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}

    def lose_answers(self, loses: Callable[[str], bool]) -> None:
        """Drop the answers to requests whose first line ``loses`` accepts."""
        self.choose = lambda line: "lost" if loses(line) else None

    def lose(self, method: str, mark: str, times: int) -> None:
        """Drop the first ``times`` answers to requests of ``method`` whose first line has ``mark``."""
        self.lose_answers(lambda line: line.startswith(method) and mark in line and self.faults["lost"] < times)

    async def start(self) -> str:
        """Listen; return the endpoint."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in (writer for writers in self._connections.values() for writer in writers):
            writer.transport.abort()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close their sockets in the next turn of the loop

    async def _serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        server, forward = await asyncio.open_connection(self._host, self._port)
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = (answer, forward)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._exchange(client, answer, server, forward):
                pass
        for writer in self._connections.pop(task):
            writer.close()

    async def _exchange(
        self,
        client: asyncio.StreamReader,
        answer: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        forward: asyncio.StreamWriter,
    ) -> bool:
        """Pass on one request and its answer. Returns False when the connection is done."""
        head = await client.readuntil(b"\r\n\r\n")
        line = head.split(b"\r\n", 1)[0].decode()
        self.requests += 1
        fault = self.choose(line)
        if fault is not None:
            self.faults[fault] += 1
        if fault == "reset":
            answer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            answer.transport.abort()
            return False
        if fault is not None and fault in self._refusals:
            await _refuse(client, answer, head, *self._refusals[fault])
            return False
        reply = await _forwarded(client, answer, server, forward, head)
        if fault == "lost":
            return False
        body = b"" if line.startswith("HEAD") else await read_body(server, reply)
        return await _pass_on(answer, line, reply, body, fault)


async def _refuse(client: asyncio.StreamReader, answer: asyncio.StreamWriter, head: bytes, status: str, code: str) -> None:
    if b"expect: 100-continue" not in head.lower():
        await client.readexactly(content_length(head))
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>planted</Message></Error>".encode()
    answer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode())
    answer.write(b"" if head.startswith(b"HEAD") else body)
    await answer.drain()


async def _forwarded(
    client: asyncio.StreamReader,
    answer: asyncio.StreamWriter,
    server: asyncio.StreamReader,
    forward: asyncio.StreamWriter,
    head: bytes,
) -> bytes:
    """Forward a request; returns the head of the answer."""
    forward.write(head)
    reply = b"HTTP/1.1 100"
    if b"expect: 100-continue" in head.lower():
        reply = await server.readuntil(b"\r\n\r\n")  # a server that refuses by the head alone does not ask for the body
    if reply.startswith(b"HTTP/1.1 100"):
        if reply.endswith(b"\r\n\r\n"):
            answer.write(reply)
        forward.write(await client.readexactly(content_length(head)))
        reply = await server.readuntil(b"\r\n\r\n")
    return reply


async def _pass_on(answer: asyncio.StreamWriter, line: str, reply: bytes, body: bytes, fault: Fault | None) -> bool:
    """Write the answer with its fault. Returns False when the connection is done."""
    if fault == "etag" and line.startswith(("GET", "HEAD")):
        reply = re.sub(rb'(?im)^(etag: *)"?[^"\r]*"?', rb'\1"another"', reply)
    answer.write(reply)
    if fault == "cut" and body:
        answer.write(body[: len(body) // 2])
        await answer.drain()
        return False
    step = len(body) // _PIECES + 1 if fault == "slow" else len(body) + 1
    for first in range(0, len(body), step):
        answer.write(body[first : first + step])
        await answer.drain()
        if fault == "slow":
            await asyncio.sleep(_PIECE_PAUSE_S)
    await answer.drain()
    return True


def content_length(head: bytes) -> int:
    """The length that a message's head announces."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


async def read_body(server: asyncio.StreamReader, head: bytes) -> bytes:
    """The body of an answer, as it is sent."""
    if b"transfer-encoding: chunked" not in head.lower():
        return await server.readexactly(content_length(head))
    body, size = b"", -1
    while size:
        line = await server.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        body += line + await server.readexactly(size + 2)
    return body


class Bursts:
    """Chooses bursts of up to three requests with the same fault, about ``share`` of all requests, each fault in turn.

    No more than ``in_a_row_max`` faults in a row hit requests with the same first line, so that a client which repeats a
    request once more often than that always succeeds.
    """

    def __init__(
        self, random: Random, share: float, *, faults: Sequence[Fault] = FAULTS, in_a_row_max: int = _IN_A_ROW_MAX
    ) -> None:
        self._random = random
        self._start = share / 2
        self._turn = list(faults)
        random.shuffle(self._turn)
        self._left = 0
        self._in_a_row: Counter[str] = Counter()
        self._in_a_row_max = in_a_row_max

    def __call__(self, line: str) -> Fault | None:
        if self._left == 0 and self._random.random() < self._start:
            self._left = self._random.randint(1, 3)
            self._turn.append(self._turn.pop(0))
        if self._left == 0 or self._in_a_row[line] >= self._in_a_row_max:
            self._in_a_row[line] = 0
            return None
        self._left -= 1
        self._in_a_row[line] += 1
        return self._turn[-1]
