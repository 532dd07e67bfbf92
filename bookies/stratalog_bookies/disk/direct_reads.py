"""Reads extents of log files around the page cache, by the kernel, in parallel and without a thread.

Used where the file supports it (``BeginsReads``). A failure here decides nothing: the caller reads again from a thread, and the
result of that read counts.
"""

from __future__ import annotations

import asyncio
from functools import partial

from stratalog_bookies.disk.core.extents import FilePieces, ReadPieces
from stratalog_bookies.disk.disk_calls import DiskCalls
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_core.ports import BeginsReads, File


class DirectReads:
    """Direct reads of one disk. The files that are read must be pinned."""

    def __init__(self, store: LogFiles, calls: DiskCalls) -> None:
        self._store = store
        self._calls = calls

    async def read(self, pieces: ReadPieces) -> list[memoryview] | None:
        """The slices; None if the caller must read in another way."""
        for file in pieces.files:
            if self._store.kept_open(file.generation) is None and not await self._open(file.generation):
                return None
        begun = [self._begin(file) for file in pieces.files]
        read = [each and await each for each in begun]
        if not all(read):
            return None
        return [read[file][piece][start:end] for file, piece, start, end in pieces.slices]  # type: ignore[index]

    async def _open(self, generation: int) -> bool:
        try:
            file: File = await self._calls.run(partial(self._store.open_direct, generation))
        except OSError:
            return False
        self._store.keep_open(generation, file)
        return True

    def _begin(self, pieces: FilePieces) -> asyncio.Future[list[memoryview] | None] | None:
        file = self._store.kept_open(pieces.generation)
        if not isinstance(file, BeginsReads):
            return None
        future: asyncio.Future[list[memoryview] | None] = asyncio.get_running_loop().create_future()
        number = self._calls.begin(partial(_settle, future, None))
        if file.begin_reads(pieces.extents, partial(self._ended, number, future)):
            return future
        self._calls.end(number)
        return None

    def _ended(self, number: int, future: asyncio.Future[list[memoryview] | None], read: list[memoryview] | OSError) -> None:
        self._calls.end(number)
        _settle(future, None if isinstance(read, OSError) else read)


def _settle(future: asyncio.Future[list[memoryview] | None], read: list[memoryview] | None) -> None:
    if not future.done():
        future.set_result(read)
