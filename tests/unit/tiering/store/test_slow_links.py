"""Writes over a link that carries an object in more time than a connection may take to open."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.opened_store import opened

from stratalog_tiering.store import http_requests, s3

_CONNECT_TIMEOUT_S = 1.0
_BODY = bytes(16 * 1024 * 1024)
_PIECE = 512 * 1024
_PAUSE_S = 0.08
"""The body takes two and a half connect timeouts, and a pause less than a tenth of one. An attempt may fail under load."""


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
        self.send_response(200)
        self.send_header("ETag", '"0"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_PUT = do_POST = _answer  # noqa: N815

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
