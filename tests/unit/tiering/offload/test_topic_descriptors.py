"""Topic descriptors are written once for each change of a topic, whoever writes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stratalog_metadata.records import Topic
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.format.descriptor import Detachment
from stratalog_tiering.format.object_keys import topic_key, topic_prefix
from stratalog_tiering.offload.ports import trusted
from stratalog_tiering.offload.topic_descriptors import TopicDescriptors, describe_topic
from stratalog_tiering.store import ObjectInfo

Cluster = Any
Store = Any
Batches = Callable[..., list[bytes]]


def writes(store: Store) -> list[str]:
    return [key for name, key in store.calls if name == "put" and key.startswith("topics/")]


async def test_a_descriptor_is_written_only_on_change(store: Store, topic: Topic) -> None:
    descriptors = TopicDescriptors(store, trusted)
    for _ in range(5):
        await descriptors.ensure(topic, 1)
    assert writes(store) == [topic_key(topic.topic_id, 1)]
    assert [name for name, _ in store.calls] == ["list", "put"]
    changed = msgspec.structs.replace(topic, configs={"retention.ms": "5"})
    for each, version in ((changed, 2), (changed, 2), (topic, 3), (topic, 3)):
        await descriptors.ensure(each, version)
    assert writes(store) == [topic_key(topic.topic_id, version) for version in (1, 2, 3)]
    assert [found.configs for found in await Archive(store).topics()] == [topic.configs]


async def test_a_second_worker_writes_nothing(store: Store, topic: Topic) -> None:
    await TopicDescriptors(store, trusted).ensure(topic, 1)
    again = TopicDescriptors(store, trusted)
    store.calls.clear()
    for _ in range(5):
        await again.ensure(topic, 1)
    assert [name for name, _ in store.calls] == ["list", "get"]


async def test_a_change_that_was_taken_back_is_taken_back_in_the_bucket_too(store: Store, topic: Topic) -> None:
    """Another worker has described the topic while it was changed; this one has offloaded before and after only."""
    descriptors, others = TopicDescriptors(store, trusted), TopicDescriptors(store, trusted)
    await descriptors.ensure(topic, 1)
    await others.ensure(msgspec.structs.replace(topic, configs={"retention.ms": "1"}), 2)
    await descriptors.ensure(topic, 3)
    assert [found.configs for found in await Archive(store).topics()] == [topic.configs]


async def test_workers_that_describe_a_topic_at_once_agree(store: Store, topic: Topic) -> None:
    """The listing of one is made before the write of the other."""
    other = msgspec.structs.replace(topic, partition_count=5)
    await describe_topic(store, topic)

    async def nothing(prefix: str) -> AsyncIterator[ObjectInfo]:
        nothing_yet: list[ObjectInfo] = []
        for info in nothing_yet:
            yield info

    listed, store.list = store.list, nothing
    await describe_topic(store, topic)
    assert len(writes(store)) == 2, "the second write is refused, because the key exists"
    await describe_topic(store, other)
    store.list = listed
    (found,) = await Archive(store).topics()
    assert found.partition_count == 5


async def test_an_outdated_view_hides_no_partition(store: Store, topic: Topic) -> None:
    """Partitions were added, and another worker has described the topic, since this one has looked at metadata."""
    await describe_topic(store, msgspec.structs.replace(topic, partition_count=5))
    await describe_topic(store, topic)
    (found,) = await Archive(store).topics()
    assert found.partition_count == 5


async def test_an_offload_costs_no_request_for_the_topic(cluster: Cluster, make_batches: Batches) -> None:
    await cluster.start_worker()
    for base in range(0, 10, 2):
        await cluster.add_ledger(make_batches(base, [2]), base)
        await cluster.until(lambda end=base + 2: cluster.pointer() is not None and cluster.pointer().end_offset == end)
    descriptors = topic_prefix(cluster.topic.topic_id)
    requests = [(name, key) for name, key in cluster.store.calls if key.startswith(descriptors)]
    assert [name for name, _ in requests] == ["list", "put"]


@pytest.mark.parametrize("damaged", [(1,), (2,), (1, 2)])
async def test_a_topic_whose_descriptors_are_damaged_is_described_again(
    store: Store, topic: Topic, store_directory: Path, damaged: tuple[int, ...]
) -> None:
    detachment = Detachment(cluster_id="before", topic_version=7)
    await describe_topic(store, msgspec.structs.replace(topic, partition_count=1), detachment)
    await describe_topic(store, topic)
    for version in damaged:
        (store_directory / topic_key(topic.topic_id, version)).write_bytes(b"{")
    store.calls.clear()
    await describe_topic(store, topic)
    assert writes(store) == ([topic_key(topic.topic_id, 3)] if 2 in damaged else [])
    (found,) = await Archive(store).topics()
    assert found.partition_count == topic.partition_count
    assert bool(found.detached) == (damaged != (1, 2)), "only descriptors say that it was detached"


async def test_a_damaged_descriptor_stops_no_offload(cluster: Cluster, make_batches: Batches, store_directory: Path) -> None:
    await cluster.add_ledger(make_batches(0, [1]), 0)
    worker = await cluster.start_worker()
    await cluster.until(lambda: (made := cluster.pointer()) is not None and made.end_offset == 1)
    await worker.close()
    (store_directory / topic_key(cluster.topic.topic_id, 1)).write_bytes(b"{")
    await cluster.start_worker("worker-2")
    await cluster.add_ledger(make_batches(1, [1]), 1)
    await cluster.until(lambda: cluster.pointer().end_offset == 2)
