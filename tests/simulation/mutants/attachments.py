"""Planted faults of attached, detached and locked topics, run in ``history``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import msgspec

from stratalog_metadata.state.commands import Command
from stratalog_tiering.attach import attachment, detachment
from stratalog_tiering.cold import archive
from stratalog_tiering.core import detaching
from stratalog_tiering.core import retention as core_retention
from stratalog_tiering.core.locks import merged_lock
from stratalog_tiering.core.partition import partition_snapshot
from stratalog_tiering.maintenance import deletion, merging, orphans, retention
from stratalog_tiering.offload import offloading
from stratalog_tiering.worker import copying as copy_work


def attached_history_is_not_locked() -> None:
    """Segments of an attachment are uploaded without the topic's lock."""
    attachment.new_lock = lambda policy, now_ms: None  # type: ignore[attr-defined]


def attachments_are_not_hidden() -> None:
    """Readers of the bucket see a topic while it is being attached."""

    async def mark_nothing(store: Any, deleted: Any, now_ms: int, cluster_id: str, version: int = 0) -> Any:
        return None

    attachment.mark_deleted = mark_nothing  # type: ignore[attr-defined]


def late_objects_of_deleted_topics_stay() -> None:
    """The objects of a topic that is gone are listed once, and what is written after that stays."""
    deletion.late_writes_until_ms = lambda due_ms, grace_ms: 0  # type: ignore[attr-defined]


def attachments_that_ended_are_given_up() -> None:
    """A reservation that comes back with an old copy of metadata expires, although the topic was attached."""

    async def never(ports: Any, pending: Any) -> bool:
        return False

    deletion._was_attached = never


def attached_partitions_may_be_left_out() -> None:
    """The command that creates an attached topic has only its first partition's history."""
    make = attachment.attach_from_bucket  # type: ignore[attr-defined]

    def first_only(topic: Any, history: Any, owner_number: int, pending: Any, version: int) -> Command:
        partitions = tuple(each if each.index == 0 else type(each)(index=each.index) for each in history.partitions)
        shortened = type(history)(descriptor=history.descriptor, partitions=partitions)
        command: Command = make(topic, shortened, owner_number, pending, version)
        return command

    attachment.attach_from_bucket = first_only  # type: ignore[attr-defined]


def hot_records_are_detached() -> None:
    """A topic is detached although some of its records are on bookies only."""
    detaching._require_cold = lambda state: None


def detachments_go_by_an_earlier_record() -> None:
    """An earlier behaviour: partitions that were added since a detachment was decided are forgotten by it."""

    def snapshot(view: Any, topic: Any, index: int) -> Any:
        state = partition_snapshot(view, topic, index)
        return None if state is None else replace(state, topic=topic)

    detachment.partition_snapshot = snapshot  # type: ignore[attr-defined]


def offloaded_segments_are_not_locked() -> None:
    """An offload ignores the topic's lock."""
    offloading.new_lock = lambda policy, now_ms: None  # type: ignore[attr-defined]


def orphans_go_before_their_locks_end() -> None:
    """The sweep does not ask for locks."""

    async def kept(locks: Any, garbage: Any, now_ms: int) -> list[Any]:
        return list(garbage)

    orphans._kept_by_locks = kept
    orphans.kept_by_policy = lambda garbage, written_ms, lock_ms: list(garbage)  # type: ignore[attr-defined]


def given_up_attachments_go_before_their_locks_end() -> None:
    """The deletion of a topic does not ask for locks."""

    async def has_none(store: Any, topic_id: Any, defaults: Any) -> bool:
        return False

    deletion.may_have_locked = has_none  # type: ignore[attr-defined]


def merged_segments_are_locked_anew() -> None:
    """The lock of a merged segment begins at the merge."""

    def anew(sources: Any, now_ms: int) -> Any:
        lock = merged_lock(sources, now_ms)
        return None if lock is None else replace(lock, until_ms=lock.until_ms + 2_000)

    merging.merged_lock = anew  # type: ignore[attr-defined]


def merged_segments_are_not_locked() -> None:
    """A merge does not take over the locks of its sources."""
    merging.merged_lock = lambda sources, now_ms: None  # type: ignore[attr-defined]


def locked_objects_that_left_the_history_are_deleted() -> None:
    """The grace period of an object that left the manifest ends before its lock, and it is deleted then."""

    async def all_of_them(*_: Any) -> int:
        return retention.DELETIONS_AT_ONCE_MAX

    setattr(retention, "_unlocked", all_of_them)  # noqa: B010 - it has another signature to the type checker


def locked_segments_expire() -> None:
    """Retention removes a segment although it is locked."""
    reason: Callable[..., str | None] = core_retention.expiry_reason

    def whatever_the_lock(entry: Any, *args: Any, **named: Any) -> str | None:
        unlocked = msgspec.structs.replace(entry, options=msgspec.structs.replace(entry.options, lock_until_ms=0))
        return reason(unlocked, *args, **named)

    retention.expiry_reason = whatever_the_lock  # type: ignore[attr-defined]


def late_markers_hide_detached_topics() -> None:
    """The deletion marker of a detached topic counts although the topic was restored before it was detached."""
    archive.was_undone = lambda marker, topic: False  # type: ignore[attr-defined]


def detached_topics_are_not_copied() -> None:
    """The second copy never gets the versions that it lacks of a topic when that is detached."""

    async def copy_nothing(*ignored: Any) -> int:
        return 0

    copy_work.copy_detached_topics = copy_nothing  # type: ignore[assignment, attr-defined]


IN_HISTORY: Final = (
    detached_topics_are_not_copied,
    late_markers_hide_detached_topics,
    late_objects_of_deleted_topics_stay,
    locked_objects_that_left_the_history_are_deleted,
    locked_segments_expire,
    merged_segments_are_locked_anew,
    merged_segments_are_not_locked,
    attached_history_is_not_locked,
    attachments_are_not_hidden,
    attachments_that_ended_are_given_up,
    attached_partitions_may_be_left_out,
    hot_records_are_detached,
    detachments_go_by_an_earlier_record,
    offloaded_segments_are_not_locked,
    orphans_go_before_their_locks_end,
    given_up_attachments_go_before_their_locks_end,
)
