"""Topics whose history is locked, on a real MinIO: what is locked until when, and that nothing is deleted before."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import msgspec
import pytest
import pytest_asyncio
from botocore.exceptions import ClientError
from conftest import S3Server
from support.directory_store import object_files
from unit.tiering.conftest import FaultyStore
from unit.tiering.unreliable_metadata import UnreliableMetadata

from stratalog_core.errors import StratalogError
from stratalog_core.object_lock import LockMode, ObjectLock
from stratalog_core.ports import Buffer
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.client.topic_deletion import delete_topic
from stratalog_metadata.records import (
    DeletedTopic,
    DynamicConfig,
    ManifestPointer,
    PendingTopic,
    RestoredTopic,
    Topic,
    deleted_topic_key,
    topic_key,
)
from stratalog_metadata.state.commands import Command, Delete, Put
from stratalog_tiering.attach import attachment
from stratalog_tiering.attach.attachment import AttachPorts, attach
from stratalog_tiering.attach.source import TopicSource
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.partition import partition_snapshot
from stratalog_tiering.format.object_keys import marker_key
from stratalog_tiering.maintenance.merging import FAN_IN
from stratalog_tiering.maintenance.orphans import find_garbage
from stratalog_tiering.offload.locks import KnownLocks
from stratalog_tiering.offload.ownership import claim_bucket, cluster_id_in
from stratalog_tiering.store import ObjectStore, Upload, open_store
from stratalog_tiering.worker.collection import CollectorPorts

pytestmark = pytest.mark.s3
Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]
MINUTE_MS = 60_000
LOCK_MS = 4_000
"""For locks whose end is waited for."""
LONG = {"retention.ms": "-1", "stratalog.tier.lock.mode": "compliance", "stratalog.tier.lock.ms": str(10 * MINUTE_MS)}


class WatchedStore(FaultyStore):
    """Notes each lock that is asked for, and each deletion of an object before its lock has ended."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.locks: dict[str, ObjectLock] = {}
        self.early: list[str] = []

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        storage_class: str = "",
        lock: ObjectLock | None = None,
    ) -> None:
        self._note(key, lock)
        await super().put(key, parts, if_absent=if_absent, storage_class=storage_class, lock=lock)

    async def create_upload(
        self,
        key: str,
        part_bytes: int,
        storage_class: str = "",
        lock: ObjectLock | None = None,
        *,
        if_absent: bool = True,
    ) -> Upload:
        self._note(key, lock)
        return await super().create_upload(key, part_bytes, storage_class, lock, if_absent=if_absent)

    def _note(self, key: str, lock: ObjectLock | None) -> None:
        if lock is not None:
            self.locks[key] = lock

    async def delete(self, keys: Sequence[str]) -> None:
        now_ms = SystemClock().wall_ms()
        self.early += [key for key in keys if key in self.locks and self.locks[key].until_ms > now_ms]
        await super().delete(keys)


class Bucket:
    """A bucket as its administrator sees it."""

    def __init__(self, name: str, client: Any) -> None:
        self.name = name
        self._client = client

    def stored(self) -> list[str]:
        """Key of each version and delete marker."""
        answer = self._client.list_object_versions(Bucket=self.name)
        return sorted(each["Key"] for each in [*answer.get("Versions", ()), *answer.get("DeleteMarkers", ())])

    def put_locked(self, key: str, for_s: int) -> int:
        """Return until when. A lock that ended before the server saw it, as on a machine that stalls, is tried again."""
        while True:
            until_ms = (SystemClock().wall_ms() // 1000 + for_s) * 1000
            lock = {"ObjectLockMode": "COMPLIANCE", "ObjectLockRetainUntilDate": until_ms / 1000}
            try:
                self._client.put_object(Bucket=self.name, Key=key, Body=b"x", **lock)
            except ClientError:
                if SystemClock().wall_ms() < until_ms:
                    raise
            else:
                return until_ms


@pytest.fixture
def object_lock(request: pytest.FixtureRequest) -> bool:
    return bool(getattr(request, "param", True))


@pytest_asyncio.fixture
async def bucket(minio_server: S3Server, object_lock: bool) -> AsyncIterator[Bucket]:
    name = f"locked-{uuid4().hex[:12]}"
    client = boto3.client("s3", endpoint_url=minio_server.endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=object_lock)
    yield Bucket(name, client)
    client.close()


@pytest_asyncio.fixture
async def store(bucket: Bucket, minio_server: S3Server, background: ThreadBackground) -> AsyncIterator[WatchedStore]:
    url = f"s3://{bucket.name}?endpoint={minio_server.endpoint}&region=us-east-1"
    inner = open_store(url, background=background, clock=SystemClock(), random=random.Random(1))
    yield WatchedStore(inner)
    await inner.close()


async def set_configs(cluster: Cluster, configs: dict[str, str]) -> None:
    topic: Topic = msgspec.structs.replace(cluster.topic, configs=configs)
    await cluster.metadata.propose(Command(updates=(Put(record=topic),)))


async def offload(cluster: Cluster, make_batches: Batches, first: int, count: int) -> None:
    """Offload ``count`` ledgers of three records each, one after the other."""
    for number in range(first, first + count):
        await cluster.add_ledger(make_batches(3 * number, [3]), 3 * number)
        await cluster.until(
            lambda end=3 * number + 3: (
                (p := cluster.pointer()) is not None and p.end_offset == end and not cluster.log().ledgers
            )
        )


async def test_what_a_commit_writes_is_locked_as_long_as_the_history(
    cluster: Cluster, store: WatchedStore, make_batches: Batches
) -> None:
    began_ms = SystemClock().wall_ms()
    await set_configs(cluster, LONG)
    await cluster.start_worker()
    await offload(cluster, make_batches, 0, 2)
    await set_configs(cluster, {"retention.ms": "-1"})
    await offload(cluster, make_batches, 2, 1)
    pointer = cluster.pointer()
    entries = (await ManifestSource(store).manifest(pointer)).segments
    for entry in entries[:2]:
        info = await store.head(entry.key)
        assert (entry.options.lock_until_ms, entry.options.version_id) == (info.locked_until_ms, info.version_id)
        assert began_ms + 10 * MINUTE_MS <= info.locked_until_ms <= SystemClock().wall_ms() + 10 * MINUTE_MS + 1000
        assert entry.options.lock_mode == "compliance"
    assert not entries[2].options.lock_until_ms, "the topic locks no more"
    assert (await store.head(entries[2].key)).locked_until_ms == 0
    latest_ms = max(entry.options.lock_until_ms for entry in entries)
    assert (pointer.lock_until_ms, pointer.lock_mode) == (latest_ms, "compliance")
    locked = {info.key: (await store.head(info.key)).locked_until_ms async for info in store.list("manifests/")}
    assert len(locked) == 3
    assert locked[pointer.object_key] == locked[marker_key(pointer.object_key)] == latest_ms
    assert set(locked.values()) <= {entry.options.lock_until_ms for entry in entries[:2]}
    for unlocked in ("topics/", "owners/"):
        assert {(await store.head(info.key)).locked_until_ms async for info in store.list(unlocked)} == {0}


async def test_a_merged_segment_is_locked_until_the_latest_date_of_its_sources(
    cluster: Cluster, store: WatchedStore, bucket: Bucket, make_batches: Batches
) -> None:
    """Its sources, superseded manifests and lists stay as long as they are locked; what is not locked goes."""
    await set_configs(cluster, {**LONG, "stratalog.tier.lock.mode": "governance"})
    await cluster.start_worker(segment_bytes=1)
    await offload(cluster, make_batches, 0, 1)
    await set_configs(cluster, {**LONG, "stratalog.tier.lock.ms": str(5 * MINUTE_MS)})
    await offload(cluster, make_batches, 1, FAN_IN - 2)
    await set_configs(cluster, {"retention.ms": "-1"})
    await offload(cluster, make_batches, FAN_IN - 1, 1)
    sources = (await ManifestSource(store).manifest(cluster.pointer())).segments
    assert len({entry.options.lock_until_ms for entry in sources}) > 1
    await cluster.close()
    version = cluster.pointer().manifest_version
    await set_configs(cluster, LONG)
    await cluster.start_worker("worker-2", grace_ms=0)
    await cluster.until(lambda: cluster.pointer().manifest_version > version)
    (merged,) = (await ManifestSource(store).manifest(cluster.pointer())).segments
    latest_ms = sources[0].options.lock_until_ms
    assert (merged.options.lock_until_ms, merged.options.lock_mode) == (latest_ms, "compliance")
    assert (await store.head(merged.key)).locked_until_ms == latest_ms
    await asyncio.sleep(1)
    assert store.early == []
    assert {entry.key for entry in sources if entry.options.lock_until_ms} <= set(bucket.stored())
    view = cluster.metadata.view
    state = partition_snapshot(view, view.get(topic_key(cluster.topic.name)).record, 0)
    assert state is not None
    ports = CollectorPorts(metadata=cluster.metadata, store=store, source=ManifestSource(store), locks=KnownLocks(store))
    now_ms = SystemClock().wall_ms()
    found = await find_garbage(ports, state, 0, now_ms)
    garbage = [*found.removed, *found.orphans]
    assert {entry.key for entry in sources if entry.options.lock_until_ms} <= {each.key for each in garbage}
    assert not [each.key for each in garbage if each.is_due(now_ms) and each.key in store.locks]
    assert cluster.last_error() == ""


async def test_locked_history_outlives_its_retention_and_then_leaves_nothing(
    cluster: Cluster, store: WatchedStore, bucket: Bucket, make_batches: Batches
) -> None:
    lock_ms, began_ms, moved_early = 5_000, SystemClock().wall_ms(), list[int]()

    def note_early(_: object) -> None:
        pointer = cluster.pointer()
        if pointer is not None and pointer.start_offset > 0 and SystemClock().wall_ms() < began_ms + lock_ms:
            moved_early.append(pointer.start_offset)

    cluster.metadata.view.subscribe(note_early)
    await set_configs(cluster, {**LONG, "retention.ms": "1", "retention.bytes": "1", "stratalog.tier.lock.ms": str(lock_ms)})
    await cluster.start_worker(grace_ms=0)
    await offload(cluster, make_batches, 0, 3)
    pointer = cluster.pointer()
    await cluster.until(lambda: cluster.pointer().start_offset == 9)
    assert SystemClock().wall_ms() >= pointer.lock_until_ms
    assert moved_early == []
    while len(bucket.stored()) > 3:
        store.deleted.clear()
        async with asyncio.timeout(60):
            await store.deleted.wait()
    assert sorted(key.split("/")[0] for key in bucket.stored()) == ["manifests", "owners", "topics"]
    assert store.early == []
    assert cluster.last_error() == ""

    stray = f"segments/{cluster.topic.topic_id.hex}/0/stray"
    stray_until_ms = bucket.put_locked(stray, 4)
    store.locks[stray] = ObjectLock(mode=LockMode.COMPLIANCE, until_ms=stray_until_ms)
    stored = cluster.metadata.view.get(topic_key(cluster.topic.name))
    await cluster.metadata.propose(delete_topic(cluster.metadata.view, stored.record, stored.version, 0, 0))
    deleted = deleted_topic_key(cluster.topic.topic_id)
    await cluster.until(lambda: cluster.metadata.view.get(deleted) is None)
    assert [key.split("/")[0] for key in bucket.stored()] == ["owners"]
    assert SystemClock().wall_ms() >= stray_until_ms
    assert store.early == []


async def test_a_commit_that_lost_its_race_leaves_its_locked_objects(
    cluster: Cluster, store: WatchedStore, bucket: Bucket, make_batches: Batches
) -> None:
    await set_configs(cluster, LONG)
    ledger = await cluster.add_ledger(make_batches(0, [3]), 0)
    real, taken = cluster.metadata, False

    async def interfere(command: Command, timeout_s: float = 10.0) -> Any:
        nonlocal taken
        first = command.updates[0]
        if isinstance(first, Put) and isinstance(first.record, ManifestPointer) and not taken:
            taken = True
            await real.propose(Command(updates=(Put(record=ledger),)))
        return await real.propose(command, timeout_s)

    cluster.metadata = UnreliableMetadata(real, [])
    cluster.metadata.propose = interfere
    await cluster.start_worker(grace_ms=0)
    await cluster.until(lambda: not cluster.log().ledgers)
    assert taken
    assert len([key for key in bucket.stored() if key.startswith("segments/")]) == 2
    assert (store.early, cluster.last_error()) == ([], "")


@pytest.mark.parametrize("object_lock", [False], indirect=True)
async def test_a_bucket_without_object_lock_keeps_the_hot_copy(
    cluster: Cluster, store: WatchedStore, bucket: Bucket, make_batches: Batches
) -> None:
    await set_configs(cluster, LONG)
    await cluster.start_worker()
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.until(lambda: "the bucket was created without Object Lock" in cluster.last_error())
    assert len(cluster.log().ledgers) == 1
    assert not [key for key in bucket.stored() if key.startswith("segments/")]
    await set_configs(cluster, {"retention.ms": "-1"})
    await cluster.until(lambda: not cluster.log().ledgers)


async def test_a_store_that_ignores_a_lock_is_noticed(
    cluster: Cluster, store: WatchedStore, make_batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = store.put

    async def put_unlocked(key: str, parts: Sequence[Buffer], *, if_absent: bool = True, **_: Any) -> None:
        await put(key, parts, if_absent=if_absent)

    monkeypatch.setattr(store, "put", put_unlocked)
    await set_configs(cluster, LONG)
    await cluster.start_worker()
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.until(lambda: "says that it is locked not at all" in cluster.last_error())
    assert (len(cluster.log().ledgers), cluster.pointer()) == (1, None)


class Death(BaseException):
    """The process has died: no request of it reaches the store any more."""


class MadePartition:
    """A partition elsewhere."""

    base_offset = log_start_offset = 0
    stored_bytes = 0

    def __init__(self, made: Sequence[bytes]) -> None:
        self._made = made

    async def batches(self) -> AsyncIterator[Sequence[Buffer]]:
        yield self._made


async def test_an_attachment_that_dies_at_any_request_leaves_nothing_after_its_locks(
    cluster: Cluster, store: WatchedStore, bucket: Bucket, make_batches: Batches, background: ThreadBackground,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    await claim_bucket(store, cluster_id_in(cluster.metadata), SystemClock().wall_ms())
    ports = AttachPorts(
        metadata=cluster.metadata, store=store, clock=SystemClock(), random=random.Random(4), background=background,
        settings=TieringSettings(worker_id="attach"),
    )  # fmt: skip
    source = TopicSource(name="source", partition_count=1, partitions={0: MadePartition(make_batches(0, [3, 3]))})
    locked = {"stratalog.tier.lock.mode": "compliance", "stratalog.tier.lock.ms": str(LOCK_MS)}
    defaults = DynamicConfig(resource="", configs=locked)
    await cluster.metadata.propose(Command(updates=(Put(record=defaults),)))
    gave_up = attachment.give_up

    async def die(*_: Any) -> None:
        pass

    async def attach_new(name: str) -> Topic:
        topic = Topic(name=name, topic_id=uuid4(), partition_count=1, replication_factor=1, configs={"retention.ms": "-1"})
        await attach(ports, topic, source, expiry_ms=100)
        return topic

    monkeypatch.setattr(attachment, "give_up", die)
    deaths = attempts = 0
    while True:
        left, began_ms, attempts = deaths, SystemClock().wall_ms(), attempts + 1

        def dies(name: str, key: str) -> BaseException | None:
            nonlocal left
            left -= 1
            return Death() if left < 0 else None

        store.before = dies
        try:
            await attach_new(f"dead-{attempts}")
            break
        except Death:
            deaths += 1
        except StratalogError:
            # A server refuses locks that have ended, as those that a stalled machine asks for too late.
            if SystemClock().wall_ms() < began_ms + LOCK_MS:
                raise
    assert deaths > 12
    store.before = lambda name, key: None
    monkeypatch.setattr(attachment, "give_up", gave_up)
    attached = cluster.metadata.view.find(Topic, topic_key(f"dead-{attempts}"))
    assert attached is not None
    # What was locked stays locked, whatever the defaults are when it is deleted.
    await cluster.metadata.propose(Command(updates=(Delete(key=defaults.key()),)))
    await cluster.start_worker(grace_ms=0)
    kinds = (PendingTopic, DeletedTopic, RestoredTopic)
    await cluster.until(lambda: not [record for kind in kinds for record in cluster.metadata.view.all(kind)], 60)
    assert {key.split("/")[1].removesuffix(".deleted") for key in bucket.stored() if not key.startswith("owners/")} == {
        attached.topic_id.hex
    }
    assert len({lock.until_ms for lock in store.locks.values()}) >= 1
    assert store.early == []
    (segment,) = [key for key in bucket.stored() if key.startswith("segments/")]
    assert (await store.head(segment)).locked_until_ms == store.locks[segment].until_ms


@pytest_asyncio.fixture
async def second_bucket(minio_server: S3Server) -> AsyncIterator[Bucket]:
    client = boto3.client("s3", endpoint_url=minio_server.endpoint, region_name="us-east-1")
    name = f"second-{uuid4().hex[:12]}"
    client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=True)
    yield Bucket(name, client)
    client.close()


@pytest_asyncio.fixture
async def second(second_bucket: Bucket, minio_server: S3Server, background: ThreadBackground) -> AsyncIterator[WatchedStore]:
    url = f"s3://{second_bucket.name}?endpoint={minio_server.endpoint}&region=us-east-1"
    inner = open_store(url, background=background, clock=SystemClock(), random=random.Random(2))
    yield WatchedStore(inner)
    await inner.close()


async def test_the_second_copy_is_locked_as_the_first(
    cluster: Cluster, store: WatchedStore, make_batches: Batches, second: WatchedStore, second_bucket: Bucket
) -> None:
    began_ms = SystemClock().wall_ms()
    await set_configs(cluster, LONG)
    await cluster.start_worker(grace_ms=0, copy_grace_ms=0, sweep_interval_ms=300, second=second)
    await offload(cluster, make_batches, 0, 2)
    pointer = cluster.pointer()
    await until_copied(pointer, second_bucket)
    segments = [key for key in second_bucket.stored() if key.startswith("segments/")]
    assert len(segments) == 2
    for key in (*segments, pointer.object_key, marker_key(pointer.object_key)):
        locked = await store.head(key)
        assert (await second.head(key)).locked_until_ms == locked.locked_until_ms >= began_ms + 10 * MINUTE_MS
    assert (store.early, second.early) == ([], [])


async def until_copied(pointer: ManifestPointer, second_bucket: Bucket) -> None:
    async with asyncio.timeout(60):
        while marker_key(pointer.object_key) not in second_bucket.stored():  # noqa: ASYNC110 - stores tell nobody
            await asyncio.sleep(0.05)


async def test_the_second_copy_goes_after_its_locks(
    cluster: Cluster, store: WatchedStore, make_batches: Batches, second: WatchedStore, second_bucket: Bucket
) -> None:
    await set_configs(cluster, {**LONG, "stratalog.tier.lock.ms": str(LOCK_MS)})
    await cluster.start_worker(grace_ms=0, copy_grace_ms=0, sweep_interval_ms=300, second=second)
    await offload(cluster, make_batches, 0, 2)
    pointer = cluster.pointer()
    await until_copied(pointer, second_bucket)
    stored = cluster.metadata.view.get(topic_key(cluster.topic.name))
    await cluster.metadata.propose(delete_topic(cluster.metadata.view, stored.record, stored.version, 0, 0))
    async with asyncio.timeout(60):
        while {key.split("/")[0] for key in second_bucket.stored()} != {"owners"}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert SystemClock().wall_ms() > pointer.lock_until_ms
    assert (store.early, second.early) == ([], [])


async def test_a_second_store_without_locks_gets_nothing_of_a_locked_topic(
    cluster: Cluster, make_batches: Batches, tmp_path: Path, background: ThreadBackground, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "second"
    unlocked = open_store(str(directory), background=background, clock=SystemClock(), random=random.Random(2))
    await set_configs(cluster, LONG)
    await cluster.start_worker(second=unlocked)
    await offload(cluster, make_batches, 0, 1)
    async with asyncio.timeout(60):
        while "which cannot lock objects" not in caplog.text:  # noqa: ASYNC110 - the log tells nobody
            await asyncio.sleep(0.05)
    assert not {path.suffix for path in object_files(directory)} & {".segment", ".manifest", ".committed"}
