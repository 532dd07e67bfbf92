"""Commit markers, and a worker's memory of what it committed and marked, which spares requests to the store.

A marker says that a manifest version is committed, to readers without metadata. It is written after the commit, and before any
hot copy is dropped.
"""

from __future__ import annotations

from typing import Final

from stratalog_core.ports import Clock
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.cold.block_cache import LruCache
from stratalog_tiering.core.locks import pointer_lock
from stratalog_tiering.format.descriptor import CommitMarker
from stratalog_tiering.format.object_keys import marker_key
from stratalog_tiering.offload.descriptors import put_once
from stratalog_tiering.store import ObjectStore

PARTITIONS_MAX: Final = 20_000
"""The number of partitions that a worker remembers; for others it asks the store again."""


async def mark_committed(store: ObjectStore, pointer: ManifestPointer, now_ms: int) -> None:
    """Write the marker of a committed version, locked as its manifest is. Idempotent. ``now_ms`` is wall time."""
    marker = CommitMarker(manifest_key=pointer.object_key, manifest_version=pointer.manifest_version, sha256=pointer.sha256)
    await put_once(store, marker_key(pointer.object_key), marker, pointer_lock(pointer, now_ms))


class RecentCommits:
    """The newest version of each partition that one worker has committed or marked. Lost with the worker."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._marked: LruCache[str, str] = LruCache(PARTITIONS_MAX)
        self._committed: LruCache[str, str] = LruCache(PARTITIONS_MAX)

    async def ensure_marked(self, pointer: ManifestPointer) -> None:
        """Write the version's marker, unless this worker has. Raises the store's errors."""
        if self._marked.get(pointer.key()) != pointer.object_key:
            await mark_committed(self._store, pointer, self._clock.wall_ms())
            self._marked.put(pointer.key(), pointer.object_key)

    def committed(self, pointer: ManifestPointer) -> None:
        """Note that this worker has committed the version, and had found that history is not forked."""
        self._committed.put(pointer.key(), pointer.object_key)

    def is_own(self, pointer: ManifestPointer) -> bool:
        """Whether this worker committed the version, and has not begun another commit since."""
        return self._committed.get(pointer.key()) == pointer.object_key

    def forget(self, pointer: ManifestPointer) -> None:
        """Forget that this worker committed a version of the partition."""
        self._committed.pop(pointer.key())
