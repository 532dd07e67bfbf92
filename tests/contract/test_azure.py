"""Azure beyond the common contract, over Azurite: lost answers, kinds of credentials, what is refused."""

from __future__ import annotations

import base64
import hmac
import os
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlsplit
from uuid import uuid4

import obstore
import pytest
import pytest_asyncio
from conftest import AZURE_ACCOUNT, AZURE_KEY, AZURITE, AzureServer
from obstore.store import AzureStore as ObstoreAzure
from support.opened_store import opened
from support.s3_proxy import AZURE_REFUSALS, S3Proxy

from stratalog_core.errors import Invalid, NoSuchObject, Refused, Unavailable
from stratalog_core.object_lock import LockMode, ObjectLock
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.store import ObjectStore, location_url
from stratalog_tiering.store.azure import AzureStore
from stratalog_tiering.store.azure_settings import azure_settings
from stratalog_tiering.store.store_url import parse_azure_url

pytestmark = [
    pytest.mark.s3,
    pytest.mark.skipif(AZURITE not in os.environ, reason="a suite of its own, which needs Node: make contract-azure"),
]
PART = b"p" * (5 * 1024 * 1024)


@pytest.fixture
def url(azurite_server: AzureServer) -> str:
    return azurite_server.make_bucket(f"test-{uuid4().hex[:12]}")


@pytest_asyncio.fixture
async def proxy(azurite_server: AzureServer) -> AsyncIterator[S3Proxy]:
    made = S3Proxy(azurite_server.endpoint, AZURE_REFUSALS)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def store(url: str, proxy: S3Proxy) -> AsyncIterator[ObjectStore]:
    parts = urlsplit(url.partition("endpoint=")[2])
    async with opened(url.replace(f"{parts.scheme}://{parts.netloc}", await proxy.start())) as store:
        yield store


async def test_a_completion_whose_blocks_another_discarded_starts_again(store: ObjectStore) -> None:
    first, second = [await store.create_upload("object", len(PART)) for _ in range(2)]
    part, _ = await store.put_part(first, 1, [b"first"]), await store.put_part(second, 1, [b"second"])
    await store.abort_upload(second)
    with pytest.raises(Unavailable, match="start again"):
        await store.complete_upload(first, [part])
    with pytest.raises(NoSuchObject):
        await store.head("object")


@pytest.mark.parametrize(("method", "mark"), [("PUT", "comp=blocklist"), ("HEAD", "object"), ("DELETE", "object")])
async def test_an_abort_whose_answers_are_lost_leaves_nothing(
    store: ObjectStore, proxy: S3Proxy, method: str, mark: str
) -> None:
    upload = await store.create_upload("object", len(PART))
    await store.put_part(upload, 1, [b"x"])
    proxy.lose(method, mark, 1)
    await store.abort_upload(upload)
    assert proxy.faults["lost"] == 1
    assert [left async for left in store.list_uploads()] == []
    assert [info.key async for info in store.list("")] == []


async def test_another_process_aborts_what_it_finds_and_leaves_objects_alone(url: str) -> None:
    async with opened(url) as first, opened(url) as second:
        await first.put("empty", [])
        upload = await first.create_upload("object", len(PART), "Cool")
        part = await first.put_part(upload, 1, [b"x"])
        (found,) = [open_ async for open_ in second.list_uploads()]
        assert (found.key, found.initiated_ms) == ("object", upload.initiated_ms)
        await second.abort_upload(found)
        with pytest.raises(Unavailable, match="start again"):
            await first.complete_upload(upload, [part])
        assert [info.key async for info in second.list("")] == ["empty"]


async def test_a_listing_goes_on_from_page_to_page(url: str) -> None:
    background = ThreadBackground(4, "store")
    settings = azure_settings()
    store = AzureStore(
        parse_azure_url(url, settings), settings, background=background, clock=SystemClock(), random=random.Random(), threads=4,
        page_blobs=3,
    )  # fmt: skip
    names = [f"a/{number:02d}" for number in range(10)]
    for name in names:
        await store.put(name, [b"x"])
    uploads = [await store.create_upload(f"b/{number}", len(PART)) for number in range(5)]
    for upload in uploads:
        await store.put_part(upload, 1, [b"x"])
    assert [info.key async for info in store.list("")] == names
    assert [found.upload_id async for found in store.list_uploads()] == [upload.upload_id for upload in uploads]
    await store.close()
    background.close()


async def test_an_access_tier_is_chosen_by_storage_class(url: str) -> None:
    client = ObstoreAzure(
        urlsplit(url).netloc, account_name=AZURE_ACCOUNT, account_key=AZURE_KEY, endpoint=url.partition("endpoint=")[2],
        client_options={"allow_http": True},
    )  # fmt: skip
    async with opened(url) as store:
        await store.put("cool", [b"x"], storage_class="Cool")
        upload = await store.create_upload("cold", len(PART), "Cold")
        await store.complete_upload(upload, [await store.put_part(upload, 1, [b"x"])])
        assert await store.get("cold") == b"x"
        for name in ("Archive", "STANDARD_IA"):
            with pytest.raises(Invalid, match="use Hot, Cool, Cold"):
                await store.put("other", [b"x"], storage_class=name)
    assert [found["path"] for found in obstore.list(client).collect()] == ["cold", "cool"]


async def test_locks_are_refused(url: str) -> None:
    lock = ObjectLock(mode=LockMode.COMPLIANCE, until_ms=SystemClock().wall_ms() + 60_000)
    async with opened(url) as store:
        for write in (store.put("a", [b"x"], lock=lock), store.create_upload("a", len(PART), lock=lock)):
            with pytest.raises(Invalid, match="cannot lock objects"):
                await write


async def test_a_missing_container_is_never_a_missing_object(azurite_server: AzureServer) -> None:
    async with opened(f"az://nothing-here?endpoint={azurite_server.endpoint}") as store:
        for request in (store.get("a"), store.head("a"), store.put("a", [b"x"]), store.delete(["a"])):
            with pytest.raises(Refused, match="does not exist"):
                await request


def shared_access_signature(permissions: str) -> str:
    """A signature for the whole account, as the portal makes it."""
    until = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    lines = [AZURE_ACCOUNT, permissions, "b", "sco", "", until, "", "http,https", "2020-10-02", ""]
    digest = hmac.digest(base64.b64decode(AZURE_KEY), "\n".join(lines).encode(), "sha256")
    signature = quote(base64.b64encode(digest).decode(), safe="")
    return f"?sv=2020-10-02&ss=b&srt=sco&sp={permissions}&se={quote(until)}&spr=http,https&sig={signature}"


@pytest.mark.parametrize("source", ["connection string", "account key", "shared access signature", "signature in a string"])
async def test_credentials_are_found_in_the_environment(
    url: str, azurite_server: AzureServer, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    place, endpoint = url.partition("?")[0], azurite_server.endpoint
    signature = shared_access_signature("rwdlac")
    if source == "connection string":
        text = f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};BlobEndpoint={endpoint};"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    elif source == "signature in a string":
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"BlobEndpoint={endpoint};SharedAccessSignature={signature}")
    else:
        name, value = ("KEY", AZURE_KEY) if source == "account key" else ("SAS_TOKEN", signature)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    assert location_url(place) == f"{place}/?account={AZURE_ACCOUNT}&endpoint={endpoint}"
    async with opened(place) as store:
        await store.put("a", [b"x"])
        upload = await store.create_upload("b", len(PART))
        await store.complete_upload(upload, [await store.put_part(upload, 1, [b"y"])])
        assert [await store.get(info.key) async for info in store.list("")] == [b"x", b"y"]
        await store.delete(["a", "b"])


async def test_refused_credentials_are_not_repeated(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", shared_access_signature("r"))
    secret = os.environ["AZURE_STORAGE_SAS_TOKEN"].rpartition("sig=")[2]
    async with opened(url) as store:
        for request in (store.put("a", [b"x"]), store.delete(["a"]), store.list("").__anext__()):
            with pytest.raises(Refused, match="was refused") as refused:
                await request
            assert secret not in f"{refused.value!r} {refused.value.__cause__!r}"
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", shared_access_signature("r") + "x")
    async with opened(url) as store:
        with pytest.raises(Refused, match="was refused") as refused:
            await store.get("a")
        assert secret not in f"{refused.value!r} {refused.value.__cause__!r}"
