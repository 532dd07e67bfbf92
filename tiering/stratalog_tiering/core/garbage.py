"""Which listed objects of a partition are garbage.

An object is garbage if a listing shows it and the committed manifest, read after the listing, has not referred to it for the
grace period. The period begins when an orphan was written, and when a superseded manifest's successor was written. Objects that
the manifest lists as removed are not garbage: the manifest keeps their time. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stratalog_tiering.core.forks import manifest_keys
from stratalog_tiering.format.manifest import Manifest
from stratalog_tiering.format.object_keys import marker_key
from stratalog_tiering.store.base import ObjectInfo


def orphans(listed: Iterable[ObjectInfo], referenced: frozenset[str], written_before_ms: int) -> list[str]:
    """Keys of data objects that nothing refers to and that were written before ``written_before_ms``."""
    return [info.key for info in listed if info.key not in referenced and info.last_modified_ms < written_before_ms]


def manifest_garbage(
    listed: Sequence[ObjectInfo], current_version: int, current_key: str, referenced: frozenset[str], before_ms: int
) -> list[str]:
    """Keys of superseded manifests with their markers, and of manifests that lost their race.

    The current version is never garbage, nor is any ``referenced`` object: those of a resolved fork are removed objects. A
    superseded version is garbage if its successor was written before ``before_ms``, a loser if it was itself. Markers come
    after manifests in the result, so that an interrupted deletion leaves no old version that looks uncommitted.
    """
    # A successor may be missing because it is deleted or because the listing lags, so the next marked version counts. An
    # unmarked one may have lost its race long before the successor was written.
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
    """Keys of all objects that a manifest refers to, given the keys of its live segments and of its removed objects."""
    return frozenset(
        [
            *(ref.key for ref in manifest.pages), *(ref.key for ref in manifest.removed_lists),
            *(ref.key for ref in manifest.tree.pages), *segments, *removed,
        ]
    )  # fmt: skip
