"""One collection of all garbage in a bucket, beside running workers: what goes now and why, and what waits until when.

It finds and judges garbage by the functions of the workers, with the same guards: the bucket is still this cluster's, history
has not forked, the pointer is read after the listing, commits that began before a deletion fail. It needs no lease: it commits
no version, an object that is garbage never becomes part of a history again, and deleting an object twice does no harm. A
manifest forgets its removed objects when a worker finds them due. Deletions of topics are made final by workers only.

Without the lease, what a worker is writing looks like an orphan until its commit: the segment, which in S3 is as old as the
begin of its upload, and the data key, which is written before it. So orphans wait for ``UNCOMMITTED_MS``, however short the
grace period.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from stratalog_core.errors import Conflict, Corrupt, Invalid
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import DeletedTopic, PendingTopic, Topic, Versioned
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.core.garbage import EARLIER_DELETION, ORPHAN, Garbage
from stratalog_tiering.core.partition import partition_snapshot
from stratalog_tiering.maintenance.deletion import find_deleted_garbage, find_pending_garbage
from stratalog_tiering.maintenance.earlier_deletions import earlier_deletions
from stratalog_tiering.maintenance.orphans import find_garbage, refuse_earlier_commits
from stratalog_tiering.offload.locks import KnownLocks
from stratalog_tiering.offload.ownership import check_claim, cluster_id_in, deletes_from_ms
from stratalog_tiering.store import ObjectStore, delete_batches

DELETES_AT_ONCE: Final = 200
UNCOMMITTED_MS: Final = 86_400_000
"""Longer than the upload, the verification and the commit of a segment take, of 16 GiB over a slow link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorPorts:
    """Metadata, the store, and the manifests in it."""

    metadata: MetadataClient
    store: ObjectStore
    source: ManifestSource
    locks: KnownLocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The garbage of one partition; ``partition`` is -1 for all objects of a deleted topic.

    ``refused`` says why nothing of the partition may be judged; empty: it may.
    """

    topic: str
    partition: int
    due: tuple[Garbage, ...] = ()
    waiting: tuple[Garbage, ...] = ()
    refused: str = ""
    pointer: Versioned | None = None
    """The partition's pointer, by which its garbage was judged."""


async def find_all(ports: CollectorPorts, topics: Sequence[Topic], grace_ms: int, now_ms: int) -> list[Found]:
    """The garbage of ``topics``, and of all deleted and pending topics, at the wall time ``now_ms``. Deletes nothing.

    Raises ``Invalid`` if the bucket is not this cluster's, ``Unavailable``.
    """
    owner = await check_claim(ports.store, cluster_id_in(ports.metadata))
    from_ms = deletes_from_ms(owner, grace_ms)
    found = [
        await _of_partition(ports, topic, index, grace_ms, from_ms, now_ms)
        for topic in topics
        for index in range(topic.partition_count)
    ]
    for deleted in ports.metadata.view.all(DeletedTopic):
        try:
            garbage = await find_deleted_garbage(ports.store, deleted, grace_ms, now_ms)
        except Invalid as refused:
            found.append(Found(topic=deleted.name, partition=-1, refused=refused.message))
            continue
        found.append(_found(deleted.name, -1, garbage, from_ms, now_ms))
    for earlier in await earlier_deletions(ports.store, ports.metadata, owner):
        garbage = await find_deleted_garbage(ports.store, earlier.deleted, grace_ms, now_ms) if not earlier.refused else []
        unrecorded = [replace(each, reason=EARLIER_DELETION) for each in garbage]
        found.append(replace(_found(earlier.deleted.name, -1, unrecorded, from_ms, now_ms), refused=earlier.refused))
    for pending in ports.metadata.view.all(PendingTopic):
        garbage = await find_pending_garbage(ports.store, pending, grace_ms)
        found.append(_found(pending.name, -1, garbage, from_ms, now_ms))
    return [each for each in found if each.due or each.waiting or each.refused]


async def delete_due(metadata: MetadataClient, store: ObjectStore, found: Sequence[Found]) -> None:
    """Delete all that is due, in order: the rest leads to what goes later.

    Raises ``Invalid``, having deleted nothing more, if another cluster has taken the bucket over; ``Conflict`` if a manifest
    has changed since: find the garbage again; ``Locked``, with the keys that the store keeps, after all others are deleted;
    ``Unavailable``, ``OutcomeUnknown``.
    """
    for each in found:
        await refuse_earlier_commits(metadata, each.pointer, each.due)
    cluster_id = cluster_id_in(metadata)

    async def delete(keys: Sequence[str]) -> None:
        await check_claim(store, cluster_id)
        await store.delete(keys)

    await delete_batches([garbage.key for each in found for garbage in each.due], DELETES_AT_ONCE, delete)


async def _of_partition(ports: CollectorPorts, topic: Topic, index: int, grace_ms: int, from_ms: int, now_ms: int) -> Found:
    state = partition_snapshot(ports.metadata.view, topic, index)
    if state is None:
        return Found(
            topic=topic.name, partition=index, refused="the partition has no log in metadata, or it is changing: try again"
        )
    try:
        garbage = await find_garbage(ports, state, grace_ms, now_ms)
    except (Conflict, Corrupt, Invalid) as refused:
        return Found(topic=topic.name, partition=index, refused=refused.message)
    longer_ms = max(0, UNCOMMITTED_MS - grace_ms)
    orphans = [replace(each, due_ms=each.due_ms + longer_ms) if each.reason == ORPHAN else each for each in garbage.orphans]
    found = _found(topic.name, index, [*garbage.removed, *orphans], from_ms, now_ms)
    return replace(found, pointer=garbage.pointer)


def _found(topic: str, partition: int, garbage: Sequence[Garbage], from_ms: int, now_ms: int) -> Found:
    """``from_ms``: nothing of the bucket is due before."""
    garbage = [replace(each, due_ms=max(each.due_ms, from_ms)) for each in garbage]
    due = tuple(each for each in garbage if each.is_due(now_ms))
    waiting = tuple(each for each in garbage if not each.is_due(now_ms))
    return Found(topic=topic, partition=partition, due=due, waiting=waiting)
