"""Object Locks of S3: until when an object cannot be deleted, and whether anybody may lift that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

LOCK_MS_MIN: Final = 2_000
"""A lock that ends sooner is not asked for: a store refuses a date that has passed when the request arrives."""


class LockMode(StrEnum):
    """Whether a lock can be lifted before its end."""

    GOVERNANCE = "governance"
    """An account that has a permission of its own for it may lift the lock, by a request of its own."""
    COMPLIANCE = "compliance"
    """No account can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectLock:
    """A lock of an object until the wall time ``until_ms``, a whole second."""

    mode: LockMode
    until_ms: int


def joined(locks: Iterable[ObjectLock | None]) -> ObjectLock | None:
    """The lock of an object that must be kept as long as each of ``locks`` says: the latest date, in the strictest mode."""
    found = [lock for lock in locks if lock is not None]
    if not found:
        return None
    modes = {lock.mode for lock in found}
    mode = LockMode.COMPLIANCE if LockMode.COMPLIANCE in modes else LockMode.GOVERNANCE
    return ObjectLock(mode=mode, until_ms=max(lock.until_ms for lock in found))


def in_force(lock: ObjectLock | None, now_ms: int) -> ObjectLock | None:
    """``lock`` if a new object can still be locked by it at the wall time ``now_ms``."""
    return lock if lock is not None and lock.until_ms >= now_ms + LOCK_MS_MIN else None
