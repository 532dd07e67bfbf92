"""Ranged reads over plain HTTP whose bodies the kernel copies into the memory that readers keep: half of obstore's CPU time.

Only the expected answer is understood here: status 206 with the requested range and its length. After any other answer, or if
the connection breaks or falls silent, the range is read through obstore, which knows what each answer means and what to repeat.
TLS is left to obstore, too, because it decrypts beside the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, cast
from urllib.parse import quote, urlsplit

import boto3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import BotoCoreError, ClientError

from stratalog_core.memory.receive_buffers import MAPPED_BYTES, ReceiveBuffers, announced_memory
from stratalog_core.ports import Background
from stratalog_tiering.store.obstore_reads import CONNECT_TIMEOUT_S, ObstoreReads, ReadLimits, covered_bytes, in_time
from stratalog_tiering.store.pieces import get_pieces
from stratalog_tiering.store.s3_attempts import time_limit
from stratalog_tiering.store.s3_reads import CREDENTIALS_LIFETIME
from stratalog_tiering.store.store_url import S3Location

PAUSE_S: Final = 1.0
"""How long obstore reads everything after an unexpected answer: a store that refuses requests gets hardly more of them."""
IDLE_CONNECTIONS_MAX: Final = 16
_HTTP_PORT: Final = 80
_HEAD_BYTES_MAX: Final = 16 * 1024
_SHOWN_BYTES: Final = 60
_RECEIVED_BYTES_MAX: Final = 1024 * 1024
"""The most that one receive copies, so that the event loop is never blocked for long."""
_KEPT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Buffers that are reused: enough for the blocks that a broker with default settings keeps, and the GETs in flight."""
_LOOKS_MAX: Final = 16
"""Blocks are evicted in about the order in which they were received, so the oldest buffers are usually free."""
_REUSED_BYTES_MIN: Final = 128 * 1024
"""Smaller pieces get memory of exactly their size: a reused buffer is rounded up, and all of it is charged to the cache."""


_log = logging.getLogger(__name__)


class _Unexpected(Exception):
    """obstore has to read this range. The message says why."""


class DirectReads:
    """Reads from ``endpoint``, an ``http://`` URL, and ``otherwise`` reads ranges that did not come as expected."""

    def __init__(
        self,
        location: S3Location,
        session: boto3.Session,
        endpoint: str,
        limits: ReadLimits,
        background: Background,
        otherwise: ObstoreReads,
    ) -> None:
        self._location = location
        self._url = f"{endpoint.rstrip('/')}/{location.bucket}/"
        self._address = _address(endpoint)
        self._limits = limits
        self._otherwise = otherwise
        self._signer = _Signer(session, location.region, background)
        self._buffers = ReceiveBuffers(_KEPT_BYTES_MAX, looks_max=_LOOKS_MAX)
        self._idle: deque[_Connection] = deque()
        self._is_closed = False
        self._paused_until_s = 0.0

    async def get(self, key: str) -> bytes:
        return await self._otherwise.get(key)

    async def get_range(self, key: str, start: int, length: int) -> memoryview:
        (content,) = await self.get_pieces(key, start, [length])
        return content

    async def get_pieces(self, key: str, start: int, lengths: Sequence[int]) -> list[memoryview]:
        """See ``pieces.py``. Fewer bytes only if the object ends earlier."""

        async def read() -> list[memoryview]:
            loop = asyncio.get_running_loop()
            if loop.time() >= self._paused_until_s:
                try:
                    return await self._attempt(key, start, lengths)
                except _Unexpected as unexpected:
                    _log.info("%s of %s is read through obstore: %s", key, self._location.url, unexpected)
                    self._paused_until_s = loop.time() + PAUSE_S
            return await get_pieces(self._otherwise, key, start, lengths)

        return await in_time(read, key, self._location.url, self._limits.of(sum(lengths)))

    def close(self) -> None:
        self._is_closed = True
        while self._idle:
            self._idle.pop().abort()

    async def _attempt(self, key: str, start: int, lengths: Sequence[int]) -> list[memoryview]:
        url = self._url + quote(self._location.name(key), safe="/~")
        request = await self._signer.ranged_get(url, start, sum(lengths))
        connection = self._idle.pop() if self._idle else await self._connected()
        try:
            async with time_limit(self._limits.silence_s) as heard:
                content = await connection.answer(request, start, lengths, heard)
        except TimeoutError:
            connection.abort()
            raise _Unexpected("silence") from None
        except BaseException:
            connection.abort()
            raise
        if connection.is_reusable and not self._is_closed and len(self._idle) < IDLE_CONNECTIONS_MAX:
            self._idle.append(connection)
        else:
            connection.abort()
        return content

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with time_limit(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(lambda: _Connection(self._buffers, self._lost), *self._address)
        except OSError as failure:  # TimeoutError is one
            raise _Unexpected(f"no connection: {failure}") from None
        return connection

    def _lost(self, connection: _Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)


def is_direct(endpoint: str) -> bool:
    """Whether ``endpoint`` is reached without TLS and without a proxy, which the environment may name."""
    host, _ = _address(endpoint)
    has_proxy = "http" in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)
    return endpoint.startswith("http://") and not has_proxy


def _address(endpoint: str) -> tuple[str, int]:
    parts = urlsplit(endpoint)
    return parts.hostname or "", parts.port or _HTTP_PORT


class _Signer:
    """Makes requests with AWS's signature, version 4."""

    def __init__(self, session: boto3.Session, region: str, background: Background) -> None:
        self._credentials: Credentials | None = session.get_credentials()
        self._region = region
        self._background = background
        self._frozen: ReadOnlyCredentials | None = None
        self._renew_at_s = 0.0

    async def ranged_get(self, url: str, start: int, length: int) -> bytes:
        parts = urlsplit(url)
        headers = {"Host": parts.netloc, "Range": f"bytes={start}-{start + length - 1}"}
        request = AWSRequest("GET", url, headers=headers)
        S3SigV4Auth(await self._current(), "s3", self._region).add_auth(request)
        lines = [f"GET {parts.path} HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items()), "", ""]
        return "\r\n".join(lines).encode("ascii")

    async def _current(self) -> ReadOnlyCredentials:
        now_s = asyncio.get_running_loop().time()
        if self._frozen is None or now_s >= self._renew_at_s:
            assert self._credentials is not None, "the store refuses to open without credentials"
            # May ask a service of the machine or of the cloud.
            try:
                self._frozen = await self._background.run(self._credentials.get_frozen_credentials)
            except (BotoCoreError, ClientError) as failure:
                raise _Unexpected(f"no credentials: {failure}") from failure
            self._renew_at_s = now_s + CREDENTIALS_LIFETIME.total_seconds()
        return self._frozen


class _Connection(asyncio.BufferedProtocol):
    """One request at a time. A connection that received anything else than expected is not used again."""

    def __init__(self, buffers: ReceiveBuffers, lost: Callable[[_Connection], None]) -> None:
        self.is_reusable = True
        self._buffers = buffers
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._head = bytearray(_HEAD_BYTES_MAX)
        self._start = 0
        self._lengths: deque[int] = deque()
        """Lengths of the pieces after the current one."""
        self._pieces: list[memoryview] = []
        self._piece: memoryview | None = None
        """The piece that is being received, the last of ``_pieces``; None while the head is."""
        self._received = 0
        """Bytes received of the piece, or of the head."""
        self._answer: asyncio.Future[list[memoryview]] | None = None
        self._heard: Callable[[], None] = _nothing

    async def answer(self, request: bytes, start: int, lengths: Sequence[int], heard: Callable[[], None]) -> list[memoryview]:
        """The requested pieces, fewer bytes only if the object ends before. Calls ``heard`` whenever some arrive.

        Raises ``_Unexpected`` if the answer is another one, or broke off.
        """
        if self._transport is None:
            raise _Unexpected("a broken connection")
        self._start, self._lengths, self._pieces = start, deque(lengths), []
        self._piece, self._received, self._heard = None, 0, heard
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self._answer, self._piece, self._pieces, self._heard = None, None, [], _nothing

    def abort(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no such class

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        self._refuse("a broken connection")
        self._lost(self)

    def eof_received(self) -> bool:
        self._refuse("an answer that breaks off")
        return False

    def get_buffer(self, _: int) -> memoryview:
        if self._piece is None:
            return memoryview(self._head)[self._received :]
        return self._piece[self._received : self._received + _RECEIVED_BYTES_MAX]

    def buffer_updated(self, size: int) -> None:
        if self._answer is None or self._answer.done():
            self._refuse("bytes that nobody asked for")
            self.abort()
            return
        self._heard()
        self._received += size
        if self._piece is None:
            self._read_head()
        elif self._received == len(self._piece):
            self._next_piece()

    def _read_head(self) -> None:
        end = self._head.find(b"\r\n\r\n", 0, self._received)
        if end < 0:
            if self._received == _HEAD_BYTES_MAX:
                self._refuse("a head that does not end")
            return
        length, self.is_reusable = _body_length(bytes(self._head[:end]), self._start, sum(self._lengths))
        rest = memoryview(self._head)[end + 4 : self._received]
        if not length or length < len(rest):
            self._refuse(f"another answer than expected: {bytes(self._head[:_SHOWN_BYTES])!r}")
            return
        self._shorten(length)
        self._next_piece()
        while self._piece is not None and rest:
            self._received = min(len(self._piece), len(rest))
            self._piece[: self._received] = rest[: self._received]
            rest = rest[self._received :]
            if self._received == len(self._piece):
                self._next_piece()

    def _shorten(self, length: int) -> None:
        """Expect only ``length`` bytes in all, because the object ends there."""
        excess = sum(self._lengths) - length
        while excess > 0:
            last = self._lengths.pop()
            if last > excess:
                self._lengths.append(last - excess)
            excess -= last

    def _next_piece(self) -> None:
        """Receive the next piece, or return the pieces if there is none."""
        self._received = 0
        if self._lengths:
            self._piece = self._memory(self._lengths.popleft())
            self._pieces.append(self._piece)
        elif self._answer is not None:
            self._piece = None
            self._answer.set_result(self._pieces)

    def _memory(self, size: int) -> memoryview:
        return self._buffers.take(size) if _REUSED_BYTES_MIN <= size <= MAPPED_BYTES else announced_memory(size)

    def _refuse(self, why: str) -> None:
        """Leave the answer to obstore."""
        self.is_reusable, self._piece, self._received = False, None, 0
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_Unexpected(why))


def _nothing() -> None:
    """Nobody waits for bytes."""


def _body_length(head: bytes, start: int, length: int) -> tuple[int, bool]:
    """Length of the body, and whether the connection stays open; 0 if the answer is not what was requested."""
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    covered = covered_bytes(headers.get("content-range", ""), start, length)
    is_framed = headers.get("content-length") == str(covered) and "transfer-encoding" not in headers
    if not status.startswith("HTTP/1.1 206 ") or not is_framed:
        return 0, False
    return covered, headers.get("connection", "").lower() != "close"
