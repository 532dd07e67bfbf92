"""Answers of S3 that get lost: the store looks before it concludes, and what happened once counts once.

A proxy stands before a real MinIO: it lets a chosen request through, and drops the connection instead of answering.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import pytest_asyncio

from stratalog_core.errors import Conflict, OutcomeUnknown
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.store import ObjectStore, open_store

pytestmark = pytest.mark.s3
PART = b"p" * (5 * 1024 * 1024)


class LossyProxy:
    """Forwards HTTP connections; ``loses`` says of a request line whether its answer is dropped."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._host, self._port = parts.hostname, parts.port
        self._server: asyncio.Server | None = None
        self.loses: Callable[[str], bool] = lambda line: False
        self.lost = 0
        self._connections: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}

    async def start(self) -> str:
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
        """One request and its answer; False when the connection is done."""
        head = await client.readuntil(b"\r\n\r\n")
        forward.write(head)
        reply = b"HTTP/1.1 100"
        if b"expect: 100-continue" in head.lower():
            reply = await server.readuntil(b"\r\n\r\n")  # a server that refuses by the head alone does not ask for the body
        if reply.startswith(b"HTTP/1.1 100"):
            if reply.endswith(b"\r\n\r\n"):
                answer.write(reply)
            forward.write(await client.readexactly(content_length(head)))
            reply = await server.readuntil(b"\r\n\r\n")
        line = head.split(b"\r\n", 1)[0].decode()
        if self.loses(line):
            self.lost += 1
            return False
        body = b"" if line.startswith("HEAD") else await read_body(server, reply)
        answer.write(reply + body)
        await answer.drain()
        return True


def content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


async def read_body(server: asyncio.StreamReader, head: bytes) -> bytes:
    if b"transfer-encoding: chunked" not in head.lower():
        return await server.readexactly(content_length(head))
    body = b""
    while not body.endswith(b"0\r\n\r\n"):
        body += await server.readuntil(b"\r\n")
    return body


@pytest_asyncio.fixture
async def proxy(minio_server: Any) -> AsyncIterator[LossyProxy]:
    made = LossyProxy(minio_server.endpoint)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def store(minio_server: Any, proxy: LossyProxy) -> AsyncIterator[ObjectStore]:
    url = minio_server.make_bucket(f"test-{uuid4().hex[:12]}").replace(minio_server.endpoint, await proxy.start())
    background = ThreadBackground(4, "store")
    opened = open_store(url, background=background, clock=SystemClock(), random=random.Random(7))
    yield opened
    await opened.close()
    background.close()


def lose(proxy: LossyProxy, method: str, mark: str, times: int) -> None:
    def loses(line: str) -> bool:
        return line.startswith(method) and mark in line and proxy.lost < times

    proxy.loses = loses


async def test_a_put_whose_answer_is_lost_has_won(store: ObjectStore, proxy: LossyProxy) -> None:
    lose(proxy, "PUT", "object", 1)
    await store.put("object", [b"content"])
    assert proxy.lost == 1
    assert await store.get("object") == b"content"


async def test_a_put_that_another_won_meanwhile_is_a_conflict(store: ObjectStore, proxy: LossyProxy) -> None:
    await store.put("object", [b"another's"])
    lose(proxy, "PUT", "object", 1)
    with pytest.raises(Conflict):
        await store.put("object", [b"content"])
    assert await store.get("object") == b"another's"


async def test_a_completion_whose_answer_is_lost_has_made_the_object(store: ObjectStore, proxy: LossyProxy) -> None:
    upload = await store.create_upload("object", len(PART))
    parts = [await store.put_part(upload, 1, [PART]), await store.put_part(upload, 2, [b"end"])]
    lose(proxy, "POST", "uploadId", 1)
    await store.complete_upload(upload, parts)
    assert (proxy.lost, (await store.head("object")).size_bytes) == (1, len(PART) + 3)
    assert [left async for left in store.list_uploads()] == []


async def test_a_write_that_was_answered_needs_no_other_answer(store: ObjectStore, proxy: LossyProxy) -> None:
    lose(proxy, "HEAD", "object", 100)
    await store.put("object", [b"content"])
    upload = await store.create_upload("object-2", len(PART))
    await store.complete_upload(upload, [await store.put_part(upload, 1, [b"end"])])
    lose(proxy, "HEAD", "object", 0)
    assert (await store.get("object"), await store.get("object-2")) == (b"content", b"end")


async def test_a_lost_answer_that_cannot_be_looked_up_is_an_unknown_outcome(store: ObjectStore, proxy: LossyProxy) -> None:
    proxy.loses = lambda line: line.startswith(("GET", "HEAD")) or (line.startswith("PUT") and not proxy.lost)
    with pytest.raises(OutcomeUnknown):
        await store.put("object", [b"content"])
    proxy.loses = lambda line: False
    assert await store.get("object") == b"content"


async def test_a_lost_completion_that_cannot_be_looked_up_is_an_unknown_outcome(store: ObjectStore, proxy: LossyProxy) -> None:
    upload = await store.create_upload("object", len(PART))
    parts = [await store.put_part(upload, 1, [b"content"])]
    proxy.loses = lambda line: line.startswith(("GET", "HEAD")) or (line.startswith("POST") and not proxy.lost)
    with pytest.raises(OutcomeUnknown):
        await store.complete_upload(upload, parts)
    proxy.loses = lambda line: False
    assert await store.get("object") == b"content"


async def test_an_answer_that_never_comes_is_an_unknown_outcome(store: ObjectStore, proxy: LossyProxy) -> None:
    lose(proxy, "PUT", "object", 100)
    with pytest.raises(OutcomeUnknown):
        await store.put("object", [b"content"])


async def test_harmless_requests_are_repeated(store: ObjectStore, proxy: LossyProxy) -> None:
    await store.put("object", [b"content"])
    lose(proxy, "HEAD", "object", 2)
    assert (await store.head("object")).size_bytes == 7
    assert proxy.lost == 2
