"""Direct reads: connections are kept, bodies are received in place, and what is not expected is read through obstore."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import boto3
import pytest
import pytest_asyncio
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import CredentialRetrievalError

from stratalog_core.errors import Unavailable
from stratalog_core.system import ThreadBackground
from stratalog_tiering.store import direct_reads
from stratalog_tiering.store.direct_reads import IDLE_CONNECTIONS_MAX, DirectReads, is_direct
from stratalog_tiering.store.obstore_reads import ObstoreReads, ReadLimits
from stratalog_tiering.store.store_url import S3Location

CONTENT = bytes(range(251)) * 20_000
NAME = "segments/a=1/b-2.segment"
Answer = Callable[[asyncio.StreamWriter, int, int], None]


def right(answer: asyncio.StreamWriter, start: int, stop: int) -> None:
    answer.write(head(start, stop) + CONTENT[start:stop])


def head(start: int, stop: int, *more: str, status: str = "206 Partial Content") -> bytes:
    covered = f"Content-Range: bytes {start}-{stop - 1}/{len(CONTENT)}"
    lines = [f"HTTP/1.1 {status}", covered, f"content-length: {stop - start}", *more, "", ""]
    return "\r\n".join(lines).encode()


def in_pieces(answer: asyncio.StreamWriter, start: int, stop: int) -> None:
    """Each byte of the head is a segment of its own."""

    async def send() -> None:
        for byte in head(start, stop):
            answer.write(bytes([byte]))
            await answer.drain()
            await asyncio.sleep(0)
        answer.write(CONTENT[start:stop])

    answer.sending = asyncio.ensure_future(send())  # type: ignore[attr-defined]


class Server:
    """Answers ranged GETs of ``CONTENT`` on connections that stay open, by ``answer``."""

    def __init__(self) -> None:
        self.answer: Answer = right
        self.connections: list[asyncio.StreamWriter] = []
        self.requests: list[bytes] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, asked: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        self.connections.append(answer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while request := await asked.readuntil(b"\r\n\r\n"):
                self.requests.append(request)
                first, last = map(int, re.search(rb"Range: bytes=(\d+)-(\d+)", request).groups())  # type: ignore[union-attr]
                self.answer(answer, first, min(last + 1, len(CONTENT)))
        answer.close()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self.connections:
            connection.transport.abort()


class Otherwise:
    """In place of obstore."""

    def __init__(self) -> None:
        self.asked = 0

    async def get_range(self, key: str, start: int, length: int) -> memoryview:
        self.asked += 1
        return memoryview(b"otherwise")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    yield made
    await made.close()


@pytest.fixture
def otherwise() -> Otherwise:
    return Otherwise()


@pytest_asyncio.fixture
async def reads(
    server: Server, otherwise: Otherwise, s3_credentials: None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[DirectReads]:
    monkeypatch.setattr(direct_reads, "PAUSE_S", 0.0)
    endpoint = await server.start()
    location = S3Location(bucket="bucket", prefix="a b/ü+&?/", endpoint=endpoint, region="us-east-1")
    background = ThreadBackground(1, "store")
    limits = ReadLimits(total_s=60.0, silence_s=30.0)
    made = DirectReads(location, boto3.Session(), endpoint, limits, background, cast(ObstoreReads, otherwise))
    yield made
    made.close()
    background.close()


@pytest.mark.parametrize(("start", "length"), [(0, 1), (7, 1_000_000), (len(CONTENT) - 3, 3), (len(CONTENT) - 3, 100)])
async def test_a_range_is_read_up_to_the_end_of_the_object(
    reads: DirectReads, otherwise: Otherwise, start: int, length: int
) -> None:
    assert await reads.get_range(NAME, start, length) == CONTENT[start : start + length]
    assert otherwise.asked == 0


@pytest.mark.parametrize("sends", [right, in_pieces])
@pytest.mark.parametrize("lengths", [(1, 1), (3, 1, 200_000, 7), (1_000_000, 1_000_000), (100, 3_000_000, 5, 5)])
async def test_adjacent_pieces_are_received_into_memory_of_their_own(
    reads: DirectReads, server: Server, otherwise: Otherwise, sends: Answer, lengths: tuple[int, ...]
) -> None:
    server.answer = sends
    for start in (0, 11):
        pieces = await reads.get_pieces(NAME, start, lengths)
        assert [len(piece) for piece in pieces] == list(lengths)
        assert b"".join(pieces) == CONTENT[start : start + sum(lengths)]
        assert len({id(piece.obj) for piece in pieces}) == len(lengths)
    assert (otherwise.asked, len(server.requests), len(server.connections)) == (0, 2, 1)


@pytest.mark.parametrize(("there", "expected"), [(1, [1]), (10, [10]), (11, [10, 1]), (29, [10, 10, 9]), (30, [10, 10, 10])])
async def test_pieces_end_where_the_object_ends(
    reads: DirectReads, otherwise: Otherwise, there: int, expected: list[int]
) -> None:
    pieces = await reads.get_pieces(NAME, len(CONTENT) - there, [10, 10, 10])
    assert [len(piece) for piece in pieces] == expected
    assert b"".join(pieces) == CONTENT[-there:]
    assert otherwise.asked == 0


async def test_reads_that_follow_each_other_share_a_connection(reads: DirectReads, server: Server) -> None:
    for start in range(0, 50_000, 10_000):
        assert await reads.get_range(NAME, start, 10_000) == CONTENT[start : start + 10_000]
    assert len(server.connections) == 1


async def test_no_more_connections_stay_open_than_the_bound(reads: DirectReads, server: Server) -> None:
    for _ in range(2):
        await asyncio.gather(*[reads.get_range(NAME, 0, 1000) for _ in range(2 * IDLE_CONNECTIONS_MAX)])
    assert len(server.connections) == 3 * IDLE_CONNECTIONS_MAX


async def test_what_readers_keep_is_not_overwritten(reads: DirectReads) -> None:
    kept = [await reads.get_range(NAME, start, 100_000) for start in range(0, 4_000_000, 100_000)]
    assert b"".join(kept) == CONTENT[:4_000_000]


async def test_heads_may_arrive_in_pieces(reads: DirectReads, server: Server, otherwise: Otherwise) -> None:
    server.answer = in_pieces
    assert await reads.get_range(NAME, 5, 5000) == CONTENT[5:5005]
    assert otherwise.asked == 0


def closed(answer: asyncio.StreamWriter, start: int, stop: int) -> None:
    answer.close()


def reset(answer: asyncio.StreamWriter, start: int, stop: int) -> None:
    answer.transport.abort()


def chunked(answer: asyncio.StreamWriter, start: int, stop: int) -> None:
    answer.write(head(start, stop, "Transfer-Encoding: chunked") + CONTENT[start:stop])


def other_range(answer: asyncio.StreamWriter, start: int, stop: int) -> None:
    answer.write(head(start + 1, stop + 1) + CONTENT[start + 1 : stop + 1])


def other_length(answer: asyncio.StreamWriter, start: int, stop: int) -> None:
    answer.write(head(start, stop).replace(b"content-length: ", b"content-length: 1") + CONTENT)


def whole_object(answer: asyncio.StreamWriter, start: int, stop: int) -> None:
    answer.write(head(start, stop, status="200 OK") + CONTENT[start:stop])


def endless_head(answer: asyncio.StreamWriter, start: int, stop: int) -> None:
    answer.write(b"HTTP/1.1 206 Partial Content\r\n" + b"X-Padding: 0123456789\r\n" * 5000)


def no_http(answer: asyncio.StreamWriter, start: int, stop: int) -> None:
    answer.write(b"\xff\r\n\r\n")


def cut(answer: asyncio.StreamWriter, start: int, stop: int) -> None:
    answer.write(head(start, stop) + CONTENT[start : stop - 1])
    answer.close()


@pytest.mark.parametrize(
    "answer", [closed, reset, chunked, other_range, other_length, whole_object, endless_head, no_http, cut]
)
async def test_anything_unexpected_is_left_to_obstore(
    reads: DirectReads, server: Server, otherwise: Otherwise, answer: Answer
) -> None:
    server.answer = answer
    assert bytes(await reads.get_range(NAME, 0, 5000)) == b"otherwise"
    server.answer = right
    assert await reads.get_range(NAME, 0, 5000) == CONTENT[:5000]
    assert (otherwise.asked, len(server.connections)) == (1, 2)


async def test_a_store_that_never_answers_as_expected_is_asked_once_in_a_while(
    reads: DirectReads, server: Server, otherwise: Otherwise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_reads, "PAUSE_S", 3600.0)
    server.answer = chunked
    for _ in range(5):
        await reads.get_range(NAME, 0, 5000)
    assert (otherwise.asked, len(server.requests)) == (5, 1)


def too_much(answer: asyncio.StreamWriter, start: int, stop: int) -> None:
    answer.write(head(start, stop) + CONTENT[start:stop] + b"HTTP/1.1 206 Partial Content\r\n")


async def test_no_answer_belongs_to_a_later_request(reads: DirectReads, server: Server, otherwise: Otherwise) -> None:
    server.answer = too_much
    first = await reads.get_range(NAME, 0, 5000)
    server.answer = right
    assert await reads.get_range(NAME, 10, 5000) in (CONTENT[10:5010], b"otherwise")
    assert first in (CONTENT[:5000], b"otherwise")
    assert await reads.get_range(NAME, 10, 5000) == CONTENT[10:5010]


async def test_a_connection_that_the_server_has_closed_is_not_used(
    reads: DirectReads, server: Server, otherwise: Otherwise
) -> None:
    await reads.get_range(NAME, 0, 10)
    server.connections[0].close()
    await server.connections[0].wait_closed()
    async with asyncio.timeout(60.0):
        while reads._idle:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)
    assert await reads.get_range(NAME, 0, 10) == CONTENT[:10]
    assert otherwise.asked == 0


async def test_a_cancelled_read_ends_its_connection(reads: DirectReads, server: Server) -> None:
    asked = asyncio.Event()
    server.answer = lambda *_: asked.set()
    reading = asyncio.ensure_future(reads.get_range(NAME, 0, 10))
    await asked.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await server.connections[0].wait_closed()
    assert not reads._idle


async def test_silence_is_left_to_obstore(reads: DirectReads, server: Server, otherwise: Otherwise) -> None:
    reads._limits = ReadLimits(total_s=60.0, silence_s=0.2)
    server.answer = lambda *_: None
    assert bytes(await reads.get_range(NAME, 0, 10)) == b"otherwise"


async def test_credentials_that_cannot_be_renewed_are_left_to_obstore(
    reads: DirectReads, server: Server, otherwise: Otherwise
) -> None:
    def renew() -> ReadOnlyCredentials:
        raise CredentialRetrievalError(provider="web-identity", error_msg="no answer")

    reads._signer._credentials = SimpleNamespace(get_frozen_credentials=renew)  # type: ignore[assignment]
    assert bytes(await reads.get_range(NAME, 0, 10)) == b"otherwise"
    assert not server.connections


async def test_both_attempts_together_have_the_limit_of_one(
    reads: DirectReads, server: Server, otherwise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: Any) -> memoryview:
        await asyncio.Event().wait()
        raise AssertionError

    reads._limits = ReadLimits(total_s=0.5, silence_s=0.2)
    server.answer = lambda *_: None
    otherwise.get_range = hang
    with pytest.raises(Unavailable):
        await reads.get_range(NAME, 0, 10)


@pytest.mark.parametrize(
    ("endpoint", "environment", "expected"),
    [
        ("http://127.0.0.1:9000", {}, True),
        ("http://[::1]:9000/path", {}, True),
        ("https://127.0.0.1:9000", {}, False),
        ("http://store:9000", {"http_proxy": "http://proxy:3128"}, False),
        ("http://store:9000", {"http_proxy": "http://proxy:3128", "no_proxy": "store"}, True),
        ("http://store:9000", {"https_proxy": "http://proxy:3128"}, True),
    ],
)
def test_tls_and_proxies_are_left_to_obstore(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, environment: dict[str, str], expected: bool
) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_direct(endpoint) is expected
