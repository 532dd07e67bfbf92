"""Writes small objects that a repair restores, descriptors and manifests, and reads each back."""

from __future__ import annotations

from stratalog_core.errors import Corrupt, Invalid, NoSuchObject
from stratalog_core.object_lock import ObjectLock
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.core.damage import judge_manifest
from stratalog_tiering.core.locks import pointer_lock
from stratalog_tiering.format.descriptor import is_of_later_release
from stratalog_tiering.store import ObjectStore


async def put_checked(store: ObjectStore, key: str, content: bytes, lock: ObjectLock | None = None) -> None:
    """Write an object unless it is there, and read it back.

    Raises ``Invalid``, having written nothing, if a later release may have written what is there.
    """
    found = await content_or_nothing(store, key)
    if found == content:
        return
    if is_of_later_release(found, content):
        raise Invalid(f"{key} may be in the format of a later release: upgrade this one, or delete the object")
    await store.put(key, [content], if_absent=False, lock=lock)
    if bytes(await store.get(key)) != content:
        raise Corrupt(f"{key} does not read back as it was written")


async def put_unstored(store: ObjectStore, pointer: ManifestPointer, now_ms: int) -> None:
    """Write the manifest of a committed version if metadata still has it, because no worker has read it back.

    A readable manifest at its key stays: if it is another history's, the worker finds a fork. Raises as `put_checked` does.
    """
    if not pointer.content:
        return
    key = pointer.object_key
    readable, _ = judge_manifest(await content_or_nothing(store, key), None, key)
    if readable is None:
        await put_checked(store, key, pointer.content, pointer_lock(pointer, now_ms))


async def content_or_nothing(store: ObjectStore, key: str) -> bytes:
    """The object at ``key``, empty if there is none."""
    try:
        return bytes(await store.get(key))
    except NoSuchObject:
        return b""
