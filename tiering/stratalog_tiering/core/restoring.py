"""The metadata of topics that are restored from their bucket, or attached to the cluster. Does no I/O.

A restored topic keeps its id, so its objects stay where they are. Its partitions begin without ledgers: the next record has
the offset at which the committed manifest ends. Records that were only on bookies are not in the bucket and are lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stratalog_metadata.client.topic_deletion import never_deleted
from stratalog_metadata.records import (
    DeletedTopic,
    Log,
    ManifestPointer,
    Partition,
    PendingTopic,
    RestoredTopic,
    Topic,
    manifest_pointer_key,
    partition_key,
    topic_key,
)
from stratalog_metadata.state.commands import ABSENT, Command, Delete, Put, Requirement, VersionIs
from stratalog_tiering.format.descriptor import TopicDescriptor

EPOCH_GAP: Final = 100_000
"""Leader epochs left out by a restore. The previous cluster may have gone beyond those in the bucket, but not by so many."""

PRODUCER_IDS_GAP: Final = 2**40
"""Producer ids left for each owner of a bucket. The state of earlier owners' producers is restored, so no id is used twice."""

_MIN_IN_SYNC: Final = "min.insync.replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionHistory:
    """The history of a partition in the bucket. ``pointer`` is None if nothing was ever offloaded; then the epoch is 0.

    ``log_start_offset``: readers begin there if it is beyond the history's start.
    """

    index: int
    pointer: ManifestPointer | None = None
    log_start_offset: int = 0
    record_count: int = 0
    leader_epoch: int = 0
    """The last leader epoch of the cold history."""
    left_out_records: int = 0
    left_out_end_offset: int = 0
    """If records are left out because the topic is restored up to a point: where they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicHistory:
    """The history of a topic in the bucket; one element of ``partitions`` for each partition, in order."""

    descriptor: TopicDescriptor
    partitions: tuple[PartitionHistory, ...]


def restored_topic(descriptor: TopicDescriptor, name: str, replication_factor: int | None) -> Topic:
    """The record of the restored topic, under ``name``.

    With another ``replication_factor`` than it had, ``min.insync.replicas`` is lowered to at most the factor.
    """
    factor = replication_factor or descriptor.replication_factor
    configs = dict(descriptor.configs)
    if _MIN_IN_SYNC in configs:
        configs[_MIN_IN_SYNC] = str(min(int(configs[_MIN_IN_SYNC]), factor))
    return Topic(
        name=name,
        topic_id=descriptor.topic_id,
        partition_count=descriptor.partition_count,
        replication_factor=factor,
        configs=configs,
    )


def restore_epoch(last_epoch: int, owner_number: int) -> int:
    """The leader epoch that a restored partition begins above.

    It is above every epoch in the bucket, and above those of all earlier restores, which may have left none in the bucket.
    """
    return max(last_epoch, owner_number * EPOCH_GAP) + EPOCH_GAP


def restore_from_bucket(topic: Topic, history: TopicHistory, owner_number: int) -> Command:
    """Create ``topic`` with its cold history. Requires that its name and its partitions are unknown to metadata."""
    updates = [Put(record=topic)]
    requirements: list[Requirement] = [VersionIs(key=topic_key(topic.name), version=ABSENT), never_deleted(topic.topic_id)]
    for found in history.partitions:
        epoch, pointer = restore_epoch(found.leader_epoch, owner_number), found.pointer
        start_offset = max(pointer.start_offset if pointer is not None else 0, found.log_start_offset)
        updates.append(Put(record=Partition(topic_id=topic.topic_id, index=found.index, leader_epoch=epoch)))
        updates.append(Put(record=Log(topic_id=topic.topic_id, index=found.index, log_start_offset=start_offset)))
        if pointer is not None:
            updates.append(Put(record=pointer))
        requirements += [
            VersionIs(key=make_key(topic.topic_id, found.index), version=ABSENT)
            for make_key in (partition_key, manifest_pointer_key)
        ]
    return Command(updates=tuple(updates), requirements=tuple(requirements))


def attach_from_bucket(topic: Topic, history: TopicHistory, owner_number: int, pending: PendingTopic, version: int) -> Command:
    """Create ``topic`` as `restore_from_bucket` does. Requires that ``pending`` has ``version``, and ends it.

    A tiering worker removes the marker that hides the topic from readers of the bucket.
    """
    restored = restore_from_bucket(topic, history, owner_number)
    return Command(
        updates=(*restored.updates, Delete(key=pending.key()), Put(record=RestoredTopic(topic_id=topic.topic_id))),
        requirements=(*restored.requirements, VersionIs(key=pending.key(), version=version)),
    )


def expire_pending_topic(pending: PendingTopic, version: int, now_ms: int, guards: tuple[Requirement, ...] = ()) -> Command:
    """Give up an attachment: what was written of the topic is deleted as that of a deleted topic is."""
    deleted = DeletedTopic(topic_id=pending.topic_id, name=pending.name, deleted_at_ms=now_ms)
    return Command(
        updates=(Delete(key=pending.key()), Put(record=deleted)),
        requirements=(*guards, VersionIs(key=pending.key(), version=version)),
    )
