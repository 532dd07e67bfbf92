"""Buckets that keep versions or have Object Lock, on MinIO and versitygw: what a deletion leaves, what a lock refuses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import boto3
import pytest
import pytest_asyncio
from botocore.exceptions import ClientError
from conftest import S3Server

from stratalog_core.errors import Invalid
from stratalog_core.object_lock import LockMode, ObjectLock
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.store import Locked, ObjectStore, open_store, s3_versions
from stratalog_tiering.store.s3_versions import S3Versions

pytestmark = pytest.mark.s3
PART_BYTES = 5 * 2**20
PREFIX = "some/prefix/"
SERVERS = ["minio", "versitygw"]


class Bucket:
    """A bucket as an administrator sees it, and the store below a prefix of it."""

    def __init__(self, name: str, client: Any, store: ObjectStore) -> None:
        self.name = name
        self.client = client
        self.store = store

    def versions(self) -> list[tuple[str, str]]:
        """Key and version id of everything in the bucket, delete markers included."""
        answer = self.client.list_object_versions(Bucket=self.name)
        found = [*answer.get("Versions", ()), *answer.get("DeleteMarkers", ())]
        return sorted((each["Key"].removeprefix(PREFIX), each["VersionId"]) for each in found)

    def keys(self) -> list[str]:
        return [key for key, _ in self.versions()]

    def request(self, operation: str, key: str, **arguments: Any) -> Any:
        return getattr(self.client, operation)(Bucket=self.name, Key=PREFIX + key, **arguments)


@pytest_asyncio.fixture
async def bucket(request: pytest.FixtureRequest) -> AsyncIterator[Bucket]:
    """A bucket of the server and with the feature that the parameter names: ``minio/versions``, ``versitygw/locks``."""
    server_name, _, feature = request.param.partition("/")
    server: S3Server = request.getfixturevalue(f"{server_name}_server")
    name = f"test-{uuid4().hex[:12]}"
    client = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=feature == "locks")
    if feature in ("versions", "suspended"):
        client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    background = ThreadBackground(4, "store")
    url = f"s3://{name}/{PREFIX}?endpoint={server.endpoint}&region=us-east-1"
    store = open_store(url, background=background, clock=SystemClock(), random=random.Random(7))
    yield Bucket(name, client, store)
    await store.close()
    background.close()
    client.close()


def versioned(*features: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bucket", [f"{server}/{each}" for server in SERVERS for each in features], indirect=True)


def lock_for(seconds: float, mode: LockMode = LockMode.COMPLIANCE) -> ObjectLock:
    until_ms = SystemClock().wall_ms() + int(seconds * 1000)
    return ObjectLock(mode=mode, until_ms=-(-until_ms // 1000) * 1000)


@versioned("versions", "locks")
async def test_a_deleted_object_leaves_no_version(bucket: Bucket) -> None:
    for number in range(3):
        await bucket.store.put("a/replaced", [b"content %d" % number], if_absent=False)
    for key in ("a/once", "a/once.more", "b/c/hidden", "top"):
        await bucket.store.put(key, [b"content"])
    bucket.request("delete_object", "b/c/hidden")
    bucket.request("put_object", "b/c/hidden", Body=b"again")
    await bucket.store.delete(["top", "b/c/hidden", "a/replaced", "a/missing", "a/once"])
    assert bucket.keys() == ["a/once.more"]
    await bucket.store.delete(["a/once.more", "a/once"])
    assert bucket.versions() == []


@versioned("versions")
async def test_an_object_that_only_a_marker_shows_is_listed_and_deleted(bucket: Bucket) -> None:
    for key in ("a/hidden", "a/seen", "b"):
        await bucket.store.put(key, [b"content"])
    bucket.request("delete_object", "a/hidden")
    assert [info.key async for info in bucket.store.list("a/")] == ["a/seen"]
    assert [key async for key in bucket.store.list_keys("a/")] == ["a/hidden", "a/seen"]
    await bucket.store.delete(["a/hidden"])
    assert bucket.keys() == ["a/seen", "b"]


@versioned("versions")
async def test_few_keys_among_many_are_deleted_with_few_listings(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratalog_tiering.store.s3_versions._OTHERS_MAX", 3)
    names = [f"d/{number:03d}" for number in range(40)]
    for name in names:
        await bucket.store.put(name, [b"x"])
        await bucket.store.put(name, [b"y"], if_absent=False)
    gone = {"d/000", "d/001", "d/005", "d/017", "d/018", "d/019", "d/039"}
    await bucket.store.delete(sorted(gone, reverse=True))
    assert sorted(set(bucket.keys())) == [name for name in names if name not in gone]
    await bucket.store.delete(names)
    assert bucket.versions() == []


@versioned("versions")
async def test_keys_of_many_directories_are_deleted_with_few_listings(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that is deleted has two directories for each partition, with few objects each. Another topic's lie between."""
    monkeypatch.setattr("stratalog_tiering.store.s3_versions._OTHERS_MAX", 5)
    gone = [f"{kind}/{partition:02d}/{number}" for kind in ("m", "s") for partition in range(20) for number in range(2)]
    kept = [f"n/{number:02d}" for number in range(20)]
    for name in (*gone, *kept):
        await bucket.store.put(name, [b"x"])
    listings, list_page = [], S3Versions._list_page

    async def counted(versions: S3Versions, prefix: str, *more: Any) -> Any:
        listings.append(prefix)
        return await list_page(versions, prefix, *more)

    monkeypatch.setattr(S3Versions, "_list_page", counted)
    await bucket.store.delete(gone)
    assert len(listings) == 2, "one up to the other topic, and one after it"
    assert bucket.keys() == kept


@versioned("unversioned")
async def test_versions_that_are_kept_later_are_noticed_by_the_next_deletion(bucket: Bucket) -> None:
    await bucket.store.put("before", [b"content"])
    await bucket.store.put("after", [b"content"])
    await bucket.store.delete(["before"])
    bucket.client.put_bucket_versioning(Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"})
    await bucket.store.put("after", [b"content"], if_absent=False)
    await bucket.store.delete(["after"])
    assert bucket.versions() == []


@versioned("locks")
@pytest.mark.parametrize("mode", LockMode)
async def test_a_locked_version_cannot_be_deleted_before_its_time(bucket: Bucket, mode: LockMode) -> None:
    held, brief = lock_for(3600, mode), lock_for(6, mode)
    for name in ("brief", "held"):
        await bucket.store.put(f"{name}/put", [b"content"], lock=brief if name == "brief" else held)
        brief = lock_for(6, mode)  # Anew: a server refuses a lock that has ended, which a slow machine would ask for.
        upload = await bucket.store.create_upload(f"{name}/upload", PART_BYTES, lock=brief if name == "brief" else held)
        parts = [await bucket.store.put_part(upload, number, [b"p" * size]) for number, size in ((1, PART_BYTES), (2, 7))]
        await bucket.store.complete_upload(upload, parts)
    await bucket.store.put("free", [b"content"])
    for key in ("held/put", "held/upload"):
        info = await bucket.store.head(key)
        assert (info.locked_until_ms, info.version_id) == (held.until_ms, dict(bucket.versions())[key])
        with pytest.raises(Locked) as refused:
            await bucket.store.delete([key])
        assert refused.value.detail["until_ms"] == held.until_ms
        with pytest.raises(ClientError):
            bucket.request("delete_object", key, VersionId=info.version_id)
    assert (await bucket.store.head("free")).locked_until_ms == 0
    await bucket.store.delete(["free"])
    if mode is LockMode.COMPLIANCE:
        with pytest.raises(ClientError):
            bucket.request("put_object_retention", "held/put", Retention={"Mode": "COMPLIANCE", "RetainUntilDate": 0})

    await asyncio.sleep((brief.until_ms - SystemClock().wall_ms()) / 1000 + 1.1)
    await bucket.store.delete(["brief/put", "brief/upload"])
    assert bucket.keys() == ["held/put", "held/upload"]


@versioned("locks")
async def test_an_object_under_a_legal_hold_keeps_no_other_from_being_deleted(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_versions, "_DELETE_BATCH", 2)
    keys = [f"a/{number}" for number in range(5)]
    for key in keys:
        await bucket.store.put(key, [b"content"])
    for key in ("a/0", "a/2"):
        bucket.request("put_object_legal_hold", key, LegalHold={"Status": "ON"})
    with pytest.raises(Locked, match="legal hold") as refused:
        await bucket.store.delete(keys)
    assert refused.value.detail == {"until_ms": 0, "keys": ["a/0", "a/2"]}
    assert bucket.keys() == ["a/0", "a/2"]
    for key in ("a/0", "a/2"):
        bucket.request("put_object_legal_hold", key, LegalHold={"Status": "OFF"})
    await bucket.store.delete(keys)
    assert bucket.versions() == []


@versioned("versions", "unversioned")
async def test_a_bucket_without_locks_refuses_them(bucket: Bucket) -> None:
    for refused in (
        bucket.store.put("a", [b"content"], lock=lock_for(60)),
        bucket.store.create_upload("a", PART_BYTES, lock=lock_for(60)),
    ):
        with pytest.raises(Invalid, match="cannot lock objects: the bucket was created without Object Lock"):
            await refused
    assert bucket.versions() == []
