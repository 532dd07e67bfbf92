"""The newest manifest in a bucket, from which a restore would continue, and what it refers to."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from simulation.world.object_store import Bucket
from stratalog_core.errors import Corrupt
from stratalog_tiering.format.commit_marker import decode_marker
from stratalog_tiering.format.manifest import Manifest, decode_manifest
from stratalog_tiering.format.object_keys import (
    deletion_marker_key,
    is_marker,
    manifests_prefix,
    object_owner,
    parse_manifest_key,
)


def newest_manifest(bucket: Bucket, topic_id: UUID, index: int) -> Manifest | None:
    """Return what the newest marker names; None if there is none, or one of each of two lines, or the topic is deleted.

    Raises ``Corrupt`` if it is damaged.
    """
    if deletion_marker_key(topic_id) in bucket.objects:
        return None
    keys = [key for key in bucket.objects if key.startswith(manifests_prefix(topic_id, index)) and is_marker(key)]
    versions = {key: parsed.version for key in keys if (parsed := parse_manifest_key(key)) is not None}
    newest = [key for key in versions if versions[key] == max(versions.values())]
    if len(newest) != 1:
        return None
    marker = decode_marker(bucket.objects[newest[0]][0], newest[0])
    return decode_manifest(bucket.objects[marker.manifest_key][0])


def needed_for_a_restore(bucket: Bucket, keys: Iterable[str]) -> set[str]:
    """Return those of ``keys`` that a restore would miss: the newest manifest of their partition refers to them directly."""
    keys = set(keys)
    needed: set[str] = set()
    for topic_id, index in {owner for key in keys if (owner := object_owner(key)) is not None}:
        try:
            newest = newest_manifest(bucket, topic_id, index)
        except (Corrupt, KeyError):
            continue  # a restore reads the one before it, which this check does not follow
        if newest is not None:
            references = (*newest.segments, *newest.pages, *newest.tree.pages)
            needed |= keys & {reference.key for reference in references}  # type: ignore[attr-defined]
    return needed
