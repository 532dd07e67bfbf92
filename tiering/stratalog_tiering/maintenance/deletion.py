"""What belongs to no partition any more: objects of deleted topics, and uploads that nobody will finish."""

from __future__ import annotations

from typing import Final

from stratalog_metadata.records import DeletedTopic
from stratalog_metadata.state.commands import Command, Delete
from stratalog_tiering.core.commands import Guards
from stratalog_tiering.format.object_keys import deletion_marker_key, parse_segment_key, topic_key, topic_prefixes
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.offload.publish import mark_deleted

UPLOAD_AGE_MIN_MS: Final = 3_600_000
"""No upload younger than this is given up, however short the grace period: it may be under way."""

_BATCH: Final = 1000


async def collect_deleted_topic(ports: WorkerPorts, deleted: DeletedTopic, guards: Guards) -> int | None:
    """Work on a deleted topic: hide it from readers of the bucket at once, delete its objects after the grace period.

    None when all is gone and its record with it; else when to come again (wall time, ms).
    """
    await mark_deleted(ports.store, deleted)
    due_ms = deleted.deleted_at_ms + ports.settings.grace_ms
    if ports.clock.wall_ms() < due_ms:
        return due_ms
    for prefix in topic_prefixes(deleted.topic_id):
        await _delete_below(ports, prefix)
    # The marker last: without it the descriptor would name a live topic.
    await ports.store.delete([topic_key(deleted.topic_id)])
    await ports.store.delete([deletion_marker_key(deleted.topic_id)])
    await ports.metadata.propose(Command(updates=(Delete(key=deleted.key()),), requirements=guards))
    return None


async def _delete_below(ports: WorkerPorts, prefix: str) -> None:
    batch: list[str] = []
    async for info in ports.store.list(prefix):
        batch.append(info.key)
        if len(batch) == _BATCH:
            await ports.delete_objects(batch)
            batch = []
    await ports.delete_objects(batch)


async def abort_stale_uploads(ports: WorkerPorts) -> int:
    """Give up uploads of segments that began before the grace period (an hour at least); how many."""
    before_ms = ports.clock.wall_ms() - max(UPLOAD_AGE_MIN_MS, ports.settings.grace_ms)
    uploads = [upload async for upload in ports.store.list_uploads()]
    stale = [u for u in uploads if 0 < u.initiated_ms < before_ms and parse_segment_key(u.key) is not None]
    for upload in stale:
        await ports.deleting.take(1)
        await ports.store.abort_upload(upload)
    return len(stale)
