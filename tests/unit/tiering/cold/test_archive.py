"""Reading a bucket alone: topics, committed manifests, and versions that were never committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import msgspec
import pytest
from support.archive_writer import ArchiveWriter
from support.markers import is_marked

from stratalog_core.errors import Invalid, NotFound
from stratalog_metadata.records import DeletedTopic, Topic
from stratalog_tiering.cold.archive import Archive, read_owner
from stratalog_tiering.format.object_keys import manifest_key, marker_key, owner_key
from stratalog_tiering.maintenance.deletion import mark_deleted
from stratalog_tiering.offload.ownership import check_claim, claim_bucket, take_over
from stratalog_tiering.offload.topic_descriptors import describe_topic

Store = Any
Batches = Callable[..., list[bytes]]


@pytest.mark.parametrize("version_objects", [False, True])
async def test_topics_and_their_newest_history_are_found(
    new_writer: Callable[..., ArchiveWriter], store: Store, topic: Topic, make_batches: Batches, version_objects: bool
) -> None:
    writer = new_writer(version_objects=version_objects)
    for offset in range(0, 40, 4):
        pointer, _ = await writer.append(0, make_batches(offset, [4]))
    archive = Archive(store)
    found = await archive.topic("flights")
    assert (found.topic_id, found.partition_count) == (topic.topic_id, 2)
    assert await archive.pointer(found, 0) == pointer
    assert await archive.pointer(found, 1) is None
    manifest = await archive.manifest(pointer)
    spans = [(entry.base_offset, entry.end_offset) async for entry in archive.segments(manifest)]
    assert spans == [(offset, offset + 4) for offset in range(0, 40, 4)]
    assert (await archive.footer(manifest.segments[-1])).end_offset == 40


async def test_an_uncommitted_version_is_ignored(
    writer: ArchiveWriter, store: Store, topic: Topic, make_batches: Batches
) -> None:
    pointer, _ = await writer.append(0, make_batches(0, [4]))
    for random_id in (0, 2**64 - 1):
        await store.put(manifest_key(topic.topic_id, 0, 2, random_id), [b"a loser of the race for version 2"])
        await store.put(manifest_key(topic.topic_id, 0, 1, random_id), [b"a loser of the race for version 1"])
    archive = Archive(store)
    assert await archive.pointer(await archive.topic("flights"), 0) == pointer


async def test_a_version_without_a_marker_is_not_committed(writer: ArchiveWriter, store: Store, make_batches: Batches) -> None:
    first, _ = await writer.append(0, make_batches(0, [4]))
    second, _ = await writer.append(0, make_batches(4, [4]))
    assert await is_marked(store, second)
    await store.delete([marker_key(second.object_key)])
    assert not await is_marked(store, second)
    archive = Archive(store)
    assert await archive.pointer(await archive.topic("flights"), 0) == first


async def test_deleted_topics_are_ignored(writer: ArchiveWriter, store: Store, topic: Topic, make_batches: Batches) -> None:
    await writer.append(0, make_batches(0, [4]))
    await mark_deleted(store, DeletedTopic(topic_id=topic.topic_id, name=topic.name, deleted_at_ms=9), now_ms=10, cluster_id="")
    archive = Archive(store)
    with pytest.raises(NotFound, match="contains none"):
        await archive.topic("flights")
    await describe_topic(store, topic)  # by an offload that had begun before
    assert await archive.topics() == []


async def test_topics_of_the_same_name_are_distinguished_by_id(writer: ArchiveWriter, store: Store, topic: Topic) -> None:
    again = msgspec.structs.replace(topic, topic_id=UUID(int=99))
    await describe_topic(store, topic)
    await describe_topic(store, again)
    archive = Archive(store)
    with pytest.raises(Invalid, match="give one of the ids") as ambiguous:
        await archive.topic("flights")
    for one in (topic, again):
        assert str(one.topic_id) in ambiguous.value.message
        assert (await archive.topic(str(one.topic_id))).topic_id == one.topic_id


async def test_a_bucket_belongs_to_one_cluster(store: Store) -> None:
    await claim_bucket(store, "one", 1)
    await claim_bucket(store, "one", 1)
    with pytest.raises(Invalid, match="belongs to cluster one"):
        await claim_bucket(store, "two", 1)


async def test_the_owner_is_found_although_the_object_of_an_earlier_one_is_lost(store: Store) -> None:
    await claim_bucket(store, "first", 1)
    for cluster_id in ("second", "third"):
        await take_over(store, cluster_id, 2)
    await store.delete([owner_key(1)])
    owner = await read_owner(store)
    assert owner is not None
    assert (owner.cluster_id, owner.number) == ("third", 2)
    assert await check_claim(store, "third") == owner
