"""Objects in memory behind the part of the store's port that readers, scrubs and repairs of small objects use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from stratalog_core.errors import Conflict, Corrupt, NoSuchObject
from stratalog_core.object_lock import ObjectLock
from stratalog_core.ports import Buffer
from stratalog_tiering.store import KeyRing, ObjectInfo


class MemoryStore:
    """The objects in ``contents``, which the caller may change."""

    url = "memory:"

    def __init__(self, contents: Mapping[str, bytes], keys: KeyRing) -> None:
        self.contents = dict(contents)
        self.keys = keys

    def _content(self, key: str) -> bytes:
        if key not in self.contents:
            raise NoSuchObject(f"object {key} does not exist", key=key)
        return self.contents[key]

    def _info(self, key: str) -> ObjectInfo:
        return ObjectInfo(key=key, size_bytes=len(self._content(key)), etag="", last_modified_ms=0)

    async def get(self, key: str) -> bytes:
        return self._content(key)

    async def get_range(
        self, key: str, start: int, length: int, *, uncached: bool = False, or_less: bool = False
    ) -> memoryview:
        content = self._content(key)[start : start + length]
        if len(content) < length and not or_less:
            raise Corrupt(f"{key} ends before byte {start + length}", key=key)
        return memoryview(content)

    async def head(self, key: str) -> ObjectInfo:
        return self._info(key)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        for key in sorted(self.contents):
            if key.startswith(prefix):
                yield self._info(key)

    async def list_keys(self, prefix: str) -> AsyncIterator[str]:
        async for info in self.list(prefix):
            yield info.key

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        storage_class: str = "",
        lock: ObjectLock | None = None,
    ) -> None:
        if if_absent and key in self.contents:
            raise Conflict(f"object {key} exists", key=key)
        self.contents[key] = b"".join(parts)

    async def close(self) -> None:
        pass
