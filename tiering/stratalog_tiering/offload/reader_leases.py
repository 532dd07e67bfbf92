"""Readers' leases in the bucket: asked for by whoever is about to delete something."""

from __future__ import annotations

from stratalog_core.errors import NoSuchObject
from stratalog_tiering.core.leases import Protection, protection_of
from stratalog_tiering.format.object_keys import LEASES_PREFIX
from stratalog_tiering.store import Locked, ObjectStore


async def leases_in_force(store: ObjectStore, now_ms: int) -> list[Protection]:
    """The leases in force at the wall time ``now_ms``. Raises ``Unavailable``: then nothing may be deleted."""
    found = []
    async for info in store.list(LEASES_PREFIX):
        try:
            protection = protection_of(await store.get(info.key), info)
        except NoSuchObject:
            continue  # its holder has just released it
        if protection.until_ms > now_ms:
            found.append(protection)
    return found


async def delete_expired_leases(store: ObjectStore, now_ms: int, age_ms: int) -> None:
    """Delete the leases that ended at least ``age_ms`` ago: their holders died.

    Raises ``Locked`` for leases that the store keeps, after all others were deleted.
    """
    locked: Locked | None = None
    for info in [each async for each in store.list(LEASES_PREFIX)]:
        try:
            protection = protection_of(await store.get(info.key), info)
        except NoSuchObject:
            continue
        if protection.until_ms + age_ms < now_ms:
            try:
                await store.delete([info.key])
            except Locked as kept:
                locked = kept
    if locked is not None:
        raise locked
