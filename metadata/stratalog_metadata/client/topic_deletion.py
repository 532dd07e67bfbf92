"""The commands that delete a topic, restore it, and make its deletion final. Does no I/O.

A deletion removes the topic and the ownership of its partitions, so nobody can read or write them. Logs, ledgers and manifest
pointers stay until the deletion becomes final: bookies and tiering workers keep what these records name. No ledger is opened
meanwhile, because that requires the ownership.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import msgspec

from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import (
    DeletedTopic,
    Ledger,
    Partition,
    RestoredTopic,
    Topic,
    deferred_markers_prefix,
    deleted_topic_key,
    fork_decision_key,
    log_key,
    manifest_pointer_key,
    partition_key,
    tier_request_key,
    tier_status_key,
    topic_key,
)
from stratalog_metadata.state.commands import ABSENT, Command, Delete, Put, Requirement, VersionIs

_KEPT_OF_EACH_PARTITION: Final[tuple[Callable[[UUID, int], str], ...]] = (
    log_key,
    manifest_pointer_key,
    tier_status_key,
    fork_decision_key,
)


PART_RECORDS_MAX: Final = 1_000
"""A command that makes a deletion final removes about this many records: no other command waits long behind it."""


def delete_topic(
    view: MetadataView,
    topic: Topic,
    version: int,
    deleted_at_ms: int,
    restorable_ms: int,
    unchanged: tuple[Requirement, ...] = (),
) -> Command:
    """Delete ``topic``, whose record has ``version``, so that it can be restored for ``restorable_ms``.

    Requires what ``unchanged`` says, and that no partition changes its owner meanwhile: a restored partition begins above the
    last leader epoch. The ``RestoredTopic`` of an earlier deletion stays: it says that the bucket may have the marker of that
    one.
    """
    requirements: list[Requirement] = [VersionIs(key=topic.key(), version=version), *unchanged]
    keys = [topic.key()]
    epochs, replicas = [], []
    for index in range(topic.partition_count):
        key = partition_key(topic.topic_id, index)
        found = view.get(key)
        requirements.append(VersionIs(key=key, version=found.version if found is not None else ABSENT))
        partition = found.record if found is not None else None
        epochs.append(partition.leader_epoch if isinstance(partition, Partition) else 0)
        replicas.append(partition.replicas if isinstance(partition, Partition) else ())
        keys += [key, tier_request_key(topic.topic_id, index)]
    deleted = DeletedTopic(
        topic_id=topic.topic_id, name=topic.name, deleted_at_ms=deleted_at_ms, restorable_ms=restorable_ms, topic=topic,
        leader_epochs=tuple(epochs), replicas=tuple(replicas) if any(replicas) else (),
    )  # fmt: skip
    return Command(updates=(*(Delete(key=key) for key in keys), Put(record=deleted)), requirements=tuple(requirements))


def never_deleted(topic_id: UUID) -> Requirement:
    """Require that no topic of this id was deleted. Every command that creates a topic needs it.

    That the topic's name is free does not guard a command that is proposed again after a lost answer: the topic may have been
    created and deleted meanwhile, and would come back with an empty log. The record of the deletion outlives all attempts,
    unless the topic is restored: its partitions are there again then, perhaps under another name (:func:`never_existed`).
    """
    return VersionIs(key=deleted_topic_key(topic_id), version=ABSENT)


def never_existed(topic_id: UUID) -> tuple[Requirement, ...]:
    """Require that there neither is nor was a topic of this id, whatever its name."""
    return never_deleted(topic_id), VersionIs(key=partition_key(topic_id, 0), version=ABSENT)


def restore_topic(deleted: DeletedTopic, version: int, name: str) -> Command:
    """Restore a topic under ``name``, which must be free. ``version`` is that of the record ``deleted``."""
    assert deleted.topic is not None, f"the deletion of topic {deleted.name!r} is final"
    topic: Topic = msgspec.structs.replace(deleted.topic, name=name)
    partitions = (
        Partition(
            topic_id=topic.topic_id, index=index, leader_epoch=epoch,
            replicas=deleted.replicas[index] if deleted.replicas else (),
        )
        for index, epoch in enumerate(deleted.leader_epochs)
    )  # fmt: skip
    return Command(
        updates=(
            Delete(key=deleted.key()),
            Put(record=topic),
            *(Put(record=partition) for partition in partitions),
            Put(record=RestoredTopic(topic_id=topic.topic_id)),
        ),
        requirements=(VersionIs(key=deleted.key(), version=version), VersionIs(key=topic_key(name), version=ABSENT)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionPart:
    """A step of a final deletion: removes the records at ``keys``, and leaves ``deleted`` as the deletion's record."""

    keys: Sequence[str]
    deleted: DeletedTopic

    def command(self, version: int, guards: tuple[Requirement, ...] = ()) -> Command:
        """Require that the deletion's record is at ``version``: as it was found, or as the part before left it."""
        requirements = (*guards, VersionIs(key=self.deleted.key(), version=version))
        return Command(updates=(*(Delete(key=key) for key in self.keys), Put(record=self.deleted)), requirements=requirements)


def finish_deletion(view: MetadataView, deleted: DeletedTopic) -> Iterator[DeletionPart]:
    """Make the deletion final: yield the commands, in order, that remove the topic's logs, ledgers and manifest pointers.

    The first of them ends the time for a restore. A topic may have hundreds of thousands of records, so each command removes
    about ``PART_RECORDS_MAX``, and its record of the deletion says what is left. A caller that finds such a record, or deferred
    markers of the topic, calls this again, to go on. Yields nothing if nothing is left.

    ``view`` must be at the version of the record ``deleted``, or newer: it then has all ledgers of the topic that are left. Ask
    for the next command once the view has the one before: no marker is deferred after the first of them.
    """
    ledgers: dict[int, list[str]] = defaultdict(list)
    for ledger in view.all(Ledger):
        if ledger.topic_id == deleted.topic_id:
            ledgers[ledger.partition].append(ledger.key())
    keys: list[str] = []
    left = deleted.partitions_kept
    for index in reversed(range(left)):
        for key in sorted(ledgers[index]):
            if len(keys) >= PART_RECORDS_MAX:
                yield _part(deleted, keys, left)
                keys = []
            keys.append(key)
        # In one command: who writes a partition's status requires its log.
        keys += [make_key(deleted.topic_id, index) for make_key in _KEPT_OF_EACH_PARTITION]
        left = index
        if len(keys) >= PART_RECORDS_MAX or left == 0:
            yield _part(deleted, keys, left)
            keys = []
    markers = [found.record.key() for found in view.with_prefix(deferred_markers_prefix(deleted.topic_id))]
    for first in range(0, len(markers), PART_RECORDS_MAX):
        yield _part(deleted, markers[first : first + PART_RECORDS_MAX], 0)


def _part(deleted: DeletedTopic, keys: Sequence[str], left: int) -> DeletionPart:
    final = DeletedTopic(
        topic_id=deleted.topic_id, name=deleted.name, deleted_at_ms=deleted.deleted_at_ms, partitions_left=left
    )  # fmt: skip
    return DeletionPart(keys=keys, deleted=final)


def is_finished(view: MetadataView, deleted: DeletedTopic) -> bool:
    """Whether a deletion is final and metadata has no other record of the topic left."""
    return deleted.is_final and not deleted.partitions_left and not view.with_prefix(deferred_markers_prefix(deleted.topic_id))


def is_restorable(view: MetadataView, topic_id: UUID) -> bool:
    """Whether the topic is deleted and can still be restored."""
    deleted = view.find(DeletedTopic, deleted_topic_key(topic_id))
    return deleted is not None and not deleted.is_final


def restorable_topics(view: MetadataView) -> list[DeletedTopic]:
    """The deleted topics that can still be restored."""
    return [deleted for deleted in view.all(DeletedTopic) if not deleted.is_final]
