"""Google Cloud Storage beyond the common contract, over fake-gcs-server: lost answers, order and sizes of parts, refusals."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
import pytest_asyncio
import urllib3
from conftest import FAKE_GCS, GcsServer
from support.opened_store import opened
from support.s3_proxy import GCS_REFUSALS, S3Proxy

from stratalog.health.cluster import check_store
from stratalog.health.finding import Verdict
from stratalog_core.errors import Invalid, NoSuchObject, Refused, Unavailable
from stratalog_core.object_lock import LockMode, ObjectLock
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.store import ObjectStore
from stratalog_tiering.store.checksums import crc_text
from stratalog_tiering.store.gcs import GcsStore
from stratalog_tiering.store.gcs_uploads import WAITING_MAX
from stratalog_tiering.store.store_url import parse_gcs_url

pytestmark = [
    pytest.mark.s3,
    pytest.mark.skipif(FAKE_GCS not in os.environ, reason="a suite of its own: make contract-gcs"),
]
PART = random.Random(1).randbytes(512 * 1024)


@pytest.fixture
def url(gcs_server: GcsServer) -> str:
    return gcs_server.make_bucket(f"test-{uuid4().hex[:12]}")


@pytest_asyncio.fixture
async def proxy(gcs_server: GcsServer) -> AsyncIterator[S3Proxy]:
    made = S3Proxy(gcs_server.endpoint, GCS_REFUSALS)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def store(url: str, proxy: S3Proxy) -> AsyncIterator[ObjectStore]:
    async with opened(f"{url.partition('?')[0]}?endpoint={await proxy.start()}") as store:
        yield store


async def test_an_object_that_is_not_what_was_sent_is_deleted(store: ObjectStore, proxy: S3Proxy) -> None:
    """The emulator appends a part that is sent again after a lost answer; the service would ignore it."""
    upload = await store.create_upload("object", len(PART))
    proxy.lose("PUT", "upload_id", 1)
    parts = [await store.put_part(upload, 1, [PART]), await store.put_part(upload, 2, [b"end"])]
    with pytest.raises(Unavailable, match="was damaged"):
        await store.complete_upload(upload, parts)
    assert proxy.faults["lost"] == 1
    with pytest.raises(NoSuchObject):
        await store.head("object")


@pytest.mark.parametrize("part_bytes", [512 * 1024, 600_000, 300_001])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("last", [1, 512 * 1024, 0])
async def test_parts_of_any_size_make_the_object(url: str, part_bytes: int, count: int, last: int) -> None:
    """``last``: the size of the last part, which may be as large as the others (0)."""
    content = random.Random(part_bytes).randbytes(part_bytes * count + (last or part_bytes) % (part_bytes + 1))
    async with opened(url) as store:
        upload = await store.create_upload("object", part_bytes)
        pieces = [content[first : first + part_bytes] for first in range(0, len(content), part_bytes)]
        parts = [await store.put_part(upload, number, [piece]) for number, piece in enumerate(pieces, 1)]
        await store.complete_upload(upload, parts)
        assert await store.get("object") == content
        assert (await store.head("object")).crc32c == crc_text([content])


async def test_a_part_that_was_sent_may_be_repeated_but_not_replaced(url: str) -> None:
    async with opened(url) as store:
        upload = await store.create_upload("object", len(PART))
        first = await store.put_part(upload, 1, [PART])
        assert await store.put_part(upload, 1, [PART]) == first
        with pytest.raises(Unavailable, match="start again"):
            await store.put_part(upload, 1, [PART[::-1]])
        await store.complete_upload(upload, [first])
        assert await store.get("object") == PART


async def test_only_so_many_parts_wait_for_an_earlier_one(url: str) -> None:
    async with opened(url) as store:
        upload = await store.create_upload("object", len(PART))
        for number in range(2, WAITING_MAX + 2):
            await store.put_part(upload, number, [PART])
        with pytest.raises(Invalid, match="send them in order"):
            await store.put_part(upload, WAITING_MAX + 2, [PART])


async def test_a_missing_part_makes_no_object(url: str) -> None:
    async with opened(url) as store:
        upload = await store.create_upload("object", len(PART))
        parts = [await store.put_part(upload, number, [PART]) for number in (1, 3)]
        with pytest.raises(Invalid, match="part 2 of object is missing"):
            await store.complete_upload(upload, parts)
        with pytest.raises(NoSuchObject):
            await store.head("object")


async def test_an_upload_may_replace_an_object(url: str) -> None:
    async with opened(url) as store:
        await store.put("object", [b"first"])
        upload = await store.create_upload("object", len(PART), if_absent=False)
        await store.complete_upload(upload, [await store.put_part(upload, 1, [b"second"])])
        assert await store.get("object") == b"second"


async def test_a_listing_goes_on_from_page_to_page(url: str) -> None:
    background = ThreadBackground(4, "store")
    store = GcsStore(
        parse_gcs_url(url), background=background, clock=SystemClock(), random=random.Random(), threads=4, page_objects=3
    )
    names = [f"a/{number:02d}" for number in range(10)]
    for name in names:
        await store.put(name, [b"x"])
    assert [info.key async for info in store.list("")] == names
    await store.close()
    background.close()


async def test_a_storage_class_is_set(url: str, gcs_server: GcsServer) -> None:
    async with opened(url) as store:
        await store.put("a", [b"x"], storage_class="NEARLINE")
        with pytest.raises(Invalid, match="use STANDARD, NEARLINE, COLDLINE, ARCHIVE"):
            await store.put("b", [b"x"], storage_class="Cool")
    bucket = parse_gcs_url(url).bucket
    with urllib3.PoolManager() as pool:
        found = pool.request("GET", f"{gcs_server.endpoint}/storage/v1/b/{bucket}/o/a").json()
    assert found["storageClass"] == "NEARLINE"


async def test_locks_are_refused(url: str) -> None:
    lock = ObjectLock(mode=LockMode.COMPLIANCE, until_ms=SystemClock().wall_ms() + 60_000)
    async with opened(url) as store:
        for write in (store.put("a", [b"x"], lock=lock), store.create_upload("a", len(PART), lock=lock)):
            with pytest.raises(Invalid, match="cannot lock objects"):
                await write


async def test_a_missing_bucket_is_never_a_missing_object(gcs_server: GcsServer) -> None:
    async with opened(f"gs://nothing-here?endpoint={gcs_server.endpoint}") as store:
        for request in (
            store.get("a"), store.get_range("a", 0, 1), store.head("a"), store.put("a", [b"x"]), store.delete(["a"]),
            store.create_upload("a", len(PART)), store.list("").__anext__(), store.features("a"),
        ):  # fmt: skip
            with pytest.raises(Refused, match="the bucket does not exist"):
                await request


async def test_a_bucket_that_keeps_versions_is_not_written_to(gcs_server: GcsServer) -> None:
    url = gcs_server.make_bucket(f"test-{uuid4().hex[:12]}", versioning={"enabled": True})
    finding = await check_store(url)
    assert (finding.verdict, "switch off object versioning" in finding.detail) == (Verdict.FAIL, True)
