"""Object Locks as segment entries and manifests record them. No I/O."""

from __future__ import annotations

from stratalog_core.object_lock import LockMode, ObjectLock
from stratalog_tiering.format.manifest import Manifest, SegmentEntry


def entry_lock(entry: SegmentEntry) -> ObjectLock | None:
    """The lock of a segment's object, whether it has ended or not."""
    return _lock(entry.options.lock_mode, entry.options.lock_until_ms)


def manifest_lock(manifest: Manifest) -> ObjectLock | None:
    """The lock of a manifest, whether it has ended or not."""
    return _lock(manifest.lock_mode, manifest.lock_until_ms)


def _lock(mode: str, until_ms: int) -> ObjectLock | None:
    return ObjectLock(mode=LockMode(mode), until_ms=until_ms) if mode else None
