"""A store whose reads are answered by a second copy while the first is away, and where the first lacks an object.

For readers only: workers and scrubs use each store by itself, so that they see what is damaged. An object that the first store
has, but altered, is noticed by whoever verifies it; :func:`read_verified` then asks the second copy. Each answer of the second
copy is counted and logged. Writes go to the first store alone.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, TypeVar

from stratalog_core.errors import Corrupt, Invalid, NoSuchObject, Refused, StorageFailed, StratalogError, Unavailable
from stratalog_core.object_lock import ObjectLock
from stratalog_core.ports import Buffer, Clock
from stratalog_tiering.store.base import KeyRing, ObjectInfo, ObjectStore, StoreFeatures, Upload, UploadedPart
from stratalog_tiering.store.pieces import get_pieces

AWAY_S: Final = 10.0
"""After the first store did not answer, reads go to the second copy first for so long."""
_LOG_INTERVAL_S: Final = 10.0
_FAILURES: Final = (Corrupt, Invalid, NoSuchObject, Refused, StorageFailed, Unavailable)
_ALTERED: Final = (Corrupt, Invalid, StorageFailed)
"""Altered bytes may also look like an object of a later release, or one whose key the key ring does not have."""
_Read = TypeVar("_Read")
_log = logging.getLogger(__name__)


class StoreWithCopy:
    """``first``, and ``second`` for reads that it cannot answer. An error is the first store's."""

    def __init__(self, first: ObjectStore, second: ObjectStore, clock: Clock) -> None:
        self.first = first
        self.second = second
        self._clock = clock
        self._away_until = float("-inf")
        self._log_from = float("-inf")
        self.second_reads = 0
        """Reads that the second copy answered."""

    @property
    def url(self) -> str:
        return self.first.url

    @property
    def keys(self) -> KeyRing:
        return self.first.keys

    def answered(self, why: StratalogError) -> None:
        """Count an answer of the second copy, and say why it was asked."""
        self.second_reads += 1
        now = self._clock.monotonic()
        if now >= self._log_from:
            self._log_from = now + _LOG_INTERVAL_S
            _log.warning("read from the second copy in %s: %s", self.second.url, why.message)

    async def _read(self, read: Callable[[ObjectStore], Awaitable[_Read]]) -> _Read:
        is_away = self._clock.monotonic() < self._away_until
        if is_away:
            try:
                found = await read(self.second)
            except _FAILURES:
                return await read(self.first)
            self.answered(Unavailable(f"{self.first.url} did not answer lately"))
            return found
        try:
            return await read(self.first)
        except _FAILURES as failure:
            if isinstance(failure, Unavailable):
                self._away_until = self._clock.monotonic() + AWAY_S
            try:
                found = await read(self.second)
            except StratalogError:
                raise failure from None
            self.answered(failure)
            return found

    async def get(self, key: str) -> bytes:
        return await self._read(lambda store: store.get(key))

    async def get_range(
        self, key: str, start: int, length: int, *, uncached: bool = False, or_less: bool = False
    ) -> memoryview:
        return await self._read(lambda store: store.get_range(key, start, length, uncached=uncached, or_less=or_less))

    async def get_pieces(self, key: str, start: int, lengths: Sequence[int]) -> list[memoryview]:
        """See ``pieces.py``."""
        return await self._read(lambda store: get_pieces(store, key, start, lengths))

    async def head(self, key: str) -> ObjectInfo:
        return await self._read(lambda store: store.head(key))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """A listing is whole from one store: the second if the first has nothing there, or fails before its first object."""
        async for info in self._listed(lambda store: store.list(prefix)):
            yield info

    async def list_keys(self, prefix: str) -> AsyncIterator[str]:
        async for key in self._listed(lambda store: store.list_keys(prefix)):
            yield key

    async def _listed(self, begin: Callable[[ObjectStore], AsyncIterator[_Read]]) -> AsyncIterator[_Read]:
        async def start(store: ObjectStore) -> tuple[AsyncIterator[_Read], _Read]:
            listing = begin(store)
            try:
                return listing, await anext(listing)
            except StopAsyncIteration:
                raise NoSuchObject(f"{store.url} lists nothing there") from None

        try:
            listing, first = await self._read(start)
        except NoSuchObject:
            return
        yield first
        async for item in listing:
            yield item

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        storage_class: str = "",
        lock: ObjectLock | None = None,
    ) -> None:
        await self.first.put(key, parts, if_absent=if_absent, storage_class=storage_class, lock=lock)

    async def delete(self, keys: Sequence[str]) -> None:
        await self.first.delete(keys)

    async def create_upload(
        self,
        key: str,
        part_bytes: int,
        storage_class: str = "",
        lock: ObjectLock | None = None,
        *,
        if_absent: bool = True,
    ) -> Upload:
        return await self.first.create_upload(key, part_bytes, storage_class, lock, if_absent=if_absent)

    async def put_part(self, upload: Upload, number: int, parts: Sequence[Buffer]) -> UploadedPart:
        return await self.first.put_part(upload, number, parts)

    async def complete_upload(self, upload: Upload, parts: Sequence[UploadedPart]) -> str:
        return await self.first.complete_upload(upload, parts)

    async def abort_upload(self, upload: Upload) -> None:
        await self.first.abort_upload(upload)

    def list_uploads(self) -> AsyncIterator[Upload]:
        return self.first.list_uploads()

    async def features(self, key: str) -> StoreFeatures:
        return await self.first.features(key)

    async def close(self) -> None:
        await self.first.close()
        await self.second.close()


async def read_verified(store: ObjectStore, read: Callable[[ObjectStore], Awaitable[_Read]]) -> _Read:
    """The result of ``read``, which verifies what it gets and raises ``Corrupt``, from ``store`` or from its second copy.

    ``Invalid`` and ``StorageFailed`` count as damage, too: the committed object may be in a format that this release knows.
    """
    try:
        return await read(store)
    except _ALTERED as damaged:
        if not isinstance(store, StoreWithCopy):
            raise
        try:
            found = await read(store.second)
        except StratalogError:
            # While the first store was away, what is damaged may be the second copy's.
            try:
                return await read(store.first)
            except StratalogError:
                raise damaged from None
        store.answered(damaged)
        return found
