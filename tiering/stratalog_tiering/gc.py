"""Which listed objects of a partition are garbage. Pure.

Garbage is only what a listing shows, the committed manifest (read after the listing) does not refer to, and has been so
for the grace period: an orphan counts from when it was written, a superseded manifest from when its successor was.
Objects in the manifest's ``removed`` list are not garbage here: their time is kept there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stratalog_tiering.manifest import Manifest
from stratalog_tiering.object_keys import ManifestKey, marked_manifest, marker_key, parse_manifest_key
from stratalog_tiering.store.base import ObjectInfo


def orphans(listed: Iterable[ObjectInfo], referenced: frozenset[str], written_before_ms: int) -> list[str]:
    """Segments or pages that nothing refers to."""
    return [info.key for info in listed if info.key not in referenced and info.last_modified_ms < written_before_ms]


def unknown_to_metadata(listed: Iterable[ObjectInfo], current_version: int, current_key: str) -> str | None:
    """A manifest that its marker proves committed, and that the committed one, read after the listing, does not succeed.

    Then metadata has lost what it knew (it was restored from an old copy, or made anew), and absence from the current manifest
    proves nothing. Version 0 with no key: metadata knows of none.
    """
    for info, key in _manifests(listed):
        if key.is_marker and key.version >= current_version and marked_manifest(info.key) != current_key:
            return marked_manifest(info.key)
    return None


def manifest_garbage(listed: Sequence[ObjectInfo], current_version: int, current_key: str, before_ms: int) -> list[str]:
    """Superseded manifests with their markers, and manifests that lost their race; never the current one.

    A superseded version goes when its successor was written before ``before_ms``, a loser when it was itself. Markers stand
    after manifests in the result, so that an interrupted deletion leaves no old version that looks uncommitted.
    """
    written_ms: dict[int, int] = {}
    for info, key in _manifests(listed):
        written_ms[key.version] = max(info.last_modified_ms, written_ms.get(key.version, info.last_modified_ms))
    kept = {current_key, marker_key(current_key)}
    garbage: list[tuple[bool, str]] = []
    for info, key in _manifests(listed):
        successor_ms = info.last_modified_ms if key.version >= current_version else written_ms.get(key.version + 1, 0)
        if info.key not in kept and successor_ms < before_ms:
            garbage.append((key.is_marker, info.key))
    return [name for _, name in sorted(garbage)]


def _manifests(listed: Iterable[ObjectInfo]) -> Iterator[tuple[ObjectInfo, ManifestKey]]:
    for info in listed:
        key = parse_manifest_key(info.key)
        if key is not None:
            yield info, key


def referenced_keys(manifest: Manifest, page_segments: Iterable[str]) -> frozenset[str]:
    """All that a manifest refers to or remembers as removed. ``page_segments`` are keys of segments in its pages."""
    own = [*(ref.key for ref in manifest.pages), *(entry.key for entry in manifest.segments)]
    return frozenset([*own, *page_segments, *(removed.key for removed in manifest.removed)])
