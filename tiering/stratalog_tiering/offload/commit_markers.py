"""Commit markers, and a worker's memory of what it committed, marked and found in the store, which spares requests.

A marker says that a manifest version is committed, to readers without metadata. It is written after the commit, and before any
hot copy is dropped. A version that was stored after its commit needs none (``version_objects.py``).
"""

from __future__ import annotations

from typing import Final

from stratalog_core.ports import Clock
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.cold.block_cache import LruCache
from stratalog_tiering.core.locks import pointer_lock
from stratalog_tiering.format.descriptor import CommitMarker
from stratalog_tiering.format.object_keys import is_version_object, marker_key
from stratalog_tiering.offload.descriptors import put_once
from stratalog_tiering.store import ObjectStore

PARTITIONS_MAX: Final = 20_000
"""The number of partitions that a worker remembers; for others it asks the store again."""
NEWEST_SHARE: Final = 0.5
"""Share of the grace period for which a version that was the store's newest one is remembered as such. A version
that was committed after it is in the store for the whole period at least."""


async def mark_committed(store: ObjectStore, pointer: ManifestPointer, now_ms: int) -> None:
    """Write the marker of a committed version, locked as its manifest is, unless the manifest is its own marker.

    Idempotent. ``now_ms`` is wall time.
    """
    if is_version_object(pointer.object_key):
        return
    marker = CommitMarker(manifest_key=pointer.object_key, manifest_version=pointer.manifest_version, sha256=pointer.sha256)
    await put_once(store, marker_key(pointer.object_key), marker, pointer_lock(pointer, now_ms))


class RecentCommits:
    """The newest version of each partition that one worker has committed, marked or found. Lost with the worker."""

    def __init__(self, store: ObjectStore, clock: Clock, grace_ms: int) -> None:
        self._store = store
        self._clock = clock
        self._newest_s = NEWEST_SHARE * grace_ms / 1000
        self._marked: LruCache[str, str] = LruCache(PARTITIONS_MAX)
        self._newest: LruCache[str, tuple[str, float]] = LruCache(PARTITIONS_MAX)
        self._own: LruCache[str, str] = LruCache(PARTITIONS_MAX)

    def is_marked(self, pointer: ManifestPointer) -> bool:
        """Whether this worker has written the version's marker."""
        return self._marked.get(pointer.key()) == pointer.object_key

    async def ensure_marked(self, pointer: ManifestPointer) -> None:
        """Write the version's marker, unless this worker has. Raises the store's errors."""
        if not self.is_marked(pointer):
            await mark_committed(self._store, pointer, self._clock.wall_ms())
            self._marked.put(pointer.key(), pointer.object_key)

    def committed(self, pointer: ManifestPointer) -> None:
        """Note that this worker has committed the version, after it had found that history is not forked."""
        self._own.put(pointer.key(), pointer.sha256)
        self.found_newest(pointer, self._clock.monotonic())

    def found_newest(self, pointer: ManifestPointer, at_s: float) -> None:
        """Note that the store had no newer version at the monotonic time ``at_s``.

        Only for version objects: an earlier release, which does not write them, may not commit a successor to one.
        """
        if is_version_object(pointer.object_key):
            self._newest.put(pointer.key(), (pointer.sha256, at_s))

    def was_newest(self, pointer: ManifestPointer) -> bool:
        """Whether the store had no newer version a short time ago, compared with the grace period."""
        if not is_version_object(pointer.object_key):
            return False
        sha256, at_s = self._newest.get(pointer.key()) or ("", 0.0)
        return sha256 == pointer.sha256 and self._clock.monotonic() - at_s < self._newest_s

    def is_own_newest(self, pointer: ManifestPointer) -> bool:
        """As :meth:`was_newest`, and this worker has committed the version and held the partition since then."""
        return self._own.get(pointer.key()) == pointer.sha256 and self.was_newest(pointer)

    def forget(self, pointer: ManifestPointer) -> None:
        """Forget what this worker committed and found of the partition."""
        self._newest.pop(pointer.key())
        self._own.pop(pointer.key())

    def released(self, pointer_key: str) -> None:
        """Note that the worker does not hold the partition, or not yet: another one may commit the next version."""
        self._own.pop(pointer_key)
