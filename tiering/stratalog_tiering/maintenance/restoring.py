"""Restores topics from their bucket into the metadata of a cluster that has lost them, or never had them.

Only metadata is written, besides the bucket's next owner (``offload/ownership.py``): objects stay where they are. A topic that
is restored up to a point also gets new manifest versions, which end there (``cutting.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Conflict, Invalid, NotFound
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import decide_again, propose_guarded
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import (
    PRODUCER_IDS,
    Counter,
    ManifestPointer,
    Topic,
    counter_key,
    deleted_topic_key,
    manifest_pointer_key,
)
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs
from stratalog_tiering.cold.archive import Archive, ReadTopics, ambiguous_name, named_topic, readable_topics
from stratalog_tiering.core.policy import TierPolicy, tier_policy
from stratalog_tiering.core.restoring import (
    PRODUCER_IDS_GAP,
    PartitionHistory,
    TopicHistory,
    restore_from_bucket,
    restored_topic,
)
from stratalog_tiering.format.descriptor import OwnerDescriptor, TopicDescriptor
from stratalog_tiering.maintenance.cutting import CutPoint, CutPorts, cut_end, cut_history, point_offset
from stratalog_tiering.offload.commit_markers import mark_committed
from stratalog_tiering.offload.ownership import refuse_next_owner, take_over
from stratalog_tiering.store import ObjectStore

Points = Mapping[int, CutPoint] | CutPoint
"""The point up to which each partition is restored, by its number, or one for all."""
_READS_AT_ONCE: Final = 32
_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredTopics:
    """``topics``: each history, and whether it was restored; False: the cluster had the topic already."""

    owner: OwnerDescriptor
    topics: tuple[tuple[TopicHistory, bool], ...]


async def restore_topics(
    metadata: MetadataClient,
    ports: CutPorts,
    names: Sequence[str],
    *,
    points: Points | None = None,
    new_name: str | None = None,
    replication_factor: int | None = None,
    on_partition: Callable[[], None] = lambda: None,
) -> RestoredTopics:
    """Take the bucket over for the cluster of ``metadata`` and restore the topics that ``names`` name, or all of them.

    Call it again after an error, also if the process has ended in the middle: nothing is restored twice. ``on_partition`` is
    called for each partition whose history was read. Raises ``Conflict`` if another cluster takes the bucket over meanwhile or
    another topic has a name, ``NotFound``, ``Invalid``, ``Corrupt``, ``Unavailable``, ``OutcomeUnknown``.
    """
    owner = await take_over(ports.store, ports.cluster_id, ports.clock.wall_ms())
    # The previous owner's workers may have committed until now, and described topics that the bucket did not have.
    histories = await read_history(ports.store, await wanted_topics(ports.store, names), on_partition)
    await skip_producer_ids(metadata, owner.number)
    if points is not None:
        await metadata.refresh(_TIMEOUT_S)
        old, new = list[TopicHistory](), list[TopicHistory]()
        for each in histories:
            (old if is_known(metadata.view, each, new_name or each.descriptor.name) else new).append(each)
        histories = [*await cut_histories(ports, new, points, topic_defaults(metadata.view)), *old]
    restored: list[tuple[TopicHistory, bool]] = []
    for history in histories:
        name = new_name or history.descriptor.name
        done = await restore_history(metadata, history, name, replication_factor, owner.number, (ports.store, ports.clock))
        restored.append((history if done else await _in_cluster(ports.store, metadata.view, history), done))
    return RestoredTopics(owner=owner, topics=tuple(restored))


async def _in_cluster(store: ObjectStore, view: MetadataView, history: TopicHistory) -> TopicHistory:
    """The history as the cluster has it, which may be cut: an earlier attempt ended before it marked the cut in the bucket."""
    archive, partitions = Archive(store), list[PartitionHistory]()
    for found in history.partitions:
        pointer = view.find(ManifestPointer, manifest_pointer_key(history.descriptor.topic_id, found.index))
        if found.pointer is not None and pointer is not None and pointer.end_offset < found.pointer.end_offset:
            records = (await archive.manifest(pointer)).record_count
            found = replace(
                found, pointer=pointer, record_count=records, left_out_records=found.record_count - records,
                left_out_end_offset=found.pointer.end_offset,
            )  # fmt: skip
        partitions.append(found)
    return TopicHistory(descriptor=history.descriptor, partitions=tuple(partitions))


async def wanted_topics(store: ObjectStore, names: Sequence[str]) -> list[TopicDescriptor]:
    """The bucket's topics with these names or ids. Raises as :func:`topics_to_restore`, and ``Unavailable``."""
    return topics_to_restore(store.url, await readable_topics(store), names)


def topics_to_restore(url: str, topics: ReadTopics, names: Sequence[str]) -> list[TopicDescriptor]:
    """The topics of the bucket ``url`` with these names or ids; all that are not deleted if there are none.

    Without names, topics whose descriptor is damaged are left out. Raises ``NotFound`` that lists the names, ``Corrupt`` if a
    name may be that of such a topic, and ``Invalid`` if two of the topics have one name.
    """
    found = [topic.descriptor for topic in topics.readable if not topic.is_deleted]
    try:
        found = [named_topic(url, found, name) for name in dict.fromkeys(names)] or found
    except NotFound:
        topics.require_all()
        raise
    if not found:
        topics.require_all()
        raise NotFound(f"{url} contains no topic")
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


async def cut_histories(
    ports: CutPorts, histories: Sequence[TopicHistory], points: Points, defaults: Mapping[str, str]
) -> list[TopicHistory]:
    """The histories up to the points; stores the versions that `restore_history` commits. Raises as `cut_history`.

    ``defaults`` are the cluster's configs.
    """
    cut: list[TopicHistory] = []
    for history in histories:
        policy = tier_policy({**defaults, **history.descriptor.configs})
        partitions = [await _cut(ports, found, _point_of(points, found.index), policy) for found in history.partitions]
        cut.append(TopicHistory(descriptor=history.descriptor, partitions=tuple(partitions)))
    return cut


async def _cut(ports: CutPorts, found: PartitionHistory, point: CutPoint | None, policy: TierPolicy) -> PartitionHistory:
    if point is None or found.pointer is None:
        return found
    offset = await point_offset(ports.store, ports.clock, found.pointer, point)
    if offset == found.pointer.end_offset:
        return found
    made = await cut_history(ports, found.pointer, offset, policy)
    return replace(
        found, pointer=made.pointer, record_count=made.record_count, left_out_records=made.left_out_records,
        left_out_end_offset=made.left_out_end_offset,
    )  # fmt: skip


async def planned_cuts(ports: CutPorts, history: TopicHistory, points: Points) -> dict[int, int]:
    """Where the history would end, by partition, without the partitions of which nothing would be left out; changes nothing.

    Raises as `cut_history`.
    """
    ends: dict[int, int] = {}
    for found in history.partitions:
        point = _point_of(points, found.index)
        if point is not None and found.pointer is not None:
            offset = await point_offset(ports.store, ports.clock, found.pointer, point)
            if offset < found.pointer.end_offset:
                ends[found.index] = await cut_end(ports, found.pointer, offset)
    return ends


def _point_of(points: Points, index: int) -> CutPoint | None:
    return points if isinstance(points, CutPoint) else points.get(index)


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
    metadata: MetadataClient,
    history: TopicHistory,
    name: str,
    replication_factor: int | None,
    owner_number: int,
    marked_in: tuple[ObjectStore, Clock] | None = None,
) -> bool:
    """Restore one topic under ``name``; False if the cluster has a topic with its id, which is left as it is.

    If the history was cut, the bucket is told that it is committed: ``marked_in`` is the bucket. Call it again after an error:
    nothing is restored twice. Raises ``Conflict`` if another topic has the name, or another cluster has taken the bucket over
    meanwhile, ``Unavailable``, ``OutcomeUnknown``.
    """
    await metadata.refresh(_TIMEOUT_S)
    if is_known(metadata.view, history, name):
        return False
    topic = restored_topic(history.descriptor, name, replication_factor)
    if marked_in is not None:
        # What another owner has committed since the history was read is not in it.
        await refuse_next_owner(marked_in[0], owner_number)
    await propose_guarded(metadata, restore_from_bucket(topic, history, owner_number), topic.key(), _TIMEOUT_S)
    if marked_in is not None:
        store, clock = marked_in
        for found in history.partitions:
            if found.left_out_end_offset and found.pointer is not None:
                # Without the marker the next owner does not see the cut, which would be a fork of its history.
                await refuse_next_owner(store, owner_number)
                await mark_committed(store, found.pointer, clock.wall_ms())
    return True
