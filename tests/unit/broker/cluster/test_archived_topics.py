"""The records of a bucket's topics: names, ends, epochs, growth, deletion and damage, and how many requests they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from uuid import UUID

import msgspec
import pytest
import pytest_asyncio
from support.filled_archive import RECORDS, FilledTopic, fill
from unit.tiering.conftest import FaultyStore

from stratalog_broker.cluster.archived_topics import ArchivedTopics
from stratalog_core.errors import Invalid, NotFound, Unavailable
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.client.memory_metadata import MemoryMetadata
from stratalog_metadata.records import (
    NO_OWNER,
    DeletedTopic,
    Log,
    ManifestPointer,
    Partition,
    Topic,
    log_key,
    manifest_pointer_key,
    partition_key,
    topic_key,
)
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.format.object_keys import topic_key as topic_object_key
from stratalog_tiering.maintenance.deletion import mark_deleted
from stratalog_tiering.offload.topic_descriptors import describe_topic
from stratalog_tiering.store import open_store

BROKER = 7
Served = Callable[..., ArchivedTopics]


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[FaultyStore]:
    background = ThreadBackground(4, "store")
    opened = open_store(str(tmp_path), background=background, clock=SystemClock(), random=Random())
    yield FaultyStore(opened)
    await opened.close()
    background.close()


@pytest.fixture
def metadata() -> MemoryMetadata:
    return MemoryMetadata()


@pytest.fixture
def served(store: FaultyStore, metadata: MemoryMetadata) -> Served:
    def make(*, with_deleted: bool = False) -> ArchivedTopics:
        return ArchivedTopics(
            Archive(store), metadata, BROKER, hidden=frozenset({"__consumer_offsets"}), with_deleted=with_deleted
        )  # fmt: skip

    return make


def names(metadata: MemoryMetadata) -> list[str]:
    return sorted(topic.name for topic in metadata.all(Topic))


def partition_of(metadata: MemoryMetadata, topic_id: UUID, index: int = 0) -> Partition:
    found = metadata.find(Partition, partition_key(topic_id, index))
    assert found is not None
    return found


def damage_manifest(directory: Path, topic_id: UUID, partition: int) -> None:
    """Overwrite the newest manifest of a partition."""
    min(directory.glob(f"manifests/{topic_id.hex}/{partition}/*.manifest")).write_bytes(b"damaged")


def alter_marker(directory: Path, topic_id: UUID, partition: int) -> None:
    """Alter the newest marker of a partition so that it looks like one of a later release."""
    path = min(directory.glob(f"manifests/{topic_id.hex}/{partition}/*.committed"))
    path.write_bytes(path.read_bytes().replace(b'"format_version": 1', b'"format_version": 9'))


async def test_a_topic_has_the_ends_and_the_epoch_of_its_history(
    store: FaultyStore, metadata: MemoryMetadata, served: Served
) -> None:
    filled = FilledTopic(store, "flights", 2)
    await filled.append(0, 2)
    await filled.append(0, 1, leader_epoch=5)
    await fill(store, "__consumer_offsets")
    assert await served().load() == 2
    assert names(metadata) == ["flights"]
    topic_id = filled.topic.topic_id
    assert metadata.find(Topic, topic_key("flights")) == filled.topic
    assert partition_of(metadata, topic_id) == Partition(topic_id=topic_id, index=0, owner=BROKER, leader_epoch=5)
    pointer = metadata.find(ManifestPointer, manifest_pointer_key(topic_id, 0))
    assert pointer is not None
    assert (pointer.start_offset, pointer.end_offset) == (0, 3 * RECORDS)
    assert metadata.find(Log, log_key(topic_id, 0)) == Log(topic_id=topic_id, index=0)
    assert partition_of(metadata, topic_id, 1).owner == BROKER, "a partition without history is empty"
    assert metadata.find(ManifestPointer, manifest_pointer_key(topic_id, 1)) is None


async def test_more_history_gets_a_new_epoch_and_nothing_else_changes(
    store: FaultyStore, metadata: MemoryMetadata, served: Served
) -> None:
    filled = await fill(store, "flights", 2)
    topics = served()
    await topics.load()
    topic_id = filled.topic.topic_id
    changed: list[str] = []
    metadata.subscribe(lambda changes: changed.extend(change.key for change in changes))
    await topics.load()
    assert changed == []
    await filled.append(1)
    await topics.load()
    assert changed == [manifest_pointer_key(topic_id, 1), partition_key(topic_id, 1)]
    assert partition_of(metadata, topic_id, 1).leader_epoch == 1
    await mark_deleted(store, DeletedTopic(topic_id=topic_id, name="flights", deleted_at_ms=9), now_ms=10, cluster_id="")
    await fill(store, "other")
    await topics.load()
    assert names(metadata) == ["other"]
    assert metadata.find(Partition, partition_key(topic_id, 0)) is None


async def test_deleted_topics_and_topics_of_one_name_are_named_by_their_ids(
    store: FaultyStore, metadata: MemoryMetadata, served: Served
) -> None:
    first = (await fill(store, "flights")).topic
    again = msgspec.structs.replace(first, topic_id=UUID(int=99))
    await describe_topic(store, again)
    await served().load()
    assert names(metadata) == sorted([f"flights-{first.topic_id}", f"flights-{again.topic_id}"])
    await mark_deleted(store, DeletedTopic(topic_id=first.topic_id, name="flights", deleted_at_ms=9), now_ms=10, cluster_id="")
    alone = MemoryMetadata()
    await ArchivedTopics(Archive(store), alone, BROKER, hidden=frozenset(), with_deleted=True).load()
    assert names(alone) == ["flights", f"flights-{first.topic_id}"]


@pytest.mark.parametrize("damage", [damage_manifest, alter_marker])
async def test_a_damaged_partition_has_no_owner_and_the_others_are_served(
    store: FaultyStore, metadata: MemoryMetadata, served: Served, tmp_path: Path, damage: Callable[[Path, UUID, int], None]
) -> None:
    filled = await fill(store, "flights", 2)
    topic_id = filled.topic.topic_id
    damage(tmp_path, topic_id, 0)
    topics = served()
    await topics.load()
    assert [partition_of(metadata, topic_id, index).owner for index in (0, 1)] == [NO_OWNER, BROKER]
    await filled.append(1)
    damage(tmp_path, topic_id, 1)
    await topics.load()
    assert partition_of(metadata, topic_id, 1).owner == BROKER, "its earlier history stays"
    assert metadata.find(ManifestPointer, manifest_pointer_key(topic_id, 1)) is not None


async def test_an_empty_bucket_and_a_newer_format_are_refused(store: FaultyStore, served: Served) -> None:
    with pytest.raises(NotFound, match="contains no topics: check bucket and prefix"):
        await served().load()
    key = topic_object_key(UUID(int=1), 1)
    newer = {"topic_id": str(UUID(int=1)), "name": "t", "partition_count": 1, "replication_factor": 1, "format_version": 99}
    await store.put(key, [msgspec.json.encode(newer)])
    with pytest.raises(Invalid, match=r"has format version 99; this release reads 1: upgrade it"):
        await served().load()


async def test_an_unavailable_store_changes_nothing(store: FaultyStore, metadata: MemoryMetadata, served: Served) -> None:
    filled = await fill(store, "flights")
    topics = served()
    await topics.load()
    index = metadata.index
    await filled.append(0)
    store.before = lambda name, key: Unavailable("away") if key.startswith("manifests/") else None
    with pytest.raises(Unavailable):
        await topics.load()
    assert metadata.index == index


async def test_requests_grow_with_partitions_and_not_with_segments(store: FaultyStore, served: Served) -> None:
    partitions = 20
    await fill(store, "flights", partitions, segments=10)
    topics = served()
    for expected in (
        # The topics' names and one descriptor; then listing, marker and manifest of each partition.
        {"list": 1 + partitions, "get": 1 + 2 * partitions},
        {"list": 1 + partitions, "get": 1},
    ):
        store.calls.clear()
        await topics.load()
        assert Counter(name for name, _ in store.calls) == expected
