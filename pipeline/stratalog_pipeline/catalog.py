"""Reads a partition's committed history from a bucket, without brokers and without the metadata quorum.

A history is pinned by its manifest: objects are immutable, and an object is deleted only after a grace period once no manifest
refers to it. The commit marker holds the manifest's digest; the manifest holds the digests of its pages and footers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from stratalog_core.errors import Corrupt, NotFound
from stratalog_metadata.records import ManifestPointer
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import ReadOptions
from stratalog_pipeline.planning import OffsetRange, PartitionName
from stratalog_pipeline.pruning import ANY_TIME, TimeRange
from stratalog_tiering.cold.archive import read_version
from stratalog_tiering.format.lookup import live_segments
from stratalog_tiering.format.manifest import PageRef, SegmentEntry, pointer_to
from stratalog_tiering.format.object_keys import manifests_prefix, marked_manifest, parse_manifest_key
from stratalog_tiering.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A partition's cold history, pinned at a committed manifest version. ``pointer`` is None if nothing was ever offloaded."""

    name: PartitionName
    offsets: OffsetRange
    pointer: ManifestPointer | None = None
    committed_at_ms: int = 0


async def load_wanted(bucket: Bucket, options: ReadOptions, name: PartitionName) -> History:
    """Return a partition's history at the version in the options, or the newest. Raises as :func:`load_history`."""
    return await load_history(bucket, name, options.manifest_versions.get(name.topic, {}).get(name.partition))


async def load_history(bucket: Bucket, name: PartitionName, version: int | None = None) -> History:
    """Return the committed history of a partition, the newest by default.

    Raises ``Corrupt`` if a digest does not match, ``NotFound`` if the bucket has no such version, or not any more.
    """
    found = await _marker(bucket.store, manifests_prefix(name.topic_id, name.partition), version)
    if found is None and version is not None:
        raise NotFound(
            f"{name}: manifest version {version} is not in the bucket; it was never committed, or is older than the grace "
            "period, after which versions are deleted",
            topic=name.topic,
            partition=name.partition,
        )
    if found is None:
        return History(name=name, offsets=OffsetRange(first=0, end=0))
    key = marked_manifest(found)
    marker, manifest = await read_version(bucket.store, bucket.source, found)
    if (manifest.topic_id, manifest.partition) != (name.topic_id, name.partition):
        raise Corrupt(f"manifest {key} belongs to {manifest.topic_id}-{manifest.partition}, not to {name}", key=key)
    pointer = pointer_to(manifest, key, bytes.fromhex(marker.sha256))
    offsets = OffsetRange(first=manifest.start_offset, end=manifest.end_offset)
    return History(name=name, offsets=offsets, pointer=pointer, committed_at_ms=manifest.created_at_ms)


async def _marker(store: ObjectStore, prefix: str, version: int | None) -> str | None:
    """Return the key of the marker of a committed manifest, by default the newest: versions are listed newest first."""
    async with contextlib.aclosing(store.list(prefix)) as listing:  # type: ignore[type-var]
        async for info in listing:
            parsed = parse_manifest_key(info.key)
            if parsed is None or (version is not None and parsed.version > version):
                continue
            if version is not None and parsed.version < version:
                return None
            if parsed.is_marker:
                return info.key
    return None


async def load_segments(
    bucket: Bucket, history: History, offsets: OffsetRange, times: TimeRange = ANY_TIME
) -> list[SegmentEntry]:
    """Return the segments with records in both ranges, in order. Reads only the manifest pages that list them."""
    if history.pointer is None or offsets.first >= offsets.end:
        return []
    manifest = await bucket.source.manifest(history.pointer)
    entries: list[SegmentEntry] = []
    for page in manifest.pages:
        if page.end_offset > offsets.first and page.base_offset < offsets.end and _may_hold(times, page):
            entries.extend(live_segments(manifest, await bucket.source.page(page)))
    entries.extend(manifest.segments)
    return [
        entry
        for entry in entries
        if entry.end_offset > offsets.first and entry.base_offset < offsets.end and _may_hold(times, entry)
    ]


def _may_hold(times: TimeRange, listed: PageRef | SegmentEntry) -> bool:
    return times.may_hold(listed.min_timestamp_ms, listed.max_timestamp_ms)
