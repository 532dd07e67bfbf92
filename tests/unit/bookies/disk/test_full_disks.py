"""A full disk takes no adds, and deletions as long as there is any space: they are what frees it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from unit.bookies.disk.one_disk import new_files, opened
from unit.bookies.disk.test_transient_errors import add, entries

from stratalog_bookies.protocol.messages import Status
from stratalog_core.errors import StorageFailed

FENCES = 500


async def test_a_full_disk_takes_deletions_after_its_reserve_is_used_up(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    async with opened(files, tmp_path, free_bytes_min=1 << 20) as disk:
        assert await add(disk, 1, 0, bytes(20_000)) is Status.OK
        files.free = 1 << 20
        entry = 1
        while await add(disk, 1, entry, bytes(20_000)) is Status.OK:
            entry += 1
        assert disk.core.read_only
        ledger_id, refusal = 2, ""
        while not refusal:
            try:
                await disk.fence(range(ledger_id, ledger_id + FENCES))
            except StorageFailed as full:
                refusal = full.message
            ledger_id += FENCES
        assert "the disk is full" in refusal
        is_deleted = False
        async with asyncio.timeout(30):
            while not is_deleted:
                await disk.files.check_space()
                await asyncio.sleep(0.005)
                with contextlib.suppress(StorageFailed):
                    await disk.delete([1])
                    is_deleted = True
            while await add(disk, ledger_id, 0, b"new") is not Status.OK:
                await disk.files.check_space()
                await asyncio.sleep(0.005)
        assert await entries(disk, ledger_id) == {0: b"new"}
