"""Which listed objects of a partition are garbage. Pure.

Garbage is only what a listing shows, the committed manifest (read after the listing) does not refer to, and has been so
for the grace period: an orphan counts from when it was written, a superseded manifest from when its successor was.
Objects that the manifest remembers as removed are not garbage here: their time is kept there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stratalog_tiering.core.forks import manifest_keys
from stratalog_tiering.format.manifest import Manifest
from stratalog_tiering.format.object_keys import marker_key
from stratalog_tiering.store.base import ObjectInfo


def orphans(listed: Iterable[ObjectInfo], referenced: frozenset[str], written_before_ms: int) -> list[str]:
    """Segments, pages or lists that nothing refers to."""
    return [info.key for info in listed if info.key not in referenced and info.last_modified_ms < written_before_ms]


def manifest_garbage(
    listed: Sequence[ObjectInfo], current_version: int, current_key: str, referenced: frozenset[str], before_ms: int
) -> list[str]:
    """Superseded manifests with their markers, and manifests that lost their race; never the current one.

    Nor any that is ``referenced``: those of a fork that was decided are removed objects. A superseded version goes when its
    successor was written before ``before_ms``, a loser when it was itself. Markers stand after manifests in the result, so that
    an interrupted deletion leaves no old version that looks uncommitted.
    """
    # A successor may be missing from the listing because it is gone, or because the listing lags: the next one that is marked
    # counts. One that is not marked may have lost its race long before the successor was written.
    marked_ms = {key.version: info.last_modified_ms for info, key in manifest_keys(listed) if key.is_marker}
    versions = sorted({key.version for _, key in manifest_keys(listed)})
    superseded_ms: dict[int, int] = {}
    newer_ms: int | None = None
    for version in reversed(versions):
        if newer_ms is not None:
            superseded_ms[version] = newer_ms
        newer_ms = marked_ms.get(version, newer_ms)
    kept = {current_key, marker_key(current_key), *referenced}
    garbage: list[tuple[bool, str]] = []
    for info, key in manifest_keys(listed):
        since_ms = info.last_modified_ms if key.version >= current_version else superseded_ms.get(key.version)
        if info.key not in kept and since_ms is not None and since_ms < before_ms:
            garbage.append((key.is_marker, info.key))
    return [name for _, name in sorted(garbage)]


def referenced_keys(manifest: Manifest, segments: Iterable[str], removed: Iterable[str]) -> frozenset[str]:
    """All objects that a manifest refers to, given the keys of its live segments, and those that it remembers as removed."""
    return frozenset(
        [*(ref.key for ref in manifest.pages), *(ref.key for ref in manifest.removed_lists), *segments, *removed]
    )  # fmt: skip
