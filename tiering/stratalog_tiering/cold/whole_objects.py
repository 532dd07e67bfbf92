"""Small segments read with one request each, and the size of a segment's object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Corrupt, NoSuchObject
from stratalog_tiering.core.damage import Damage
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.store import ObjectStore

_READS_AT_ONCE: Final = 4


def ends_object(entry: SegmentEntry) -> bool:
    """Whether the segment's last byte is its object's last."""
    return entry.footer_position + entry.footer_bytes == entry.object_bytes


def has_own_object(entry: SegmentEntry) -> bool:
    """Whether the object holds nothing but the segment."""
    return entry.stored_bytes == entry.object_bytes


def check_size(entry: SegmentEntry, found_bytes: int) -> None:
    """Raise ``Corrupt`` unless the segment's object has ``found_bytes``, or more if one byte more than expected was found."""
    if found_bytes == entry.object_bytes:
        return
    found = f"{found_bytes} bytes" if found_bytes < entry.object_bytes else f"at least {found_bytes} bytes"
    problem = f"segment {entry.key} has {found}, not {entry.object_bytes}"
    raise Corrupt(problem, key=entry.key, damage=Damage.SEGMENT_SIZE.value)


async def read_whole(store: ObjectStore, entries: Sequence[SegmentEntry]) -> ObjectStore:
    """``store`` for readers, which has the objects of ``entries`` in memory. Each of them holds one segment only.

    Raises ``Corrupt`` if an object is missing or has another size, ``Unavailable``.
    """

    async def read(entry: SegmentEntry) -> memoryview:
        try:
            # One byte more than there should be shows whether the object is longer.
            content = await store.get_range(entry.key, 0, entry.object_bytes + 1, uncached=True, or_less=True)
        except NoSuchObject as gone:
            raise Corrupt(f"segment {entry.key} is missing from {store.url}", key=entry.key) from gone
        check_size(entry, len(content))
        return content

    contents = await bounded_map(read, entries, _READS_AT_ONCE)
    return cast(ObjectStore, _WholeObjects(store, {e.key: c for e, c in zip(entries, contents, strict=True)}))


class _WholeObjects:
    """Reads from memory what is there, and anything else from the store."""

    def __init__(self, store: ObjectStore, contents: Mapping[str, memoryview]) -> None:
        self.url, self.keys = store.url, store.keys
        self._store = store
        self._contents = contents

    async def get(self, key: str) -> bytes:
        return await self._store.get(key)

    async def get_range(
        self, key: str, start: int, length: int, *, uncached: bool = False, or_less: bool = False
    ) -> memoryview:
        content = self._contents.get(key)
        if content is None:
            return await self._store.get_range(key, start, length, uncached=uncached, or_less=or_less)
        found = content[start : start + length]
        if len(found) != length and not or_less:
            raise Corrupt(f"{key} has {len(content)} bytes, not {start + length}", key=key)
        return found
