"""An interrupted compaction leaves two copies of an entry. The older one is kept, or moved, if the newer one is corrupt."""

from __future__ import annotations

import asyncio
from pathlib import Path

from unit.bookies.disk.test_transient_errors import COOKIE, Rationed, add, entries, running, settings_of

from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.compaction import Compaction
from stratalog_bookies.disk.core.cookie import disk_key
from stratalog_bookies.disk.core.lookup import Budget
from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.disk.log_files import LogFiles, log_path
from stratalog_bookies.protocol.messages import Range, Status
from stratalog_core.system import SystemFiles, ThreadBackground

PAYLOADS = {entry: bytes([65 + entry]) * 10_000 for entry in range(4)}


async def closed(disk: Disk, generation: int) -> None:
    await disk.leave_file(generation)
    await disk.commit.durable(disk.core.log.sequence)
    disk.files.advance()
    async with asyncio.timeout(60):
        while not disk.core.contents.files[generation].closed:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.005)


async def test_a_good_copy_is_not_freed_for_the_sake_of_a_corrupt_one(tmp_path: Path) -> None:
    files = SystemFiles(tmp_path)
    recovery.create(LogFiles(files, disk_key(COOKIE, 0), 64 * 1024))
    background = ThreadBackground(8, "disk")
    settings = settings_of(tmp_path)
    async with running(Rationed(files), settings, background) as disk:
        older = disk.core.log.generation
        for entry, payload in PAYLOADS.items():
            assert await add(disk, 1, entry, payload) is Status.OK
        await closed(disk, older)
        run = disk.core.contents.files[older].runs[1]
        row = run.find(2)
        assert row is not None
        disk.core.move(1, row, PAYLOADS[2], older)
        newer = disk.core.log.generation
        await closed(disk, newer)
        copy = disk.core.contents.files[newer].runs[1].find(2)
        assert copy is not None
        with (tmp_path / log_path(newer)).open("r+b") as log_file:
            log_file.seek(copy.position)
            log_file.write(b"rot")
        (found,) = await disk.reads.read([Range(1, 0, 10)], Budget(1 << 20, 100), None)
        assert len(found.payloads) == len(PAYLOADS) - 1, "the newer copy is used"

        disk.corruption.files[older] = "planted"
        await Compaction(disk, settings).empty_corrupt_files()
        assert disk.corruption.files == {}
        assert await entries(disk, 1) == PAYLOADS
    background.close()
