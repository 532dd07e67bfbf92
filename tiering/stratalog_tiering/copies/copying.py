"""Copies one object from a store to another under the same key: the committed bytes, or nothing.

The bytes are compared with the SHA-256 that the manifest records while they are read, before the new object becomes visible,
and again after it was read back. A key therefore never names other bytes than those that were committed under it. Memory is
bounded by the parts of one upload.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from stratalog_core.errors import Corrupt, NoSuchObject
from stratalog_core.object_lock import in_force
from stratalog_core.ports import Background, Clock
from stratalog_tiering.core.references import Reference
from stratalog_tiering.offload.upload import StreamedUpload, finishing
from stratalog_tiering.store import ObjectStore

READ_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLimits:
    """How copies are made. ``take`` is awaited for all bytes that are read from either store."""

    background: Background
    clock: Clock
    take: Callable[[int], Awaitable[None]]
    part_bytes: int = 8 * 1024 * 1024
    parts_at_once: int = 2


async def copy_object(
    source: ObjectStore, target: ObjectStore, wanted: Reference, limits: CopyLimits, *, replace: bool = False
) -> None:
    """Copy the object and verify the copy. ``replace`` allows to replace an object at the key, which is damaged.

    Raises ``NoSuchObject`` or ``Corrupt``, having written nothing, if ``source`` lacks the committed bytes; ``Corrupt`` if the
    copy does not read back as it was written; ``Conflict`` if the key exists and may not be replaced.
    """
    upload = StreamedUpload(
        target, wanted.key, part_bytes=limits.part_bytes, parts_at_once=limits.parts_at_once,
        storage_class=wanted.storage_class, lock=in_force(wanted.lock, limits.clock.wall_ms()), replace=replace,
    )  # fmt: skip
    async with finishing(upload):
        await _read_verified(source, wanted, limits, upload)
    await require_object(target, wanted, limits)


async def require_object(store: ObjectStore, wanted: Reference, limits: CopyLimits) -> None:
    """Read an object from storage. Raises ``NoSuchObject``, or ``Corrupt`` unless it consists of the committed bytes."""
    found = await store.head(wanted.key)
    if found.size_bytes != wanted.object_bytes:
        raise Corrupt(f"{wanted.key} in {store.url} has {found.size_bytes} bytes, not {wanted.object_bytes}", key=wanted.key)
    await _read_verified(store, wanted, limits)


async def has_object(store: ObjectStore, wanted: Reference, limits: CopyLimits) -> bool:
    """Whether the store has the committed bytes of an object."""
    try:
        await require_object(store, wanted, limits)
    except (Corrupt, NoSuchObject):
        return False
    return True


async def _read_verified(
    store: ObjectStore, wanted: Reference, limits: CopyLimits, upload: StreamedUpload | None = None
) -> None:
    """Read the object, pass it on to ``upload``, and raise ``Corrupt`` at its end if it has another digest."""
    digest = hashlib.sha256()
    for start in range(0, wanted.object_bytes, READ_BYTES):
        length = min(READ_BYTES, wanted.object_bytes - start)
        await limits.take(length)
        content = await store.get_range(wanted.key, start, length, uncached=True)
        await limits.background.run(lambda content=content: digest.update(content))  # type: ignore[misc]
        if upload is not None:
            await upload.write([content])
    if digest.digest() != wanted.sha256:
        raise Corrupt(f"{wanted.key} in {store.url} is not the committed object: its SHA-256 differs", key=wanted.key)
