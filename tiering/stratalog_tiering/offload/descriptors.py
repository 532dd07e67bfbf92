"""Writes descriptors to the bucket."""

from __future__ import annotations

from stratalog_core.errors import Conflict
from stratalog_core.object_lock import ObjectLock
from stratalog_tiering.format.descriptor import Descriptor, encode_descriptor
from stratalog_tiering.store import ObjectStore


async def put_once(store: ObjectStore, key: str, descriptor: Descriptor, lock: ObjectLock | None = None) -> None:
    """Write a descriptor that never changes; does nothing if the key exists."""
    try:
        await store.put(key, [encode_descriptor(descriptor)], lock=lock)
    except Conflict:
        return
