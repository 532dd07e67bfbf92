"""Answers that get lost: a store looks before it concludes, and what happened once counts once.

A proxy stands before a real MinIO, or before an emulator where ``make contract-azure`` or ``make contract-gcs`` runs: it lets a
chosen request through, and drops the connection instead of answering.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import pytest_asyncio
from conftest import AZURITE, FAKE_GCS
from support.opened_store import opened
from support.s3_proxy import S3Proxy

from stratalog_core.errors import Conflict, OutcomeUnknown
from stratalog_tiering.store import ObjectStore

pytestmark = pytest.mark.s3
PART = b"p" * (5 * 1024 * 1024)
EMULATORS = [
    pytest.param(name, marks=pytest.mark.skipif(variable not in os.environ, reason="a suite of its own: see the Makefile"))
    for name, variable in (("azurite", AZURITE), ("gcs", FAKE_GCS))
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """A store behind a proxy: ``put`` and ``completion`` are method and mark of the requests that make an object."""

    url: str
    store: ObjectStore
    proxy: S3Proxy
    put: tuple[str, str]
    completion: tuple[str, str]

    def lose_all_after(self, write: tuple[str, str]) -> None:
        """Drop the first answer to ``write``, and those to all requests by which it could be looked up."""
        self.proxy.lose_answers(
            lambda line: line.startswith(("GET", "HEAD")) or (line.startswith(write[0]) and not self.proxy.faults["lost"])
        )

    def lose_nothing(self) -> None:
        self.proxy.lose_answers(lambda line: False)


REQUESTS = {
    "minio": (("PUT", "object"), ("POST", "uploadId")),
    "azurite": (("PUT", "object"), ("PUT", "comp=blocklist")),
    "gcs": (("POST", "object"), ("PUT", "upload_id")),
}


@pytest_asyncio.fixture(params=["minio", *EMULATORS])
async def behind(request: pytest.FixtureRequest) -> AsyncIterator[Behind]:
    url = request.getfixturevalue(f"{request.param}_server").make_bucket(f"test-{uuid4().hex[:12]}")
    parts = urlsplit(url.partition("endpoint=")[2].partition("&")[0])
    endpoint = f"{parts.scheme}://{parts.netloc}"
    proxy = S3Proxy(endpoint)
    behind_url = url.replace(endpoint, await proxy.start())
    put, completion = REQUESTS[request.param]
    async with opened(behind_url) as store:
        yield Behind(url=behind_url, store=store, proxy=proxy, put=put, completion=completion)
    await proxy.close()


async def test_a_put_whose_answer_is_lost_has_won(behind: Behind) -> None:
    behind.proxy.lose(*behind.put, 1)
    await behind.store.put("object", [b"content"])
    assert (behind.proxy.faults["lost"], await behind.store.get("object")) == (1, b"content")


async def test_a_put_that_another_won_meanwhile_is_a_conflict(behind: Behind) -> None:
    await behind.store.put("object", [b"another's"])
    behind.proxy.lose(*behind.put, 1)
    with pytest.raises(Conflict):
        await behind.store.put("object", [b"content"])
    assert await behind.store.get("object") == b"another's"


async def test_a_completion_whose_answer_is_lost_has_made_the_object(behind: Behind) -> None:
    upload = await behind.store.create_upload("object", len(PART))
    parts = [await behind.store.put_part(upload, 1, [PART]), await behind.store.put_part(upload, 2, [b"end"])]
    behind.proxy.lose(*behind.completion, 1)
    await behind.store.complete_upload(upload, parts)
    assert (behind.proxy.faults["lost"], await behind.store.get("object")) == (1, PART + b"end")
    assert [left async for left in behind.store.list_uploads()] == []


@pytest.mark.parametrize("behind", EMULATORS, indirect=True)
async def test_equal_content_of_another_upload_is_not_ours(behind: Behind) -> None:
    """An object of Azure or Google Cloud names the upload that made it; one of S3 is known by its checksum."""
    first, second = [await behind.store.create_upload("object", len(PART)) for _ in range(2)]
    part, other_part = await behind.store.put_part(first, 1, [b"equal"]), await behind.store.put_part(second, 1, [b"equal"])
    await behind.store.complete_upload(first, [part])
    behind.proxy.lose(*behind.completion, 1)
    with pytest.raises(Conflict):
        await behind.store.complete_upload(second, [other_part])
    assert await behind.store.get("object") == b"equal"


@pytest.mark.parametrize("behind", ["minio"], indirect=True)
async def test_a_lost_completion_is_recognised_among_encrypted_objects(behind: Behind) -> None:
    """Their tags are not digests, so that only the checksum shows whose object it is."""
    async with opened(f"{behind.url}&sse=aws:kms") as store:
        ours, others = [await store.create_upload("object", len(PART)) for _ in range(2)]
        part, other_part = await store.put_part(ours, 1, [b"content"]), await store.put_part(others, 1, [b"another"])
        behind.proxy.lose(*behind.completion, 1)
        await store.complete_upload(ours, [part])
        behind.proxy.lose(*behind.completion, 2)
        with pytest.raises(Conflict):
            await store.complete_upload(others, [other_part])
        assert (behind.proxy.faults["lost"], await store.get("object")) == (2, b"content")


@pytest.mark.parametrize("behind", ["minio"], indirect=True)
async def test_a_write_that_was_answered_needs_no_other_answer(behind: Behind) -> None:
    behind.proxy.lose("HEAD", "object", 100)
    await behind.store.put("object", [b"content"])
    upload = await behind.store.create_upload("object-2", len(PART))
    await behind.store.complete_upload(upload, [await behind.store.put_part(upload, 1, [b"end"])])
    behind.lose_nothing()
    assert (await behind.store.get("object"), await behind.store.get("object-2")) == (b"content", b"end")


async def test_a_write_that_cannot_be_looked_up_has_an_unknown_outcome(behind: Behind) -> None:
    behind.lose_all_after(behind.put)
    with pytest.raises(OutcomeUnknown):
        await behind.store.put("object", [b"content"])
    behind.lose_nothing()
    assert await behind.store.get("object") == b"content"


async def test_a_completion_that_cannot_be_looked_up_has_an_unknown_outcome(behind: Behind) -> None:
    upload = await behind.store.create_upload("object", len(PART))
    parts = [await behind.store.put_part(upload, 1, [b"content"])]
    behind.lose_all_after(behind.completion)
    with pytest.raises(OutcomeUnknown):
        await behind.store.complete_upload(upload, parts)
    behind.lose_nothing()
    assert await behind.store.get("object") == b"content"


@pytest.mark.parametrize("behind", ["minio"], indirect=True)
async def test_an_answer_that_never_comes_is_an_unknown_outcome(behind: Behind) -> None:
    behind.proxy.lose(*behind.put, 100)
    with pytest.raises(OutcomeUnknown):
        await behind.store.put("object", [b"content"])


async def test_harmless_requests_are_repeated(behind: Behind) -> None:
    await behind.store.put("object", [b"content"])
    method = "GET" if behind.put[0] == "POST" else "HEAD"
    behind.proxy.lose(method, "object", 2)
    assert (await behind.store.head("object")).size_bytes == 7
    assert behind.proxy.faults["lost"] == 2
