"""Answers of Google Cloud Storage that its emulator does not give, by a server of our own."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import pytest_asyncio
from support.opened_store import opened

from stratalog_core.errors import Invalid, OutcomeUnknown, Unavailable
from stratalog_tiering.store import ObjectStore

_PART = bytes(256 * 1024)


class Answers(BaseHTTPRequestHandler):
    """Begins every resumable upload, and answers each other request with the next of ``statuses``, the last one repeatedly."""

    protocol_version = "HTTP/1.1"
    statuses: tuple[int, ...] = (200,)

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = type(self)
        if "uploadType=resumable" in self.path:
            self._send(200, {"Location": "http://elsewhere/session?upload_id=1"})
            return
        status, kind.statuses = kind.statuses[0], kind.statuses[1:] or kind.statuses
        self._send(status, {"Range": "bytes=0-262143"} if status == 308 else {})

    def _send(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    do_DELETE = do_GET = do_POST = do_PUT = _answer  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def answers() -> type[Answers]:
    return type("Given", (Answers,), {})


@pytest_asyncio.fixture
async def store(answers: type[Answers]) -> AsyncIterator[ObjectStore]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    async with opened(f"gs://history?endpoint=http://127.0.0.1:{server.server_address[1]}") as store:
        yield store
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("status", [308, 499])
async def test_only_an_upload_of_several_parts_takes_308_and_499_for_an_answer(
    store: ObjectStore, answers: type[Answers], status: int
) -> None:
    """308 is what a gateway answers that wants TLS; an object was not written, nor deleted."""
    answers.statuses = (status,)
    for request in (store.put("object", [b"content"]), store.delete(["object"]), store.head("object")):
        with pytest.raises((Invalid, OutcomeUnknown, Unavailable)):
            await request


@pytest.mark.parametrize("status", [404, 410, 499])
async def test_an_upload_that_the_service_has_ended_begins_again(
    store: ObjectStore, answers: type[Answers], status: int
) -> None:
    """Neither a missing object nor a wrong configuration, although the answer has no body that says so."""
    upload = await store.create_upload("object", len(_PART))
    answers.statuses = (308, status)
    await store.put_part(upload, 1, [_PART])
    with pytest.raises(Unavailable, match="no longer exists; start again"):
        await store.put_part(upload, 2, [_PART])
    await store.abort_upload(upload)
    other = await store.create_upload("object", len(_PART))
    part = await store.put_part(other, 1, [b"end"])
    with pytest.raises(Unavailable, match="no longer exists; start again"):
        await store.complete_upload(other, [part])
    await store.abort_upload(other)
    assert [left async for left in store.list_uploads()] == []
