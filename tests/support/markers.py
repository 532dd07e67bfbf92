"""Looks for commit markers in a store."""

from __future__ import annotations

from stratalog_core.errors import NoSuchObject
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.format.object_keys import marker_key
from stratalog_tiering.store import ObjectStore


async def is_marked(store: ObjectStore, pointer: ManifestPointer) -> bool:
    """Return whether the version that ``pointer`` names has its marker."""
    try:
        await store.head(marker_key(pointer.object_key))
    except NoSuchObject:
        return False
    return True
