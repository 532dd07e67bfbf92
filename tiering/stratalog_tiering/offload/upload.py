"""Streams one object into the store: a single put if it is small, else a multipart upload with several parts at once.

Memory is bounded by the parts in flight and the one being filled. ``abort`` leaves no open upload behind, whatever has failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from stratalog_core.errors import StratalogError
from stratalog_core.object_lock import ObjectLock
from stratalog_core.ports import Buffer
from stratalog_tiering.store import ObjectStore, Upload, UploadedPart
from stratalog_tiering.store.checksums import crc_text

_log = logging.getLogger(__name__)


class StreamedUpload:
    """One upload: any number of ``write``, then ``finish`` or ``abort``."""

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        *,
        part_bytes: int,
        parts_at_once: int,
        storage_class: str = "",
        lock: ObjectLock | None = None,
        replace: bool = False,
        wants_checksum: bool = False,
    ) -> None:
        """``replace`` allows to replace an object at ``key``. ``wants_checksum``: ``crc32c`` is needed."""
        self._store = store
        self._key = key
        self._part_bytes = part_bytes
        self._parts_at_once = parts_at_once
        self._storage_class = storage_class
        self._lock = lock
        self._if_absent = not replace
        self._waiting: list[Buffer] = []
        self._waiting_bytes = 0
        self._upload: Upload | None = None
        self._sending: set[asyncio.Task[UploadedPart]] = set()
        self._sent: list[UploadedPart] = []
        self._part_count = 0
        self._wants_checksum = wants_checksum
        self.crc32c = ""
        """The checksum of what was sent, as the store computes it (``store/checksums.py``); known after ``finish``."""

    async def write(self, parts: Sequence[Buffer]) -> None:
        """Add bytes; waits while too many parts are in flight. Raises the error of a failed part."""
        self._waiting.extend(parts)
        self._waiting_bytes += sum(map(len, parts))
        while self._waiting_bytes >= self._part_bytes:
            await self._send(self._cut(self._part_bytes))

    async def finish(self) -> None:
        """Complete the object. Raises ``Conflict`` if its key exists, ``OutcomeUnknown``, ``Unavailable``."""
        if self._upload is None:
            self.crc32c = crc_text(self._waiting) if self._wants_checksum else ""
            await self._store.put(
                self._key, self._waiting, if_absent=self._if_absent, storage_class=self._storage_class, lock=self._lock
            )
            return
        if self._waiting_bytes:
            await self._send(self._cut(self._waiting_bytes))
        await self._wait_for(0)
        self.crc32c = await self._store.complete_upload(self._upload, self._sent)
        self._upload = None

    async def abort(self) -> None:
        """Cancel the parts in flight and abort the multipart upload. Does nothing after ``finish``."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        self._sending.clear()
        if self._upload is not None:
            upload, self._upload = self._upload, None
            await self._store.abort_upload(upload)

    def _cut(self, length: int) -> list[Buffer]:
        """Take exactly ``length`` waiting bytes, splitting a buffer where needed; nothing is copied."""
        cut: list[Buffer] = []
        remaining = length
        while remaining:
            first = self._waiting[0]
            if len(first) <= remaining:
                cut.append(self._waiting.pop(0))
                remaining -= len(first)
            else:
                view = memoryview(first)
                cut.append(view[:remaining])
                self._waiting[0] = view[remaining:]
                remaining = 0
        self._waiting_bytes -= length
        return cut

    async def _send(self, parts: list[Buffer]) -> None:
        if self._upload is None:
            self._upload = await self._store.create_upload(
                self._key, self._part_bytes, self._storage_class, self._lock, if_absent=self._if_absent
            )
        await self._wait_for(self._parts_at_once - 1)
        self._part_count += 1
        self._sending.add(asyncio.ensure_future(self._store.put_part(self._upload, self._part_count, parts)))

    async def _wait_for(self, at_most: int) -> None:
        while len(self._sending) > at_most:
            done, _ = await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._sending.discard(task)
                self._sent.append(task.result())


@asynccontextmanager
async def finishing(upload: StreamedUpload) -> AsyncIterator[StreamedUpload]:
    """Finish the upload at the end of the block, or abort it if anything fails; raises the first error.

    A failing abort is only logged.
    """
    try:
        yield upload
        await upload.finish()
    except BaseException:
        try:
            await upload.abort()
        except StratalogError as failure:
            _log.info("an upload was not aborted; the sweep of stale uploads removes it: %s", failure)
        raise
