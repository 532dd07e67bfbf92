"""Answers of S3 that get lost: the store looks before it concludes, and what happened once counts once.

A proxy stands before a real MinIO: it lets a chosen request through, and drops the connection instead of answering.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
import pytest_asyncio
from conftest import S3Server
from support.opened_store import opened
from support.s3_proxy import S3Proxy

from stratalog_core.errors import Conflict, OutcomeUnknown
from stratalog_tiering.store import ObjectStore

pytestmark = pytest.mark.s3
PART = b"p" * (5 * 1024 * 1024)


@pytest_asyncio.fixture
async def proxy(minio_server: S3Server) -> AsyncIterator[S3Proxy]:
    made = S3Proxy(minio_server.endpoint)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def store(minio_server: S3Server, proxy: S3Proxy) -> AsyncIterator[ObjectStore]:
    url = minio_server.make_bucket(f"test-{uuid4().hex[:12]}")
    async with opened(url.replace(minio_server.endpoint, await proxy.start())) as store:
        yield store


async def test_a_put_whose_answer_is_lost_has_won(store: ObjectStore, proxy: S3Proxy) -> None:
    proxy.lose("PUT", "object", 1)
    await store.put("object", [b"content"])
    assert proxy.faults["lost"] == 1
    assert await store.get("object") == b"content"


async def test_a_put_that_another_won_meanwhile_is_a_conflict(store: ObjectStore, proxy: S3Proxy) -> None:
    await store.put("object", [b"another's"])
    proxy.lose("PUT", "object", 1)
    with pytest.raises(Conflict):
        await store.put("object", [b"content"])
    assert await store.get("object") == b"another's"


async def test_a_completion_whose_answer_is_lost_has_made_the_object(store: ObjectStore, proxy: S3Proxy) -> None:
    upload = await store.create_upload("object", len(PART))
    parts = [await store.put_part(upload, 1, [PART]), await store.put_part(upload, 2, [b"end"])]
    proxy.lose("POST", "uploadId", 1)
    await store.complete_upload(upload, parts)
    assert (proxy.faults["lost"], (await store.head("object")).size_bytes) == (1, len(PART) + 3)
    assert [left async for left in store.list_uploads()] == []


async def test_a_lost_completion_is_recognised_among_encrypted_objects(minio_server: S3Server, proxy: S3Proxy) -> None:
    """Their tags are not digests, so that only the checksum shows whose object it is."""
    url = minio_server.make_bucket(f"test-{uuid4().hex[:12]}").replace(minio_server.endpoint, await proxy.start())
    async with opened(f"{url}&sse=aws:kms") as store:
        ours, others = [await store.create_upload("object", len(PART)) for _ in range(2)]
        part, other_part = await store.put_part(ours, 1, [b"content"]), await store.put_part(others, 1, [b"another"])
        proxy.lose("POST", "uploadId", 1)
        await store.complete_upload(ours, [part])
        proxy.lose("POST", "uploadId", 2)
        with pytest.raises(Conflict):
            await store.complete_upload(others, [other_part])
        assert (proxy.faults["lost"], await store.get("object")) == (2, b"content")


async def test_a_write_that_was_answered_needs_no_other_answer(store: ObjectStore, proxy: S3Proxy) -> None:
    proxy.lose("HEAD", "object", 100)
    await store.put("object", [b"content"])
    upload = await store.create_upload("object-2", len(PART))
    await store.complete_upload(upload, [await store.put_part(upload, 1, [b"end"])])
    proxy.lose("HEAD", "object", 0)
    assert (await store.get("object"), await store.get("object-2")) == (b"content", b"end")


async def test_a_lost_answer_that_cannot_be_looked_up_is_an_unknown_outcome(store: ObjectStore, proxy: S3Proxy) -> None:
    proxy.lose_answers(lambda line: line.startswith(("GET", "HEAD")) or (line.startswith("PUT") and not proxy.faults["lost"]))
    with pytest.raises(OutcomeUnknown):
        await store.put("object", [b"content"])
    proxy.lose_answers(lambda line: False)
    assert await store.get("object") == b"content"


async def test_a_lost_completion_that_cannot_be_looked_up_is_an_unknown_outcome(store: ObjectStore, proxy: S3Proxy) -> None:
    upload = await store.create_upload("object", len(PART))
    parts = [await store.put_part(upload, 1, [b"content"])]
    proxy.lose_answers(lambda line: line.startswith(("GET", "HEAD")) or (line.startswith("POST") and not proxy.faults["lost"]))
    with pytest.raises(OutcomeUnknown):
        await store.complete_upload(upload, parts)
    proxy.lose_answers(lambda line: False)
    assert await store.get("object") == b"content"


async def test_an_answer_that_never_comes_is_an_unknown_outcome(store: ObjectStore, proxy: S3Proxy) -> None:
    proxy.lose("PUT", "object", 100)
    with pytest.raises(OutcomeUnknown):
        await store.put("object", [b"content"])


async def test_harmless_requests_are_repeated(store: ObjectStore, proxy: S3Proxy) -> None:
    await store.put("object", [b"content"])
    proxy.lose("HEAD", "object", 2)
    assert (await store.head("object")).size_bytes == 7
    assert proxy.faults["lost"] == 2
