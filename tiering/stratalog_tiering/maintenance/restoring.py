"""Restores topics from their bucket into the metadata of a cluster that has lost them, or never had them.

Only metadata is written, besides the bucket's next owner (``offload/ownership.py``): objects stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Conflict, Invalid, NotFound
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import decide_again, propose_guarded
from stratalog_metadata.records import PRODUCER_IDS, Counter, Topic, counter_key, deleted_topic_key
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs
from stratalog_tiering.cold.archive import Archive, ambiguous_name
from stratalog_tiering.core.restoring import (
    PRODUCER_IDS_GAP,
    PartitionHistory,
    TopicHistory,
    restore_from_bucket,
    restored_topic,
)
from stratalog_tiering.format.descriptor import TopicDescriptor
from stratalog_tiering.store import ObjectStore

_READS_AT_ONCE: Final = 32
_TIMEOUT_S: Final = 60.0


async def wanted_topics(store: ObjectStore, names: Sequence[str]) -> list[TopicDescriptor]:
    """The bucket's topics with these names or ids; all that are not deleted if there are none.

    Raises ``NotFound`` that lists the names, and ``Invalid`` if two of the topics have one name.
    """
    archive = Archive(store)
    found = [await archive.topic(name) for name in dict.fromkeys(names)] if names else await archive.topics()
    if not found:
        raise NotFound(f"{store.url} contains no topic")
    for topic in found:
        same = [each for each in found if each.name == topic.name]
        if len(same) > 1:
            raise Invalid(f"{ambiguous_name(topic.name, same)}; give one of the ids with --topic")
    return found


async def read_history(
    store: ObjectStore, topics: Sequence[TopicDescriptor], on_partition: Callable[[], None] = lambda: None
) -> list[TopicHistory]:
    """The histories of the topics in the bucket, by their newest commit markers. Raises ``Corrupt``, ``Unavailable``."""
    archive = Archive(store)

    async def partition(topic: TopicDescriptor, index: int) -> PartitionHistory:
        pointer = await archive.pointer(topic, index)
        found = PartitionHistory(index=index)
        if pointer is not None:
            records = (await archive.manifest(pointer)).record_count
            epoch = await archive.newest_epoch(pointer)
            found = PartitionHistory(index=index, pointer=pointer, record_count=records, leader_epoch=epoch)
        on_partition()
        return found

    histories = []
    for topic in topics:
        partitions = await bounded_map(partial(partition, topic), range(topic.partition_count), _READS_AT_ONCE)
        histories.append(TopicHistory(descriptor=topic, partitions=tuple(partitions)))
    return histories


async def skip_producer_ids(metadata: MetadataClient, owner_number: int) -> None:
    """Have new producers get ids that no earlier owner of the bucket allocated. Raises ``Unavailable``, ``OutcomeUnknown``."""
    key, floor = counter_key(PRODUCER_IDS), owner_number * PRODUCER_IDS_GAP

    async def attempt() -> None:
        (found,) = await metadata.read([key], _TIMEOUT_S)
        counter = found.record if found is not None and isinstance(found.record, Counter) else Counter(name=PRODUCER_IDS)
        if counter.next_value >= floor:
            return
        raised: Counter = msgspec.structs.replace(counter, next_value=floor)
        unchanged = VersionIs(key=key, version=found.version if found is not None else ABSENT)
        await propose_guarded(metadata, Command(updates=(Put(record=raised),), requirements=(unchanged,)), key, _TIMEOUT_S)

    await decide_again("the counter of producer ids", attempt)


def is_known(view: MetadataView, history: TopicHistory, name: str) -> bool:
    """Whether the cluster has the topic. Raises ``Conflict`` if it has another topic of that name, or has deleted the topic."""
    if view.get(deleted_topic_key(history.descriptor.topic_id)) is not None:
        raise Conflict(
            f"the cluster deleted topic {name!r}: bring it back with `stratalog topic undelete` while that is possible"
        )
    topics = {topic.topic_id: topic.name for topic in view.all(Topic)}
    if history.descriptor.topic_id in topics:
        return True
    if name in topics.values():
        raise Conflict(f"the cluster has another topic {name!r}: restore this one alone, with --topic and --as")
    return False


async def restore_history(
    metadata: MetadataClient, history: TopicHistory, name: str, replication_factor: int | None, owner_number: int
) -> bool:
    """Restore one topic under ``name``; False if the cluster has a topic with its id, which is left as it is.

    Call it again after an error: nothing is restored twice. Raises ``Conflict`` if another topic has the name,
    ``Unavailable``, ``OutcomeUnknown``.
    """
    await metadata.refresh(_TIMEOUT_S)
    if is_known(metadata.view, history, name):
        return False
    topic = restored_topic(history.descriptor, name, replication_factor)
    await propose_guarded(metadata, restore_from_bucket(topic, history, owner_number), topic.key(), _TIMEOUT_S)
    return True
