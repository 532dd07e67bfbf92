"""A page with status 200 from a gateway or proxy, instead of the store, confirms nothing."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import pytest_asyncio
from support.opened_store import opened

from stratalog_core.errors import OutcomeUnknown, Unavailable
from stratalog_tiering.store import PART_BYTES_MIN, ObjectStore, s3_attempts

_PAGE = b"<!DOCTYPE html><html><body><p>Log in</p></body></html>"


class Gateway(BaseHTTPRequestHandler):
    """Answers every request with a page."""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(_PAGE)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(_PAGE)

    do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = _answer  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


@pytest_asyncio.fixture(params=["az", "gs", "s3"])
async def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ObjectStore]:
    monkeypatch.setattr(s3_attempts, "_FIRST_PAUSE_S", 0.0)
    for name in ("AZURE_STORAGE_ACCOUNT_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a2V5")
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        account = f"&account=mine&endpoint={endpoint}/mine" if request.param == "az" else f"&endpoint={endpoint}"
        async with opened(f"{request.param}://history?{account[1:]}") as made:
            yield made
        server.shutdown()
        thread.join()


async def test_a_page_confirms_nothing(store: ObjectStore) -> None:
    with pytest.raises(OutcomeUnknown):
        await store.put("object", [b"content"])
    with pytest.raises(Unavailable):
        await store.delete(["object"])


async def test_a_page_takes_no_part(store: ObjectStore) -> None:
    async def send_part() -> None:
        upload = await store.create_upload("object", PART_BYTES_MIN)
        await store.put_part(upload, 1, [b"content"])

    with pytest.raises(Unavailable):
        await send_part()


async def test_a_page_describes_no_object(store: ObjectStore) -> None:
    with pytest.raises(Unavailable):
        await store.head("object")
