"""Reads a partition's committed history from a bucket, without brokers and without the metadata quorum.

A history is pinned by its manifest: objects are immutable, and an object is deleted only after a grace period once no manifest
refers to it. The commit marker holds the manifest's digest; the manifest holds the digests of its pages and footers.
"""

from __future__ import annotations

from dataclasses import dataclass

from stratalog_core.errors import Corrupt
from stratalog_metadata.records import ManifestPointer
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.planning import OffsetRange, PartitionName
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.format.descriptor import CommitMarker, decode_descriptor
from stratalog_tiering.format.lookup import live_segments
from stratalog_tiering.format.manifest import SegmentEntry, pointer_to
from stratalog_tiering.format.object_keys import is_marker, manifests_prefix, marked_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A partition's cold history, pinned at a committed manifest version. ``pointer`` is None if nothing was ever offloaded."""

    name: PartitionName
    offsets: OffsetRange
    pointer: ManifestPointer | None = None
    committed_at_ms: int = 0


def load_history(bucket: Bucket, name: PartitionName) -> History:
    """Return the newest committed history of a partition. Raises ``Corrupt`` if a digest does not match."""
    found = bucket.first_key(manifests_prefix(name.topic_id, name.partition), is_marker)
    if found is None:
        return History(name=name, offsets=OffsetRange(first=0, end=0))
    # Versions are listed newest first, so the first marker is the newest committed one.
    key = marked_manifest(found)
    marker = decode_descriptor(bucket.get(found), CommitMarker, found)
    manifest = bucket.run(bucket.source.manifest_at(key, bytes.fromhex(marker.sha256)))
    if (manifest.topic_id, manifest.partition) != (name.topic_id, name.partition):
        raise Corrupt(f"manifest {key} belongs to {manifest.topic_id}-{manifest.partition}, not to {name}", key=key)
    pointer = pointer_to(manifest, key, bytes.fromhex(marker.sha256))
    offsets = OffsetRange(first=manifest.start_offset, end=manifest.end_offset)
    return History(name=name, offsets=offsets, pointer=pointer, committed_at_ms=manifest.created_at_ms)


def load_segments(bucket: Bucket, history: History, offsets: OffsetRange) -> list[SegmentEntry]:
    """Return the segments that overlap ``offsets``, in order. Reads only the manifest pages that list them."""
    if history.pointer is None:
        return []
    return bucket.run(_segments_within(bucket.source, history.pointer, offsets))


async def _segments_within(source: ManifestSource, pointer: ManifestPointer, offsets: OffsetRange) -> list[SegmentEntry]:
    manifest = await source.manifest(pointer)
    entries: list[SegmentEntry] = []
    for page in manifest.pages:
        if page.end_offset > offsets.first and page.base_offset < offsets.end:
            entries.extend(live_segments(manifest, await source.page(page)))
    entries.extend(manifest.segments)
    return [entry for entry in entries if entry.end_offset > offsets.first and entry.base_offset < offsets.end]
