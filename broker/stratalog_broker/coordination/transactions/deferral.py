"""Defers the markers of partitions whose topic is deleted: a transaction ends, and its outcome waits for the topic's return.

Without its marker a transaction would stay open in the partition for good if the topic is restored. Until then nobody can write
to the partition, and the transactional id must not wait. So the outcome is put beside the deletion in metadata, by a command
that requires that the deletion is not undone. The partition's owner writes the marker (``partitions/deferred_markers.py``).

The first outcome of a producer in a deletion stays: only that transaction can be open, because no other one has begun since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from stratalog_broker.coordination.transactions.core.marker_queue import Marker
from stratalog_broker.coordination.transactions.core.transaction import NO_TOPIC_ID, MarkedPartition
from stratalog_core.errors import Overloaded
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import (
    DEFERRED_MARKERS,
    DeferredMarker,
    DeletedTopic,
    Partition,
    Record,
    Topic,
    deleted_topic_key,
    partition_key,
    topic_key,
)
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs

DEFERRED_MAX: Final = 100_000
"""Deferred markers of a cluster. Each is a record of the metadata, which is kept in memory."""


class _Deletion(NamedTuple):
    """The deletion of a topic that can be restored, and the version of its record."""

    deleted: DeletedTopic
    version: int


class _Found(NamedTuple):
    """A marker's partition, as the metadata quorum has it."""

    is_there: bool
    deletion: _Deletion | None = None
    namesake: MarkedPartition | None = None
    """The same partition of another topic, which has the name now."""


class _Deferred(NamedTuple):
    """A marker to defer, and the requirement that the deletion is not undone."""

    record: DeferredMarker
    is_deleted: VersionIs


async def settle_deleted(metadata: MetadataClient, markers: Sequence[Marker]) -> list[tuple[Marker, MarkedPartition | None]]:
    """Return the markers that are not to be sent, because their partitions are deleted; defer those that may be wanted later.

    With each comes the partition that gets it instead, if there is one: the transaction may have written to that, because the
    coordinator's view may have been behind when the partition was added.

    By linearizable reads. Raises ``Conflict`` (a topic was restored meanwhile), ``Overloaded`` (too many are deferred),
    ``Unavailable``, ``OutcomeUnknown``: try again.
    """
    found = await _find(metadata, {marker.partition for marker in markers})
    deferred: dict[str, _Deferred] = {}
    for marker in markers:
        deletion = found[marker.partition].deletion
        if deletion is not None:
            record = _record_of(marker, deletion.deleted)
            deferred[record.key()] = _Deferred(record, VersionIs(key=deletion.deleted.key(), version=deletion.version))
    await _put(metadata, deferred)
    return [(marker, found[marker.partition].namesake) for marker in markers if not found[marker.partition].is_there]


async def _find(metadata: MetadataClient, partitions: Iterable[MarkedPartition]) -> dict[MarkedPartition, _Found]:
    keys = {
        each: (topic_key(each.topic), partition_key(each.topic_id, each.partition), deleted_topic_key(each.topic_id))
        for each in partitions
    }
    wanted = sorted({key for several in keys.values() for key in several})
    read = dict(zip(wanted, await metadata.read(wanted), strict=True))
    found = {}
    for partition, several in keys.items():
        named, own, deleted = (read[key] for key in several)
        deletion = _Deletion(deleted.record, deleted.version) if deleted and isinstance(deleted.record, DeletedTopic) else None
        found[partition] = _judged(
            partition, named.record if named is not None else None, own.record if own is not None else None, deletion
        )
    return found


def _judged(partition: MarkedPartition, named: Record | None, own: Record | None, deletion: _Deletion | None) -> _Found:
    has_name = isinstance(named, Topic) and partition.partition < named.partition_count
    if partition.topic_id == NO_TOPIC_ID:
        return _Found(has_name)
    if isinstance(own, Partition):
        return _Found(is_there=True)
    if deletion is not None and (deletion.deleted.is_final or partition.partition >= len(deletion.deleted.leader_epochs)):
        deletion = None
    namesake = partition._replace(topic_id=named.topic_id) if isinstance(named, Topic) and has_name else None
    return _Found(is_there=False, deletion=deletion, namesake=namesake)


def _record_of(marker: Marker, deleted: DeletedTopic) -> DeferredMarker:
    decision, partition = marker
    return DeferredMarker(
        topic_id=partition.topic_id,
        index=partition.partition,
        leader_epoch=deleted.leader_epochs[partition.partition],
        producer_id=decision.producer_id,
        producer_epoch=decision.producer_epoch,
        coordinator_epoch=decision.coordinator_epoch,
        is_commit=decision.is_commit,
    )


async def _put(metadata: MetadataClient, deferred: Mapping[str, _Deferred]) -> None:
    """Put the records that are not there yet."""
    if not deferred:
        return
    there = await metadata.read(list(deferred))
    missing = [each for each, found in zip(deferred.values(), there, strict=True) if found is None]
    if not missing:
        return
    count = len(metadata.view.with_prefix(DEFERRED_MARKERS)) + len(missing)
    if count > DEFERRED_MAX:
        raise Overloaded(
            f"{count} markers would be deferred; maximum is {DEFERRED_MAX}: restore deleted topics, or delete them for good"
            " (`stratalog topic delete --now`)"
        )
    deletions = dict.fromkeys(each.is_deleted for each in missing)
    are_new = (VersionIs(key=each.record.key(), version=ABSENT) for each in missing)
    updates = tuple(Put(record=each.record) for each in missing)
    await metadata.propose(Command(updates=updates, requirements=(*deletions, *are_new)))
