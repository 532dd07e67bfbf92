"""Asks the store about locks: whether a new segment has the lock that it was to get, and until when garbage is locked.

Garbage is asked for one by one, and only where locks are in use; the answers are kept, because a lock of ours never changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

import msgspec

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Corrupt, Invalid, NoSuchObject, StorageFailed
from stratalog_core.moments import utc_text
from stratalog_core.object_lock import ObjectLock
from stratalog_tiering.cold.archive import read_topic
from stratalog_tiering.cold.block_cache import LruCache
from stratalog_tiering.core.policy import tier_policy
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.format.object_keys import parse_topic_key, topic_prefix
from stratalog_tiering.store import ObjectStore

_KNOWN_MAX: Final = 20_000
_QUESTIONS_AT_ONCE: Final = 16


async def locked_entry(store: ObjectStore, entry: SegmentEntry, lock: ObjectLock | None) -> SegmentEntry:
    """``entry`` with the lock and the version of its object, after asking the store for them, if there is to be a ``lock``.

    Raises ``StorageFailed`` if the store has ignored the lock, ``Unavailable``.
    """
    if lock is None:
        return entry
    info = await store.head(entry.key)
    if info.locked_until_ms < lock.until_ms or not info.version_id:
        told = f"until {utc_text(info.locked_until_ms)}" if info.locked_until_ms else "not at all"
        raise StorageFailed(
            f"{store.url} was to lock {entry.key} until {utc_text(lock.until_ms)}, and says that it is locked {told}: allow"
            " s3:PutObjectRetention and s3:GetObjectRetention, or use a store that `stratalog store info` says can lock objects"
        )
    options = msgspec.structs.replace(
        entry.options, version_id=info.version_id, lock_until_ms=info.locked_until_ms, lock_mode=lock.mode.value
    )
    return msgspec.structs.replace(entry, options=options)


class KnownLocks:
    """The ends of locks that one process has asked its store for."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._until_ms: LruCache[str, int] = LruCache(_KNOWN_MAX)

    async def until_ms(self, key: str) -> int:
        """Wall time until which an object is locked; 0 if it is not, or does not exist. Raises ``Unavailable``."""
        known = self._until_ms.get(key)
        if known is None:
            known = await self._ask(key)
            self._until_ms.put(key, known)
        return known

    async def _ask(self, key: str) -> int:
        try:
            return (await self._store.head(key)).locked_until_ms
        except NoSuchObject:
            return 0


async def unlocked(locks: KnownLocks, keys: Sequence[str], now_ms: int) -> list[str]:
    """Those of ``keys`` whose objects are not locked at the wall time ``now_ms``, in order. Raises ``Unavailable``."""
    ends_ms = await bounded_map(locks.until_ms, keys, _QUESTIONS_AT_ONCE)
    return [key for key, end_ms in zip(keys, ends_ms, strict=True) if end_ms <= now_ms]


async def may_have_locked(store: ObjectStore, topic_id: UUID, defaults: Mapping[str, str]) -> bool:
    """Whether any version of the topic's descriptor in ``store``, or the cluster's ``defaults``, ask for locks."""
    keys = [info.key async for info in store.list(topic_prefix(topic_id)) if parse_topic_key(info.key) is not None]
    try:
        policies = [tier_policy({**defaults, **(await read_topic(store, key)).configs}) for key in keys]
    except (Corrupt, Invalid, NoSuchObject):
        return True
    return any(policy.lock_mode is not None for policy in policies)
