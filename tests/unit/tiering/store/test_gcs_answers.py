"""Answers of Google Cloud Storage that its emulator does not give, by a server of our own."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import pytest_asyncio
from support.opened_store import opened

from stratalog_core.errors import Conflict, OutcomeUnknown, Refused, Unavailable
from stratalog_tiering.store import ObjectStore, StoreFeatures, s3_attempts

_PART = bytes(256 * 1024)


def _refusal(reason: str, message: str) -> bytes:
    return json.dumps({"error": {"errors": [{"reason": reason}], "message": message}}).encode()


_BODIES = {
    200: json.dumps(
        {"name": "probe", "size": "0", "etag": "e", "updated": "2026-11-02T10:00:00Z", "crc32c": "AAAAAA=="}
    ).encode(),
    400: _refusal("invalid", 'Provided CRC32C "AAAAAA==" doesn\'t match calculated CRC32C "BBBBBB==".'),
    412: _refusal("conditionNotMet", "At least one of the pre-conditions you specified did not hold."),
    429: _refusal("rateLimitExceeded", "The object exceeded the rate limit for object mutation operations."),
}


class Answers(BaseHTTPRequestHandler):
    """Begins every resumable upload, and answers each other request with the next of ``statuses``, the last one repeatedly.

    Requests about the bucket itself are answered with ``bucket``.
    """

    protocol_version = "HTTP/1.1"
    statuses: tuple[int, ...] = (200,)
    bucket: Mapping[str, object] = {}
    answered = 0

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = type(self)
        if "uploadType=resumable" in self.path:
            self._send(200, {"Location": "http://elsewhere/session?upload_id=1"})
            return
        if self.path.startswith("/storage/v1/b/history?"):
            self._send(200, {}, json.dumps(self.bucket).encode())
            return
        kind.answered += 1
        status, kind.statuses = kind.statuses[0], kind.statuses[1:] or kind.statuses
        self._send(status, {"Range": "bytes=0-262143"} if status == 308 else {}, _BODIES.get(status, b""))

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

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
        with pytest.raises((OutcomeUnknown, Refused, Unavailable)):
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


async def test_an_upload_that_failed_within_a_part_is_not_continued(
    store: ObjectStore, answers: type[Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service has half of the part; what would follow is at the wrong place."""
    monkeypatch.setattr(s3_attempts, "_FIRST_PAUSE_S", 0.0)
    upload = await store.create_upload("object", 2 * len(_PART))
    answers.statuses = (308, 503)
    with pytest.raises(Unavailable):
        await store.put_part(upload, 1, [_PART, _PART])
    asked = answers.answered
    with pytest.raises(Unavailable, match="start again"):
        await store.put_part(upload, 1, [_PART, _PART])
    with pytest.raises(Unavailable, match="start again"):
        await store.complete_upload(upload, [])
    assert answers.answered == asked
    answers.statuses = (204,)
    await store.abort_upload(upload)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which take no time."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(s3_attempts, "sleep", sleep)
    return found


async def test_an_object_is_written_at_most_once_per_second(
    store: ObjectStore, answers: type[Answers], pauses: list[float]
) -> None:
    """Of four writers that begin at the same time, as in the probe of a store, the last is admitted after three seconds."""
    answers.statuses = (429, 429, 429, 412)
    with pytest.raises(Conflict):
        await store.put("object", [b"content"])
    assert len(pauses) == 3
    assert min(pauses) >= 1.0


@pytest.mark.parametrize(
    ("statuses", "keeps_checksums"), [((429, 412, 200, 429, 400), True), ((429, 412, 200, 429, 200), False)]
)
async def test_a_write_that_came_too_early_says_nothing_about_a_feature(
    store: ObjectStore, answers: type[Answers], pauses: list[float], statuses: tuple[int, ...], keeps_checksums: bool
) -> None:
    answers.statuses = statuses
    found = await store.features("object")
    assert (found.conditional_replace, found.checksums_at_rest) == (True, keeps_checksums)


@pytest.mark.parametrize(
    ("bucket", "unsafe"),
    [
        ({}, ""),
        ({"retentionPolicy": {"retentionPeriod": "3600"}}, "the bucket has a retention policy"),
        ({"defaultEventBasedHold": True}, "the bucket holds new objects"),
    ],
)
async def test_a_bucket_that_keeps_objects_from_being_deleted_is_not_written_to(
    store: ObjectStore, answers: type[Answers], bucket: dict[str, object], unsafe: str
) -> None:
    answers.bucket, answers.statuses = bucket, (412, 200, 400)
    found: StoreFeatures = await store.features("object")
    assert found.unsafe.startswith(unsafe)
    assert bool(found.unsafe) == bool(unsafe)
