"""Deletes deleted topics from the second copy, some time after they were deleted for good.

The second copy has the deletion markers of the first. They, the first bucket and metadata decide together: a topic that
metadata has, in whatever state, is never deleted here, and neither is one without a marker, nor one that the first bucket
still has: it is detached, or waits for the operator's decision. The topic stays hidden for one more grace period, after which
what was written late is deleted, too. Copies that were never completed are aborted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final
from uuid import UUID

from stratalog_core.errors import Corrupt, Invalid, NoSuchObject, StratalogError
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import DeletedTopic, PendingTopic, RestoredTopic, Topic
from stratalog_tiering.cold.archive import is_hidden, newest_descriptor_key
from stratalog_tiering.copies.second import SecondCopy, put_if_absent
from stratalog_tiering.core.deletion_markers import deletion_marker
from stratalog_tiering.core.garbage import late_writes_until_ms
from stratalog_tiering.format.descriptor import DeletionMarker, decode_descriptor, encode_descriptor
from stratalog_tiering.format.object_keys import (
    TOPICS_PREFIX,
    deleted_topic_of,
    deletion_marker_key,
    topic_prefix,
    topic_prefixes,
)
from stratalog_tiering.offload.locks import may_have_locked, unlocked
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.offload.stale_uploads import abort_uploads, stale_uploads
from stratalog_tiering.store import ObjectStore

_BATCH: Final = 1000
_TIMEOUT_S: Final = 30.0
_COPY_MS_MAX: Final = 24 * 3_600_000
"""The copy of an object takes less time, however low the limit of the rate is."""


async def mark_deletion(second: ObjectStore, deleted: DeletedTopic, now_ms: int, cluster_id: str, version: int) -> None:
    """Hide a deleted topic from readers of the second copy, if that has the topic. ``version`` is that of ``deleted``.

    A marker that is older than the record is of an earlier deletion, whose grace period began earlier: it is replaced. So is
    a damaged one.
    """
    async for _ in second.list(topic_prefix(deleted.topic_id)):
        key, marker = deletion_marker_key(deleted.topic_id), deletion_marker(deleted, now_ms, cluster_id, version)
        try:
            found = decode_descriptor(await second.get(key), DeletionMarker, key)
        except NoSuchObject:
            await put_if_absent(second, key, encode_descriptor(marker))
            return
        except Corrupt:
            found = None
        if found is None or found.deleted_at_ms < deleted.deleted_at_ms:
            await second.put(key, [encode_descriptor(marker)], if_absent=False)
        return


async def apply_deletions(ports: WorkerPorts, second: SecondCopy) -> None:
    """Bring the second copy's deletion markers in line with metadata, and delete the topics whose grace period is over.

    Runs under a lease of its own. Raises ``Unavailable``, ``OutcomeUnknown``, ``Invalid`` if a bucket is another cluster's.
    ``Corrupt`` if a topic's marker cannot be read; all others are done.
    """
    await second.confirm(ports)
    unreadable: list[StratalogError] = []
    marked = [topic_id async for info in second.store.list(TOPICS_PREFIX) if (topic_id := deleted_topic_of(info.key))]
    await ports.metadata.refresh(_TIMEOUT_S)
    view, now_ms = ports.metadata.view, ports.clock.wall_ms()
    for deleted in view.all(DeletedTopic):
        stored = view.get(deleted.key())
        version = stored.version if stored is not None else 0
        with _noted(unreadable):
            await mark_deletion(second.store, deleted, now_ms, ports.cluster_id, version)
    live = {topic.topic_id for topic in view.all(Topic)}
    for topic_id in marked:
        if topic_id in live:
            await second.delete(ports, [deletion_marker_key(topic_id)])
        elif topic_id in known_topics(view):
            continue
        elif await newest_descriptor_key(ports.store, topic_id) is not None:
            if not await is_hidden(ports.store, topic_id):  # It is detached.
                await second.delete(ports, [deletion_marker_key(topic_id)])
        else:
            due_ms = now_ms
            with _noted(unreadable):
                due_ms = await _due_ms(second, topic_id)
            if due_ms < now_ms:
                await _delete_topic(ports, second, topic_id, is_last=late_writes_until_ms(due_ms, second.grace_ms) < now_ms)
    if unreadable:
        raise Corrupt(f"{len(unreadable)} deletion markers cannot be read, first: {unreadable[0].message}") from unreadable[0]


@contextmanager
def _noted(unreadable: list[StratalogError]) -> Iterator[None]:
    """Add the error to ``unreadable`` if an object is damaged or of a later release."""
    try:
        yield
    except (Corrupt, Invalid, NoSuchObject) as failure:
        unreadable.append(failure)


async def abort_stale_copies(ports: WorkerPorts, second: SecondCopy) -> None:
    """Abort uploads of segments and probes to the second store that began before its grace period, and at least a day ago.

    Raises ``Unavailable``, ``OutcomeUnknown``, ``Invalid`` if a bucket is another cluster's.
    """
    before_ms = ports.clock.wall_ms() - max(second.grace_ms, _COPY_MS_MAX)
    stale = await stale_uploads(second.store, before_ms)
    await abort_uploads(ports, second.store, stale, lambda: second.confirm(ports))


def known_topics(view: MetadataView) -> set[UUID]:
    """The topics that metadata has in any state."""
    kinds: tuple[Iterable[DeletedTopic | PendingTopic | RestoredTopic | Topic], ...] = (
        view.all(Topic), view.all(DeletedTopic), view.all(PendingTopic), view.all(RestoredTopic),
    )  # fmt: skip
    return {record.topic_id for kind in kinds for record in kind}


async def _due_ms(second: SecondCopy, topic_id: UUID) -> int:
    """Wall time at which the objects of a deleted topic may go."""
    key = deletion_marker_key(topic_id)
    marker = decode_descriptor(await second.store.get(key), DeletionMarker, key)
    written_ms = (await second.store.head(key)).last_modified_ms
    return max(marker.deleted_at_ms, written_ms) + second.grace_ms


async def _delete_topic(ports: WorkerPorts, second: SecondCopy, topic_id: UUID, *, is_last: bool) -> None:
    """Delete the objects of a topic; if this ``is_last``, its descriptors and its marker, too.

    These go last, because they say that it is deleted, and stay while other objects are locked. Until then a write that got no
    answer may put an object back.
    """
    asks = await may_have_locked(second.store, topic_id, topic_defaults(ports.metadata.view))
    have_gone = [await _delete_below(ports, second, prefix, asks=asks) for prefix in topic_prefixes(topic_id)]
    if is_last and all(have_gone) and await _delete_below(ports, second, topic_prefix(topic_id)):
        await second.delete(ports, [deletion_marker_key(topic_id)])


async def _delete_below(ports: WorkerPorts, second: SecondCopy, prefix: str, *, asks: bool = False) -> bool:
    """Delete the objects below ``prefix``, but none that is locked. Whether all have gone.

    If it ``asks``, the store is asked for their locks first.
    """
    batch: list[str] = []
    kept = 0

    async def delete() -> None:
        nonlocal kept
        free = await unlocked(second.locks, batch, ports.clock.wall_ms()) if asks else batch
        kept += len(batch) - len(free) + await second.delete(ports, free)
        batch.clear()

    async for key in second.store.list_keys(prefix):
        batch.append(key)
        if len(batch) == _BATCH:
            await delete()
    await delete()
    return not kept
