"""A new disk in a directory, and what the tests of its log files do with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from unit.bookies.disk.test_transient_errors import COOKIE, TIMEOUT_S, Rationed, Small, running, settings_of

from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.core.cookie import disk_key
from stratalog_bookies.disk.core.index import Row
from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.disk.log_files import LogFiles, log_path
from stratalog_core.system import SystemFiles, ThreadBackground

FILE_BYTES = 64 * 1024


def new_files(path: Path) -> Rationed:
    """The files of a new disk, which has one empty log file."""
    files = SystemFiles(path)
    recovery.create(LogFiles(files, disk_key(COOKIE, 0), FILE_BYTES))
    return Rationed(files)


def small_files(path: Path, log_files: int) -> Small:
    """The files of a new disk with room for so many log files and spares."""
    files = SystemFiles(path)
    recovery.create(LogFiles(files, disk_key(COOKIE, 0), FILE_BYTES))
    return Small(files, log_files)


@asynccontextmanager
async def opened(files: Rationed, path: Path, **settings: object) -> AsyncIterator[Disk]:
    background = ThreadBackground(8, "disk")
    async with running(files, settings_of(path, **settings), background) as disk:
        yield disk
    background.close()


async def until_closed(disk: Disk, generation: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not disk.core.contents.files[generation].closed:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.005)


async def close_file(disk: Disk, generation: int) -> None:
    """Go on in another log file, and wait for the checkpoint of this one."""
    await disk.leave_file(generation)
    await disk.commit.durable(disk.core.log.sequence)
    disk.files.advance()
    await until_closed(disk, generation)


def damage(path: Path, generation: int, row: Row) -> None:
    """Overwrite the beginning of an entry's frame."""
    with (path / log_path(generation)).open("r+b") as log_file:
        log_file.seek(row.position)
        log_file.write(b"rot")
