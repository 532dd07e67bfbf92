"""Planted faults of topics that are deleted and restored, run in ``everything``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from stratalog_broker.admin import deleted_topics, topics
from stratalog_metadata.client import topic_deletion
from stratalog_metadata.records import Ledger, Partition, restored_topic_key
from stratalog_metadata.state.commands import Command, Delete, Put
from stratalog_tiering.maintenance import deletion
from stratalog_tiering.offload import verification
from stratalog_tiering.worker import session


def _swap(owner: object, name: str, new: object) -> None:
    setattr(owner, name, new)


def _changed(command: Command, *updates: Any) -> Command:
    changed: Command = msgspec.structs.replace(command, updates=updates)
    return changed


def deletion_drops_the_ledgers_at_once() -> None:
    """The ledgers of a deleted topic leave metadata although the topic can still be restored."""
    delete: Callable[..., Command] = topic_deletion.delete_topic

    def delete_topic(view: Any, topic: Any, *others: Any) -> Command:
        command = delete(view, topic, *others)
        ledgers = (Delete(key=each.key()) for each in view.all(Ledger) if each.topic_id == topic.topic_id)
        return _changed(command, *command.updates, *ledgers)

    _swap(topics, "delete_topic", delete_topic)


def restored_partitions_begin_at_epoch_0() -> None:
    """A restored partition forgets its last leader epoch."""
    restore: Callable[..., Command] = topic_deletion.restore_topic

    def restore_topic(*deleted: Any) -> Command:
        command = restore(*deleted)
        return _changed(command, *(_at_epoch_0(update) for update in command.updates))

    _swap(deleted_topics, "restore_topic", restore_topic)


def _at_epoch_0(update: Any) -> Any:
    if not isinstance(update, Put) or not isinstance(update.record, Partition):
        return update
    return Put(record=msgspec.structs.replace(update.record, leader_epoch=0))


def deletions_become_final_at_once() -> None:
    """The tiering worker ignores for how long a topic can be restored."""
    collect: Callable[..., Any] = deletion.collect_deleted_topic

    async def collect_deleted_topic(ports: Any, deleted: Any, *others: Any) -> int | None:
        impatient = msgspec.structs.replace(deleted, restorable_ms=0)
        again_ms: int | None = await collect(ports, impatient, *others)
        return again_ms

    _swap(session, "collect_deleted_topic", collect_deleted_topic)


def final_deletions_end_with_their_first_step() -> None:
    """The first of several commands says that metadata has forgotten the topic, so nobody goes on."""
    finish: Callable[..., Iterator[topic_deletion.DeletionPart]] = topic_deletion.finish_deletion

    def finish_deletion(*deleted: Any) -> Iterator[topic_deletion.DeletionPart]:
        for part in itertools.islice(finish(*deleted), 1):
            yield topic_deletion.DeletionPart(
                keys=part.keys, deleted=msgspec.structs.replace(part.deleted, partitions_left=0)
            )  # fmt: skip

    _swap(deletion, "finish_deletion", finish_deletion)
    _swap(deleted_topics, "finish_deletion", finish_deletion)


def the_marker_of_an_earlier_deletion_stays() -> None:
    """A topic that is deleted again, by brokers whose clocks are behind, keeps the time of its first deletion."""
    delete: Callable[..., Command] = topic_deletion.delete_topic

    def delete_topic(view: Any, topic: Any, version: Any, deleted_at_ms: int, *others: Any) -> Command:
        return delete(view, topic, version, 0, *others)

    async def _replace_earlier_marker(*_: Any) -> None:
        pass

    _swap(topics, "delete_topic", delete_topic)
    _swap(deletion, "_replace_earlier_marker", _replace_earlier_marker)


def late_markers_are_taken_for_new_ones() -> None:
    """As before, but only for markers that were written after the topic's restore had removed them."""
    replace: Callable[..., Any] = deletion._replace_earlier_marker
    delete: Callable[..., Command] = topic_deletion.delete_topic

    def delete_topic(view: Any, topic: Any, version: Any, deleted_at_ms: int, *others: Any) -> Command:
        return delete(view, topic, version, 0, *others)

    async def _replace_earlier_marker(ports: Any, deleted: Any, *others: Any) -> None:
        if ports.metadata.view.get(restored_topic_key(deleted.topic_id)) is not None:
            await replace(ports, deleted, *others)

    _swap(topics, "delete_topic", delete_topic)
    _swap(deletion, "_replace_earlier_marker", _replace_earlier_marker)


def late_markers_hide_live_topics() -> None:
    """Nobody looks for a marker that was written after the topic's restore had removed it."""

    async def find(*_: Any) -> None:
        pass

    _swap(deletion.LateMarkers, "find", find)


def checksums_are_not_compared() -> None:
    """A worker that trusts the store's checksum does not ask for it."""

    async def matches(*args: Any) -> bool:
        return True

    _swap(verification, "_matches", matches)


IN_EVERYTHING: Final = (
    checksums_are_not_compared,
    deletion_drops_the_ledgers_at_once,
    restored_partitions_begin_at_epoch_0,
    deletions_become_final_at_once,
    final_deletions_end_with_their_first_step,
    the_marker_of_an_earlier_deletion_stays,
    late_markers_are_taken_for_new_ones,
    late_markers_hide_live_topics,
)
