"""Answers that break off, stall, trickle or refuse: to reads by every engine and to writes, from a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from stratalog_core.errors import Corrupt, Invalid, NoSuchObject, OutcomeUnknown, Refused, StratalogError, Unavailable
from stratalog_core.object_lock import LockMode, ObjectLock
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.store import PART_BYTES_MIN, READ_ENGINES, ObjectStore, open_store, s3_attempts
from stratalog_tiering.store.obstore_reads import ReadLimits
from stratalog_tiering.store.s3 import S3Store
from stratalog_tiering.store.store_url import S3Location

CONTENT = bytes(range(256)) * 400
PATIENT = ReadLimits(total_s=60.0, silence_s=30.0)
"""Where an answer must come, however slow the machine."""
IMPATIENT = ReadLimits(total_s=1.5, silence_s=0.3)
"""Where none ever does."""
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def _head(status: str, length: int, size: int = len(CONTENT)) -> bytes:
    tags = 'ETag: "e"\r\nLast-Modified: Mon, 02 Nov 2026 10:00:00 GMT\r\nAccept-Ranges: bytes\r\n'
    covered = f"Content-Range: bytes 0-{length - 1}/{size}\r\n" if status.startswith("206") else ""
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{tags}{covered}Connection: close\r\n\r\n".encode()


async def whole(answer: asyncio.StreamWriter) -> None:
    answer.write(_head("206 Partial Content", len(CONTENT)) + CONTENT)


async def cut(answer: asyncio.StreamWriter) -> None:
    answer.write(_head("206 Partial Content", len(CONTENT)) + CONTENT[:5000])


async def shorter(answer: asyncio.StreamWriter) -> None:
    answer.write(_head("206 Partial Content", 5000, size=5000) + CONTENT[:5000])


async def another_range(answer: asyncio.StreamWriter) -> None:
    answer.write(_head("206 Partial Content", 5000) + CONTENT[:5000])


async def no_range(answer: asyncio.StreamWriter) -> None:
    answer.write(_head("200 OK", len(CONTENT)) + CONTENT)


async def stalled(answer: asyncio.StreamWriter) -> None:
    answer.write(_head("206 Partial Content", len(CONTENT)) + CONTENT[:5000])
    await asyncio.Event().wait()


async def silent(answer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def trickling(answer: asyncio.StreamWriter) -> None:
    answer.write(_head("206 Partial Content", len(CONTENT)))
    for byte in CONTENT:
        answer.write(bytes([byte]))
        await answer.drain()
        await asyncio.sleep(0.02)


def refused(status: str, code: str) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        writer.write(_head(status, len(body)) + body)

    return answer


def document(name: str, content: str) -> Answer:
    body = f"<?xml version='1.0'?><{name}>{content}</{name}>".encode()

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(_head("200 OK", len(body)) + body)

    return answer


VERSIONS_KEPT = document("VersioningConfiguration", "<Status>Enabled</Status>")
EXPIRED = refused("400 Bad Request", "ExpiredToken")


def page(status: str, *, is_xml: bool = True) -> Answer:
    """What a gateway or proxy answers instead of the server."""
    body = f"<!DOCTYPE html><html><body><p>{status}</p>{'' if is_xml else '<br>'}</body></html>".encode()

    async def answer(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)

    return answer


def bare(status: str) -> Answer:
    """An answer to a HEAD."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(_head(status, 0))

    return answer


async def stored(answer: asyncio.StreamWriter) -> None:
    answer.write(_head("200 OK", 0))


def _body_bytes(head: bytes) -> int:
    return int(found[1]) if (found := re.search(rb"\r\ncontent-length: *(\d+)", head)) else 0


class ScriptedServer:
    """Answers each request with the next of ``script``, the last one for ever."""

    def __init__(self) -> None:
        self.script: deque[Answer] = deque([whole])
        self.answered = 0
        self.asked = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, request: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await request.readuntil(b"\r\n\r\n")).lower()
            if b"expect: 100-continue" in head:
                answer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await request.readexactly(_body_bytes(head))
            self.answered += 1
            self.asked.set()
            await (self.script.popleft() if len(self.script) > 1 else self.script[0])(answer)
            await answer.drain()
        answer.close()
        with contextlib.suppress(ConnectionError):
            await answer.wait_closed()
        self._tasks.discard(task)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest_asyncio.fixture
async def server(s3_credentials: None) -> AsyncIterator[ScriptedServer]:
    made = ScriptedServer()
    yield made
    await made.close()


@contextlib.asynccontextmanager
async def store_of(server: ScriptedServer, engine: str, limits: ReadLimits) -> AsyncIterator[ObjectStore]:
    location = S3Location(bucket="bucket", prefix="", endpoint=await server.start(), region="us-east-1")
    background = ThreadBackground(2, "store")
    opened = S3Store(location, read_engine=engine, background=background, threads=2, read_limits=limits)
    yield opened
    await opened.close()
    background.close()


@pytest_asyncio.fixture(params=READ_ENGINES)
async def store(request: pytest.FixtureRequest, server: ScriptedServer) -> AsyncIterator[ObjectStore]:
    async with store_of(server, request.param, PATIENT) as opened:
        yield opened


@pytest_asyncio.fixture(params=READ_ENGINES)
async def impatient_store(request: pytest.FixtureRequest, server: ScriptedServer) -> AsyncIterator[ObjectStore]:
    async with store_of(server, request.param, IMPATIENT) as opened:
        yield opened


@pytest_asyncio.fixture
async def quick_store(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ObjectStore]:
    """For requests that no engine sends. It repeats them without a pause."""
    monkeypatch.setattr(s3_attempts, "_FIRST_PAUSE_S", 0.0)
    async with store_of(server, READ_ENGINES[0], PATIENT) as opened:
        yield opened


async def read(store: ObjectStore) -> bytes:
    return bytes(await store.get_range("object", 0, len(CONTENT)))


async def dropped(answer: asyncio.StreamWriter) -> None:
    answer.transport.abort()


@pytest.mark.parametrize(
    "fault",
    [
        cut,
        dropped,
        refused("503 Slow Down", "SlowDown"),
        refused("500 Oh", "InternalError"),
        refused("429 Too Many Requests", "TooManyRequests"),
        refused("400 Bad Request", "RequestTimeout"),
    ],
)
async def test_what_failed_once_is_read_again(store: ObjectStore, server: ScriptedServer, fault: Answer) -> None:
    server.script.extendleft([fault])
    assert await read(store) == CONTENT
    assert server.answered == 2


@pytest.mark.parametrize(
    "fault", [cut, stalled, silent, trickling, another_range, no_range, refused("503 Slow Down", "SlowDown")]
)
async def test_what_never_gets_whole_is_unavailable_in_time(
    impatient_store: ObjectStore, server: ScriptedServer, fault: Answer
) -> None:
    server.script = deque([fault])
    async with asyncio.timeout(PATIENT.silence_s):
        with pytest.raises(Unavailable):
            await read(impatient_store)


async def test_an_object_that_ends_early_is_told_from_an_answer_that_was_cut(
    store: ObjectStore, server: ScriptedServer
) -> None:
    server.script = deque([shorter])
    with pytest.raises(Corrupt, match="byte 5000"):
        await read(store)
    assert server.answered == 1


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (refused("404 Not Found", "NoSuchKey"), NoSuchObject),
        (refused("404 Not Found", "NoSuchBucket"), Refused),
        (refused("403 Forbidden", "AccessDenied"), Refused),
        (refused("416 Range Not Satisfiable", "InvalidRange"), Corrupt),
    ],
)
@pytest.mark.parametrize(("engine", "requests"), [("direct", 2), ("obstore", 1), ("aioboto3", 1)])
async def test_refusals_mean_the_same_by_every_engine(
    server: ScriptedServer, engine: str, requests: int, fault: Answer, error: type[StratalogError]
) -> None:
    """Direct reads leave it to obstore what a refusal means, so that it asks once more."""
    server.script = deque([fault])
    async with store_of(server, engine, PATIENT) as store:
        with pytest.raises(error) as raised:
            await read(store)
    assert type(raised.value) is error
    assert server.answered == requests


@pytest.mark.parametrize("is_xml", [True, False])
async def test_a_page_of_a_gateway_is_no_absence(store: ObjectStore, server: ScriptedServer, is_xml: bool) -> None:
    server.script = deque([page("404 Not Found", is_xml=is_xml), whole])
    assert await read(store) == CONTENT


@pytest.mark.parametrize(
    ("explained", "error"),
    [
        (refused("404 Not Found", "NoSuchKey"), NoSuchObject),
        (refused("404 Not Found", "NoSuchBucket"), Refused),
        (page("404 Not Found"), Unavailable),
        (page("404 Not Found", is_xml=False), Unavailable),
    ],
)
async def test_the_server_is_asked_what_a_head_did_not_find(
    quick_store: ObjectStore, server: ScriptedServer, explained: Answer, error: type[StratalogError]
) -> None:
    """Such an answer has no body, and a gateway's looks the same."""
    server.script = deque([bare("404 Not Found"), explained] * 4)
    with pytest.raises(error):
        await quick_store.head("object")
    server.script = deque([bare("404 Not Found"), whole, bare("200 OK")])
    assert (await quick_store.head("object")).etag == "e"


async def test_a_refused_question_before_a_request_is_a_refusal(quick_store: ObjectStore, server: ScriptedServer) -> None:
    server.script = deque([VERSIONS_KEPT, EXPIRED])
    with pytest.raises(Refused, match="s3:ListBucketVersions"):
        await quick_store.delete(["object"])
    with pytest.raises(Refused, match="s3:GetBucketObjectLockConfiguration"):
        await quick_store.put("object", [b"content"], lock=ObjectLock(mode=LockMode.GOVERNANCE, until_ms=1000))


async def test_expired_credentials_do_not_mean_that_no_versions_are_kept(
    quick_store: ObjectStore, server: ScriptedServer
) -> None:
    server.script = deque([EXPIRED])
    with pytest.raises(Refused):
        await anext(quick_store.list_keys(""))
    hidden = "<Name>bucket</Name><Version><Key>hidden</Key><VersionId>1</VersionId></Version>"
    server.script = deque([VERSIONS_KEPT, document("ListVersionsResult", hidden)])
    assert [key async for key in quick_store.list_keys("")] == ["hidden"]


async def test_a_page_of_a_gateway_is_no_listing_no_deletion_and_no_upload(
    quick_store: ObjectStore, server: ScriptedServer
) -> None:
    server.script = deque([page("200 OK")])
    asked = [anext(quick_store.list("")), anext(quick_store.list_uploads()), quick_store.delete(["object"])]
    for request in (*asked, quick_store.create_upload("object", PART_BYTES_MIN)):
        with pytest.raises(Unavailable, match="proxy"):
            await request


@pytest.mark.parametrize("status", ["200 OK", "503 Service Unavailable"])
@pytest.mark.parametrize("is_xml", [True, False])
async def test_a_page_of_a_gateway_says_nothing_about_a_write(
    quick_store: ObjectStore, server: ScriptedServer, status: str, is_xml: bool
) -> None:
    """Some gateways answer 503 when the connection to the server breaks after they have passed the request on."""
    server.script = deque([page(status, is_xml=is_xml)])
    with pytest.raises(OutcomeUnknown):
        await quick_store.put("object", [b"content"])
    server.script = deque([page(status, is_xml=is_xml), stored])
    await quick_store.put("object", [b"content"])


async def test_a_server_that_is_gone_is_unavailable(impatient_store: ObjectStore, server: ScriptedServer) -> None:
    await server.close()
    with pytest.raises(Unavailable):
        await read(impatient_store)
    with pytest.raises(Unavailable):
        await impatient_store.head("object")


async def test_a_key_with_the_digits_of_a_status_is_no_status(impatient_store: ObjectStore, server: ScriptedServer) -> None:
    await server.close()
    with pytest.raises(Unavailable):
        await impatient_store.get_range("segment-416-NoSuchBucket", 0, 10)


async def test_a_loop_that_stood_still_loses_no_answer(impatient_store: ObjectStore, server: ScriptedServer) -> None:
    was_quick = False
    while not was_quick:  # If the machine stalled before the answer, its silence may be what ends the read.
        server.script, server.answered = deque([whole]), 0
        server.asked.clear()
        began_s = time.monotonic()
        reading = asyncio.ensure_future(read(impatient_store))
        await server.asked.wait()  # It answers in the same turn of this loop.
        was_quick = time.monotonic() - began_s < IMPATIENT.silence_s / 2
        time.sleep(3 * IMPATIENT.total_s)  # noqa: ASYNC251 - what is tested is a loop that does not run
        (found,) = await asyncio.gather(reading, return_exceptions=True)
    assert found == CONTENT
    assert server.answered == 1


NOT_DONE = [
    ("400 Bad Request", "RequestTimeout"),
    ("400 Bad Request", "BadDigest"),
    ("400 Bad Request", "IncompleteBody"),
    ("429 Too Many Requests", "SlowDown"),
    ("429 Too Many Requests", "TooManyRequests"),
    ("503 Slow Down", "SlowDown"),
]


@pytest.mark.parametrize(("status", "code"), NOT_DONE)
async def test_a_write_that_was_not_done_is_sent_again(
    impatient_store: ObjectStore, server: ScriptedServer, status: str, code: str
) -> None:
    server.script = deque([refused(status, code), stored])
    await impatient_store.put("object", [b"content"])
    assert server.answered == 2


@pytest.mark.parametrize(("status", "code"), NOT_DONE)
async def test_a_write_that_is_never_done_is_unavailable(
    impatient_store: ObjectStore, server: ScriptedServer, status: str, code: str
) -> None:
    server.script = deque([refused(status, code)])
    with pytest.raises(Unavailable):
        await impatient_store.put("object", [b"content"])


async def test_a_write_that_is_wrong_is_sent_once(impatient_store: ObjectStore, server: ScriptedServer) -> None:
    server.script = deque([refused("400 Bad Request", "InvalidArgument")])
    with pytest.raises(Refused):
        await impatient_store.put("object", [b"content"])
    assert server.answered == 1


async def test_a_cut_listing_is_not_a_short_one(impatient_store: ObjectStore, server: ScriptedServer) -> None:
    server.script = deque([cut])
    with pytest.raises(Unavailable):
        _ = [info async for info in impatient_store.list("")]


async def test_a_silence_is_given_up_for_another_attempt(server: ScriptedServer) -> None:
    limits = ReadLimits(total_s=PATIENT.total_s, silence_s=IMPATIENT.silence_s)
    async with store_of(server, "aioboto3", limits) as store:
        server.script = deque([stalled, silent, whole])
        assert await read(store) == CONTENT
    with pytest.raises(Unavailable, match="closed"):
        await read(store)


@pytest.mark.parametrize("engine", ["boto3", "", "Obstore"])
def test_an_unknown_engine_names_the_choices(engine: str, tmp_path: Path) -> None:
    background = ThreadBackground(1, "store")
    with pytest.raises(Invalid, match="obstore, aioboto3"):
        open_store(f"s3://bucket?read_engine={engine}", background=background, clock=SystemClock(), random=random.Random(1))
    background.close()
