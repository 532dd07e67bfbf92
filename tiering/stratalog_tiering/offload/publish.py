"""What is written to the store around a manifest's commit, and in which order.

Pages and lists of removed objects, then the manifest object, then the commit (a compare-and-set in the metadata quorum, made by
the caller), then the marker that tells readers without metadata that this version was committed. A marker is never written
before the commit is certain, so a marked version is committed; a version without a marker may have lost its race.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from stratalog_core.errors import Conflict, Invalid, NoSuchObject
from stratalog_metadata.records import DeletedTopic, ManifestPointer, Topic
from stratalog_tiering.format.descriptor import (
    ClusterDescriptor,
    CommitMarker,
    DeletionMarker,
    TopicDescriptor,
    decode_descriptor,
    encode_descriptor,
)
from stratalog_tiering.format.manifest import Manifest, decode_manifest
from stratalog_tiering.format.manifest_edit import NewManifest
from stratalog_tiering.format.object_keys import CLUSTER_KEY, deletion_marker_key, marker_key, topic_key
from stratalog_tiering.store import ObjectStore


def pointer_to(manifest: Manifest, key: str, sha256: bytes) -> ManifestPointer:
    """The record whose compare-and-set commits ``manifest``."""
    return ManifestPointer(
        topic_id=manifest.topic_id,
        index=manifest.partition,
        manifest_version=manifest.version,
        object_key=key,
        sha256=sha256.hex(),
        start_offset=manifest.start_offset,
        end_offset=manifest.end_offset,
        cold_bytes=manifest.cold_bytes,
        newest_ms=_newest_ms(manifest),
    )


def _newest_ms(manifest: Manifest) -> int:
    """No record is newer. Records without a time count from when they came to the store."""
    created_ms = manifest.segments[-1].created_at_ms if manifest.segments else manifest.created_at_ms
    pages_ms = max((page.max_timestamp_ms for page in manifest.pages), default=-1)
    segments_ms = max((entry.max_timestamp_ms for entry in manifest.segments), default=-1)
    return max(created_ms, pages_ms, segments_ms)


async def store_manifest(store: ObjectStore, new: NewManifest) -> ManifestPointer:
    """Write pages, lists and manifest; returns what is to be committed. Keys are fresh, so a ``Conflict`` is a fault."""
    for key, content in new.parts:
        await store.put(key, [content])
    await store.put(new.key, [new.content])
    decode_manifest(await store.get(new.key), new.sha256)
    return pointer_to(new.manifest, new.key, new.sha256)


async def mark_committed(store: ObjectStore, pointer: ManifestPointer) -> None:
    """Write the marker of a committed version; writing it twice does nothing."""
    marker = CommitMarker(
        manifest_key=pointer.object_key, manifest_version=pointer.manifest_version, sha256=pointer.sha256
    )  # fmt: skip
    await _once(lambda: store.put(marker_key(pointer.object_key), [encode_descriptor(marker)]))


async def describe_topic(store: ObjectStore, topic: Topic) -> None:
    """Write (or renew) a topic's descriptor."""
    descriptor = TopicDescriptor(
        topic_id=topic.topic_id,
        name=topic.name,
        partition_count=topic.partition_count,
        replication_factor=topic.replication_factor,
        configs=topic.configs,
    )
    await store.put(topic_key(topic.topic_id), [encode_descriptor(descriptor)], if_absent=False)


async def mark_deleted(store: ObjectStore, deleted: DeletedTopic) -> None:
    """Hide a deleted topic from readers of the bucket; writing the marker twice does nothing."""
    marker = DeletionMarker(topic_id=deleted.topic_id, deleted_at_ms=deleted.deleted_at_ms)
    await _once(lambda: store.put(deletion_marker_key(deleted.topic_id), [encode_descriptor(marker)]))


async def claim_bucket(store: ObjectStore, cluster_id: str) -> None:
    """Write whose bucket this is, or raise ``Invalid`` if another cluster's name stands there already.

    Two clusters over one prefix would collect each other's objects as garbage.
    """
    await _once(lambda: store.put(CLUSTER_KEY, [encode_descriptor(ClusterDescriptor(cluster_id=cluster_id))]))
    owner = decode_descriptor(await store.get(CLUSTER_KEY), ClusterDescriptor, CLUSTER_KEY)
    if owner.cluster_id != cluster_id:
        raise Invalid(
            f"{store.url} belongs to cluster {owner.cluster_id}, not {cluster_id}:"
            " give each cluster a bucket or prefix of its own"
        )


async def read_marker(store: ObjectStore, key: str) -> CommitMarker:
    """The marker at ``key``. Raises ``NoSuchObject``, ``Corrupt``."""
    return decode_descriptor(await store.get(key), CommitMarker, key)


async def is_marked(store: ObjectStore, pointer: ManifestPointer) -> bool:
    """Whether the version that ``pointer`` names has its marker."""
    try:
        await store.head(marker_key(pointer.object_key))
    except NoSuchObject:
        return False
    return True


async def _once(put: Callable[[], Awaitable[object]]) -> None:
    try:
        await put()
    except Conflict:
        return
