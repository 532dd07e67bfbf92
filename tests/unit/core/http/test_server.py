"""The HTTP server on real sockets: methods, malformed and endless requests, and clients that send nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from stratalog_core.errors import Conflict
from stratalog_core.http.endpoints import Answer
from stratalog_core.http.server import CONNECTIONS_MAX, HEAD_BYTES_MAX, HttpServer


async def _echo(path: str) -> Answer:
    if path == "/broken":
        raise ZeroDivisionError
    return Answer(status=200, body=path.encode())


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    made = HttpServer(_echo)
    await made.start("127.0.0.1:0")
    yield made
    await made.close()


async def _connect(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def _ask(server: HttpServer, request: bytes) -> tuple[int, bytes, bytes]:
    """Status, head and body of the response; status 0 if there was none."""
    reader, writer = await _connect(server)
    try:
        writer.write(request)
        response = await reader.read()
    finally:
        writer.close()
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, head.lower(), body


def _request(method: str, path: str) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode()


async def test_get_and_head(server: HttpServer) -> None:
    status, head, body = await _ask(server, _request("GET", "/metrics?name=x"))
    assert (status, body) == (200, b"/metrics")
    assert b"connection: close" in head
    status, head, body = await _ask(server, _request("HEAD", "/metrics"))
    assert (status, body) == (200, b"")
    assert b"content-length: 8" in head


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_other_methods_are_refused(server: HttpServer, method: str) -> None:
    status, head, _ = await _ask(server, _request(method, "/metrics"))
    assert status == 405
    assert b"allow: get, head" in head


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 2 * HEAD_BYTES_MAX + b"\r\n\r\n", 431),
    ],
    ids=["tls", "no version", "long head"],
)
async def test_malformed_requests_are_refused(server: HttpServer, request_bytes: bytes, expected: int) -> None:
    status, _, _ = await _ask(server, request_bytes)
    assert status == expected


async def test_a_failure_behind_it_ends_one_connection_only(server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    assert (await _ask(server, _request("GET", "/broken")))[0] == 0
    assert "ZeroDivisionError" in caplog.text
    assert (await _ask(server, _request("GET", "/")))[0] == 200


async def test_clients_that_send_nothing_keep_nobody_out(server: HttpServer) -> None:
    idle = [await _connect(server) for _ in range(CONNECTIONS_MAX + 5)]
    for _, writer in idle:
        writer.write(b"GET / HT")
    assert (await _ask(server, _request("GET", "/")))[0] == 200
    # Those that came first had to go.
    with contextlib.suppress(ConnectionResetError):
        assert await idle[0][0].read() == b""
    for _, writer in idle:
        writer.close()


async def test_a_connection_ends_with_its_time() -> None:
    server = HttpServer(_echo, connection_s=0.05)
    await server.start("127.0.0.1:0")
    reader, writer = await _connect(server)
    writer.write(b"GET / HT")
    with contextlib.suppress(ConnectionResetError):  # The time may be over before the server has read this.
        assert await reader.read() == b""
    writer.close()
    await server.close()


async def test_a_taken_port_is_a_conflict(server: HttpServer) -> None:
    other = HttpServer(_echo)
    with pytest.raises(Conflict, match=server.address):
        await other.start(server.address)
    await other.close()
