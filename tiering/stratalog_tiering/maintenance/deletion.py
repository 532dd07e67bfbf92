"""Deletes what no partition owns: objects of deleted topics, of attachments given up, and uploads that were never completed.

A deleted topic is hidden from readers of the bucket at once. Its objects stay until it can no longer be restored and the grace
period is over. Both periods begin when the topic is hidden, or later if the broker's clock says so: a broker's clock that is
behind cannot shorten them. The topic stays hidden for one more grace period, after which what was written late is deleted, too:
a write that got no answer may take effect after a listing, and nothing else would find it.

Segments of live topics are not deleted here (``retention.py``, ``orphans.py``).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final
from uuid import UUID

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Conflict, Corrupt, NoSuchObject
from stratalog_core.moments import utc_text
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.client.topic_deletion import finish_deletion, is_finished
from stratalog_metadata.records import (
    DeletedTopic,
    ManifestPointer,
    PendingTopic,
    RestoredTopic,
    Topic,
    manifest_pointer_key,
    partition_key,
    restored_topic_key,
)
from stratalog_metadata.state.commands import Command, Delete, Put, VersionIs
from stratalog_tiering.cold.archive import is_hidden, newest_descriptor_key, read_owner
from stratalog_tiering.cold.block_cache import LruCache
from stratalog_tiering.copies.deletions import mark_deletion
from stratalog_tiering.core.commands import Guards
from stratalog_tiering.core.deletion_markers import deletion_marker
from stratalog_tiering.core.forks import Fork, find_fork
from stratalog_tiering.core.garbage import (
    Garbage,
    deleted_topic_garbage,
    deletion_due_ms,
    late_writes_until_ms,
    pending_topic_garbage,
)
from stratalog_tiering.core.leases import kept_by_leases
from stratalog_tiering.core.restoring import expire_pending_topic
from stratalog_tiering.format.descriptor import DeletionMarker, decode_descriptor, encode_descriptor
from stratalog_tiering.format.object_keys import (
    deletion_marker_key,
    topic_prefix,
    topic_prefixes,
)
from stratalog_tiering.offload.commit import versions_from
from stratalog_tiering.offload.descriptors import put_once
from stratalog_tiering.offload.locks import may_have_locked
from stratalog_tiering.offload.ports import HistoryPorts, WorkerPorts
from stratalog_tiering.offload.reader_leases import leases_in_force
from stratalog_tiering.offload.stale_uploads import abort_uploads, stale_uploads
from stratalog_tiering.offload.topic_descriptors import describe_topic
from stratalog_tiering.store import Locked, ObjectInfo, ObjectStore

UPLOAD_AGE_MIN_MS: Final = 3_600_000
"""Younger uploads are never aborted, however short the grace period: they may be in progress."""

HELD_PAUSE_MS: Final = 3_600_000
"""Objects of a deleted topic that the store keeps are tried again after this time."""
_BATCH: Final = 1000
_TOPICS_SEARCHED_MAX: Final = 10_000
_QUESTIONS_AT_ONCE: Final = 16
_log = logging.getLogger(__name__)


async def collect_deleted_topic(ports: WorkerPorts, deleted: DeletedTopic, version: int, guards: Guards) -> int | None:
    """Hide a deleted topic from readers of the bucket; delete it for good, and its objects, when their times have come.

    ``version`` is that of the record ``deleted``. Returns the wall time (ms) at which to call it again, or None once the
    objects and the topic's record are gone. Raises ``Unavailable``, ``OutcomeUnknown``, ``Conflict``.
    """
    marker = await _replace_earlier_marker(ports, deleted, version, guards)
    if marker is None:
        marker = await mark_deleted(ports.store, deleted, ports.clock.wall_ms(), ports.cluster_id, version)
    if deleted.is_final and not is_finished(ports.metadata.view, deleted):
        await _remove_records(ports, deleted, version, guards)
        return ports.clock.wall_ms()
    now_ms, due_ms = ports.clock.wall_ms(), deletion_due_ms(deleted, marker.deleted_at_ms, ports.settings.grace_ms)
    if deleted.is_final:
        due_ms = max(due_ms, ports.bucket.deletes_from_ms)
    if now_ms < due_ms:
        return due_ms
    if not deleted.is_final:
        if reason := await _undone_deletion(ports, deleted):
            _log.warning("deleted topic %s (%s) stays: %s", deleted.name, deleted.topic_id, reason)
            return now_ms + HELD_PAUSE_MS
        await _remove_records(ports, deleted, version, guards)
        return now_ms
    leases = await leases_in_force(ports.store, now_ms)
    leased_ms = max([lease.until_ms for lease in leases if lease.covers(deleted.topic_id)], default=0)
    if leased_ms:
        return leased_ms
    # A topic is not deleted before the locks of its history end, but an upload that was never committed may have one.
    asks = await may_have_locked(ports.store, deleted.topic_id, topic_defaults(ports.metadata.view))
    until_ms = max([await _delete_below(ports, prefix, asks=asks) for prefix in topic_prefixes(deleted.topic_id)])
    if until_ms:
        _log.warning("objects of deleted topic %s are locked and stay until %s", deleted.name, utc_text(until_ms))
        return until_ms
    late_until_ms = late_writes_until_ms(due_ms, ports.settings.grace_ms)
    if now_ms < late_until_ms:
        return late_until_ms
    return await _forget(ports, deleted, version, guards)


async def _undone_deletion(ports: HistoryPorts, deleted: DeletedTopic) -> str:
    """Say why a deletion that is not final must not become final: its history went on; empty: it did not.

    Metadata that is restored from an old copy may have a deletion that was undone after the copy was made. Raises
    ``Unavailable``.
    """

    async def fork_of(index: int) -> Fork | None:
        key = manifest_pointer_key(deleted.topic_id, index)
        known = ports.metadata.view.find(ManifestPointer, key)
        newest = await versions_from(ports.store, deleted.topic_id, index, known.manifest_version if known is not None else 0)
        # After the listing, and not from the view, which may lack the last commit before the deletion.
        (found,) = await ports.metadata.read([key])
        if found is None or not isinstance(found.record, ManifestPointer):
            return find_fork(newest, {0: ""})
        return find_fork(newest, {found.record.manifest_version: found.record.object_key})

    forks = await bounded_map(fork_of, range(deleted.partitions_kept), _QUESTIONS_AT_ONCE)
    fork = next((each for each in forks if each is not None), None)
    if fork is None:
        return ""
    return (
        f"manifest version {fork.store_version} ({fork.store_key}) is committed in the store, metadata has version"
        f" {fork.metadata_version}. Metadata was restored from an old copy, and the deletion may have been undone after the"
        f" copy was made. To keep the topic, run `stratalog topic undelete {deleted.topic_id}` and decide the fork of its"
        f" history; if it is not needed, run `stratalog topic delete --now {deleted.topic_id}`"
    )


async def _forget(ports: WorkerPorts, deleted: DeletedTopic, version: int, guards: Guards) -> int | None:
    """Delete what says that a topic was deleted, now that its objects are gone; returns as `collect_deleted_topic`."""
    if ports.second_store is not None and await _is_own(ports.second_store, ports.cluster_id):
        # Once the record is gone, only its marker says to the second copy that the topic was deleted.
        await mark_deletion(ports.second_store, deleted, ports.clock.wall_ms(), ports.cluster_id, version)
    # The marker goes last: without it the descriptors would name a live topic.
    until_ms = await _delete_below(ports, topic_prefix(deleted.topic_id))
    if until_ms:
        return until_ms
    await ports.delete_objects([deletion_marker_key(deleted.topic_id)])
    await ports.metadata.propose(Command(updates=(Delete(key=deleted.key()),), requirements=guards))
    return None


async def _is_own(second: ObjectStore, cluster_id: str) -> bool:
    """Whether the second copy is this cluster's. Nothing was copied to it before it was, and another one may have taken it."""
    owner = await read_owner(second)
    return owner is not None and owner.cluster_id == cluster_id


async def _remove_records(ports: WorkerPorts, deleted: DeletedTopic, version: int, guards: Guards) -> None:
    """Make the deletion final, or go on with it: remove what metadata still has of the topic."""
    for part in finish_deletion(ports.metadata.view, deleted):
        version = (await ports.metadata.propose(part.command(version, guards))).index


async def show_restored_topic(ports: WorkerPorts, restored: RestoredTopic, version: int, guards: Guards) -> None:
    """Let readers of the bucket see a restored topic again, under its present name. ``version`` is that of ``restored``.

    Raises ``Unavailable``, ``OutcomeUnknown``, ``Conflict``.
    """
    topic = next((each for each in ports.metadata.view.all(Topic) if each.topic_id == restored.topic_id), None)
    if topic is not None:
        if await newest_descriptor_key(ports.store, topic.topic_id) is not None:
            await describe_topic(ports.store, topic)
        await ports.delete_objects([deletion_marker_key(topic.topic_id)])
    requirements = (*guards, VersionIs(key=restored.key(), version=version))
    await ports.metadata.propose(Command(updates=(Delete(key=restored.key()),), requirements=requirements))


async def collect_pending_topic(ports: WorkerPorts, pending: PendingTopic, version: int, guards: Guards) -> int | None:
    """Give up an attachment whose time is over, so that what was written of it is deleted as that of a deleted topic is.

    If the attachment was completed, only the reservation is removed. Returns the wall time (ms) at which to call it again, or
    None. Raises ``Unavailable``, ``OutcomeUnknown``, ``Conflict``.
    """
    now_ms = ports.clock.wall_ms()
    if now_ms < pending.expires_at_ms:
        return pending.expires_at_ms
    if await _was_attached(ports, pending):
        _log.warning(
            "topic %s (%s) was attached, but metadata still had its reservation: metadata was restored from an old copy. The"
            " reservation is removed, and no object of the topic. If the cluster lacks it, run `stratalog restore --topic %s`",
            pending.name, pending.topic_id, pending.topic_id,
        )  # fmt: skip
        requirements = (*guards, VersionIs(key=pending.key(), version=version))
        await ports.metadata.propose(Command(updates=(Delete(key=pending.key()),), requirements=requirements))
        return None
    await ports.metadata.propose(expire_pending_topic(pending, version, now_ms, guards))
    return now_ms


async def _was_attached(ports: HistoryPorts, pending: PendingTopic) -> bool:
    """Whether the attachment was completed: the topic exists, or readers of the bucket see it, from whom it was hidden before.

    Metadata that is restored from an old copy may have the reservation nevertheless. Raises ``Unavailable``.
    """
    if ports.metadata.view.get(partition_key(pending.topic_id, 0)) is not None:
        return True
    # In this order: the topic is hidden before its descriptor is written.
    is_described = await newest_descriptor_key(ports.store, pending.topic_id) is not None
    return is_described and not await is_hidden(ports.store, pending.topic_id)


async def find_deleted_garbage(store: ObjectStore, deleted: DeletedTopic, grace_ms: int, now_ms: int) -> list[Garbage]:
    """The objects of a deleted topic but its marker, which a worker deletes last.

    Without a marker, which a worker writes soon, the periods begin at the wall time ``now_ms``.
    """
    marker = await _readable_marker(store, deleted.topic_id)
    hidden_ms = marker.deleted_at_ms if marker is not None else now_ms
    garbage = deleted_topic_garbage(await _all_objects(store, deleted.topic_id), deleted, hidden_ms, grace_ms)
    # Any lease on the topic counts, whenever it began: all of the topic went at once.
    leases = [replace(lease, from_ms=0) for lease in await leases_in_force(store, now_ms)]
    return kept_by_leases(garbage, leases, deleted.topic_id, grace_ms)


async def find_pending_garbage(store: ObjectStore, pending: PendingTopic, grace_ms: int) -> list[Garbage]:
    """The objects that were written of a topic that is being attached."""
    return pending_topic_garbage(await _all_objects(store, pending.topic_id), pending, grace_ms)


async def _all_objects(store: ObjectStore, topic_id: UUID) -> list[ObjectInfo]:
    prefixes = (*topic_prefixes(topic_id), topic_prefix(topic_id))
    return [info for prefix in prefixes async for info in store.list(prefix)]


async def mark_deleted(
    store: ObjectStore, deleted: DeletedTopic, now_ms: int, cluster_id: str, version: int = 0
) -> DeletionMarker:
    """Write the marker that hides a deleted topic from the bucket's readers unless there is one; returns the bucket's.

    One that is damaged is replaced: the topic's periods begin again then.
    ``cluster_id`` is the cluster that deletes it, ``version`` that of the record ``deleted``, if that is in metadata. It looks
    first: a write whose answer is lost may take effect late, and would come after the deletion of the marker.
    """
    key, marker = deletion_marker_key(deleted.topic_id), deletion_marker(deleted, now_ms, cluster_id, version)
    try:
        found = await _find_marker(store, deleted.topic_id)
    except Corrupt:
        await store.put(key, [encode_descriptor(marker)], if_absent=False)
        found = await _read_marker(store, deleted.topic_id)
    if found is None:
        await put_once(store, key, marker)
        found = await _read_marker(store, deleted.topic_id)
    return found


async def _read_marker(store: ObjectStore, topic_id: UUID) -> DeletionMarker:
    key = deletion_marker_key(topic_id)
    return decode_descriptor(await store.get(key), DeletionMarker, key)


async def _find_marker(store: ObjectStore, topic_id: UUID) -> DeletionMarker | None:
    try:
        return await _read_marker(store, topic_id)
    except NoSuchObject:
        return None


async def _has_marker(store: ObjectStore, topic_id: UUID) -> bool:
    """Whether the topic has a marker, which need not be readable."""
    try:
        await store.get(deletion_marker_key(topic_id))
    except NoSuchObject:
        return False
    return True


async def _readable_marker(store: ObjectStore, topic_id: UUID) -> DeletionMarker | None:
    """The marker of a deleted topic; None if there is none, or it is damaged."""
    try:
        return await _find_marker(store, topic_id)
    except Corrupt:
        return None


async def _replace_earlier_marker(
    ports: WorkerPorts, deleted: DeletedTopic, version: int, guards: Guards
) -> DeletionMarker | None:
    """Replace the marker of an earlier deletion: its time would end the periods of this one too early.

    The earlier one is still in the bucket if the topic was restored and deleted again before a worker removed it, or if it was
    written so late that it came after its removal. Returns the marker of this deletion if that was found; None: read it.
    Raises ``Conflict`` if this deletion has been undone: the restore is over only when a worker has removed the marker.
    """
    restored = ports.metadata.view.get(restored_topic_key(deleted.topic_id))
    if restored is None:
        found = None if deleted.is_final else await _readable_marker(ports.store, deleted.topic_id)
        if found is None or found.deletion_version == version:
            return found
    stored = ports.metadata.view.get(deleted.key())
    if stored is None or stored.version != version:
        raise Conflict(f"topic {deleted.name!r} was restored meanwhile")
    marker = deletion_marker(deleted, ports.clock.wall_ms(), ports.cluster_id, version)
    await ports.store.put(deletion_marker_key(deleted.topic_id), [encode_descriptor(marker)], if_absent=False)
    if restored is not None:
        is_deleted = VersionIs(key=deleted.key(), version=version)
        requirements = (*guards, is_deleted, VersionIs(key=restored.record.key(), version=restored.version))
        await ports.metadata.propose(Command(updates=(Delete(key=restored.record.key()),), requirements=requirements))
    return None


class LateMarkers:
    """Finds deletion markers of live topics, which hide the topics from readers of the bucket.

    A write of the marker that got no answer may take effect after the topic was restored and the marker was removed. Every
    sweep of a partition asks, so that it does not matter which partitions have failed. A topic is searched at most twice per
    sweep interval, however many partitions it has.
    """

    def __init__(self, ports: WorkerPorts) -> None:
        self._ports = ports
        self._pause_s = ports.settings.sweep_interval_ms / 1000 / 2
        self._next_at: LruCache[UUID, float] = LruCache(_TOPICS_SEARCHED_MAX)

    async def find(self, topic: Topic, guards: Guards) -> None:
        """Have the marker of ``topic`` removed if there is one. ``guards`` require that the topic is not deleted.

        Raises ``Unavailable``, ``OutcomeUnknown``, ``Conflict``; the next partition of the topic then searches again.
        """
        now = self._ports.clock.monotonic()
        if now < (self._next_at.get(topic.topic_id) or 0.0):
            return
        self._next_at.put(topic.topic_id, now + self._pause_s)
        try:
            await self._search(topic, guards)
        except BaseException:
            self._next_at.pop(topic.topic_id)
            raise

    async def _search(self, topic: Topic, guards: Guards) -> None:
        restored, metadata = RestoredTopic(topic_id=topic.topic_id), self._ports.metadata
        if metadata.view.get(restored.key()) is None and await _has_marker(self._ports.store, topic.topic_id):
            await metadata.propose(Command(updates=(Put(record=restored),), requirements=guards))


async def _delete_below(ports: WorkerPorts, prefix: str, *, asks: bool = False) -> int:
    """Delete all objects below ``prefix`` that are not locked; returns until when others are, 0 if none is.

    If it ``asks``, the store is asked for their locks first. One that it keeps without telling until when is asked for later.
    """
    batch: list[str] = []
    kept_until_ms = 0

    async def delete() -> None:
        nonlocal kept_until_ms
        ends_ms = await bounded_map(ports.locks.until_ms, batch, _QUESTIONS_AT_ONCE) if asks else [0] * len(batch)
        now_ms = ports.clock.wall_ms()
        kept_until_ms = max([kept_until_ms, *(end_ms for end_ms in ends_ms if end_ms > now_ms)])
        try:
            await ports.delete_objects([key for key, end_ms in zip(batch, ends_ms, strict=True) if end_ms <= now_ms])
        except Locked as kept:
            _log.warning("objects of a deleted topic stay: %s", kept.message)
            kept_until_ms = max(kept_until_ms, kept.detail["until_ms"], now_ms + HELD_PAUSE_MS)
        batch.clear()

    async for key in ports.store.list_keys(prefix):
        batch.append(key)
        if len(batch) == _BATCH:
            await delete()
    await delete()
    return kept_until_ms


async def abort_stale_uploads(ports: WorkerPorts) -> int:
    """Abort uploads of segments and probes that began before the grace period, and at least an hour ago; returns how many.

    Raises ``Invalid``, having aborted nothing more, if another cluster has taken the bucket over: its uploads may have begun as
    long ago.
    """
    before_ms = min(ports.deletable_before_ms(), ports.clock.wall_ms() - UPLOAD_AGE_MIN_MS)
    stale = await stale_uploads(ports.store, before_ms)
    await ports.bucket.confirm()
    await abort_uploads(ports, ports.store, stale, ports.bucket.confirm)
    return len(stale)
