"""Object Locks: which lock a new object gets, and what it takes over from the objects that it replaces or refers to.

A segment is locked for the topic's ``stratalog.tier.lock.ms`` from its upload on. A merged segment takes the latest date of its
sources, never a new one. Everything that a commit writes beside the segment is locked as long as the history that it refers to.
No I/O; ``offload/locks.py`` asks the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from stratalog_core.object_lock import LockMode, ObjectLock, in_force, joined
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.core.policy import TierPolicy
from stratalog_tiering.format.locks import entry_lock
from stratalog_tiering.format.manifest import SegmentEntry

_SECOND_MS: Final = 1000


def new_lock(policy: TierPolicy, now_ms: int) -> ObjectLock | None:
    """The lock of a segment that is uploaded at the wall time ``now_ms``; None if the topic has none."""
    if policy.lock_mode is None:
        return None
    # Stores keep whole seconds.
    until_ms = -(-(now_ms + policy.lock_ms) // _SECOND_MS) * _SECOND_MS
    return ObjectLock(mode=policy.lock_mode, until_ms=until_ms)


def merged_lock(sources: Iterable[SegmentEntry], now_ms: int) -> ObjectLock | None:
    """The lock of the segment that replaces ``sources``: their latest date, in their strictest mode."""
    return in_force(joined(entry_lock(entry) for entry in sources), now_ms)


def pointer_lock(pointer: ManifestPointer, now_ms: int) -> ObjectLock | None:
    """The lock of the manifest that ``pointer`` names, if it is in force at the wall time ``now_ms``."""
    lock = ObjectLock(mode=LockMode(pointer.lock_mode), until_ms=pointer.lock_until_ms) if pointer.lock_mode else None
    return in_force(lock, now_ms)
