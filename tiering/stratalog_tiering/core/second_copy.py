"""Which objects of a second copy are garbage. No I/O.

The second copy receives some of the committed versions, each after all that it refers to. An object is garbage if neither the
newest version needs it nor the version that was the copy's newest one grace period ago, and it is older than that. An object
that left the history since then is named by that version, or is younger than it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stratalog_tiering.core.forks import manifest_keys
from stratalog_tiering.format.object_keys import marked_manifest
from stratalog_tiering.store.base import ObjectInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedVersion:
    """A version that the second copy has whole. ``copied_ms`` is the time of its marker, by the second store's clock."""

    manifest_key: str
    version: int
    copied_ms: int


def copied_versions(listed: Iterable[ObjectInfo]) -> list[CopiedVersion]:
    """The versions that a listing of a partition's manifests in the second copy shows as whole, newest first."""
    found = [
        CopiedVersion(manifest_key=marked_manifest(info.key), version=key.version, copied_ms=info.last_modified_ms)
        for info, key in manifest_keys(listed)
        if key.is_marker
    ]
    return sorted(found, key=lambda each: -each.version)


def version_at(versions: Sequence[CopiedVersion], at_ms: int) -> CopiedVersion | None:
    """The newest of ``versions`` (newest first) that was whole at ``at_ms``; None if none was."""
    return next((each for each in versions if each.copied_ms < at_ms), None)


def copy_garbage(
    data: Iterable[ObjectInfo], manifests: Sequence[ObjectInfo], needed: frozenset[str], oldest_kept: CopiedVersion
) -> list[str]:
    """Keys of the garbage, markers after their manifests.

    ``needed`` are the objects of the newest version and of ``oldest_kept``. ``oldest_kept`` and all later versions stay.
    """
    keys = [info.key for info in data if info.key not in needed and info.last_modified_ms < oldest_kept.copied_ms]
    old = [
        (key.is_marker, info.key)
        for info, key in manifest_keys(manifests)
        if key.version < oldest_kept.version and info.last_modified_ms < oldest_kept.copied_ms
    ]
    return [*keys, *(key for _, key in sorted(old))]
