"""Writes over a link that carries an object in more time than a connection may take to open, and reads as slow."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.opened_store import opened

from stratalog_core.errors import Unavailable
from stratalog_core.system import ThreadBackground
from stratalog_tiering.store import READ_ENGINES, http_requests, s3
from stratalog_tiering.store.obstore_reads import ReadLimits
from stratalog_tiering.store.s3 import S3Store
from stratalog_tiering.store.store_url import S3Location

_CONNECT_TIMEOUT_S = 1.0
_BODY = bytes(16 * 1024 * 1024)
_PIECE = 512 * 1024
_PAUSE_S = 0.08
"""The body takes two and a half connect timeouts, and a pause less than a tenth of one. An attempt may fail under load."""


_READ_BYTES = 3 * 1024 * 1024
_SILENCE_S = 2.0
"""The bytes take twice as long as a read of nothing may, whenever they are sent."""
_ATTEMPTS = 5
"""A loaded machine may send nothing for the time of the silence."""


class SlowReader(BaseHTTPRequestHandler):
    """Takes a body in pieces, with a pause before each."""

    protocol_version = "HTTP/1.1"
    taken_bytes = 0
    pause = threading.Event()

    def _answer(self) -> None:
        kind = type(self)
        left = int(self.headers["Content-Length"])
        while left:
            kind.pause.wait(_PAUSE_S)
            piece = self.rfile.read(min(left, _PIECE))
            if not piece:
                return
            left -= len(piece)
        kind.taken_bytes = int(self.headers["Content-Length"])
        is_azure, answer = "x-ms-version" in self.headers, b"{}" if self.command == "POST" else b""
        self.send_response(201 if is_azure else 200)
        self.send_header("ETag", '"0"')
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_POST = _answer  # noqa: N815

    def do_GET(self) -> None:
        """Send a range of zeros in pieces, with a pause before each."""
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.send_response(206)
        for name, value in (
            ("ETag", '"0"'), ("Last-Modified", "Mon, 02 Nov 2026 10:00:00 GMT"), ("Content-Length", str(last + 1 - first)),
            ("Content-Range", f"bytes {first}-{last}/{_READ_BYTES}"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        for start in range(first, last + 1, _PIECE // 8):
            type(self).pause.wait(_PAUSE_S)
            self.wfile.write(bytes(min(_PIECE // 8, last + 1 - start)))

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class SlowServer(ThreadingHTTPServer):
    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        super().server_bind()

    def handle_error(self, request: object, client_address: object) -> None:
        """The client has given up."""


@pytest.fixture
def server() -> Iterator[tuple[type[SlowReader], str]]:
    pause = threading.Event()
    handler = type("Reader", (SlowReader,), {"pause": pause})
    server = SlowServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_address[1]}"
    pause.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("url", ["s3://history?endpoint={0}", "gs://history?endpoint={0}", "az://history?endpoint={0}/account"])
async def test_an_object_may_take_longer_than_a_connection(
    url: str, server: tuple[type[SlowReader], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """urllib3 allows each piece of a body as long as a connection may take to open; a body of bytes is one piece."""
    handler, endpoint = server
    monkeypatch.setattr(s3, "CONNECT_TIMEOUT_S", _CONNECT_TIMEOUT_S)
    monkeypatch.setattr(http_requests, "CONNECT_TIMEOUT_S", _CONNECT_TIMEOUT_S)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "worker")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    async with opened(url.format(endpoint)) as store:
        await store.put("object", [_BODY])
    assert handler.taken_bytes >= len(_BODY)


@pytest.mark.parametrize("engine", READ_ENGINES)
async def test_many_bytes_may_take_longer_than_none(
    engine: str, server: tuple[type[SlowReader], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment of 8 MiB is read back with one request, beside those of other partitions."""
    _, endpoint = server
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "worker")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    location = S3Location(bucket="history", prefix="", endpoint=endpoint, region="us-east-1")
    limits = ReadLimits(total_s=_SILENCE_S, silence_s=_SILENCE_S)
    background = ThreadBackground(1, "store")
    store = S3Store(location, read_engine=engine, background=background, threads=1, read_limits=limits)
    for attempt in range(_ATTEMPTS):
        try:
            assert len(await store.get_range("object", 0, _READ_BYTES)) == _READ_BYTES
            break
        except Unavailable:
            assert attempt + 1 < _ATTEMPTS
    await store.close()
    background.close()
