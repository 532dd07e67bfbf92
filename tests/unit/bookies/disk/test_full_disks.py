"""A full disk takes no adds, and deletions as long as there is any space: they are what frees it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from unit.bookies.disk.one_disk import FILE_BYTES, new_files, opened, small_files
from unit.bookies.disk.test_transient_errors import add, entries, until

from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.protocol.messages import RECOVERY_ADD, Status
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


async def _fill(disk: Disk, ledger_id: int) -> None:
    """Add entries until the disk is full."""
    entry = 0
    while await add(disk, ledger_id, entry, bytes(20_000)) is Status.OK:
        entry += 1
    assert entry


async def test_a_full_disk_records_no_lacs(tmp_path: Path) -> None:
    """They are best effort, and the space is reserved for deletions."""
    async with opened(small_files(tmp_path, 8), tmp_path, free_bytes_min=4 * FILE_BYTES) as disk:
        await _fill(disk, 1)
        log = disk.core.log
        before = log.generation, log.tail
        for lac in range(10, 20):
            assert await disk.write_lacs([(1, lac), (2, 0)]) == bytes((Status.READ_ONLY, Status.READ_ONLY))
        assert (log.generation, log.tail) == before
        await disk.delete([1])


async def test_space_that_was_lent_to_a_full_disk_becomes_free_again(tmp_path: Path) -> None:
    """As a spare it would be used for adds, and after some turns no deletion would fit."""
    files = small_files(tmp_path, 8)
    async with opened(files, tmp_path, free_bytes_min=4 * FILE_BYTES, spare_files=4) as disk:
        await _fill(disk, 1)
        last = disk.core.log.generation + 5
        ledger_id = 1000
        async with asyncio.timeout(30):
            while disk.core.log.generation < last:
                with contextlib.suppress(StorageFailed):
                    await disk.fence(range(ledger_id, ledger_id + FENCES))
                ledger_id += FENCES
                await disk.files.check_space()
                await asyncio.sleep(0.001)
                assert await add(disk, 2, 0, b"") is Status.READ_ONLY
            await disk.delete([1])
            while disk.core.read_only:
                await disk.files.check_space()
                await asyncio.sleep(0.001)
        assert files.free_bytes() >= 4 * FILE_BYTES


async def test_a_full_disk_accepts_a_recovery_add_of_an_entry_that_it_has(tmp_path: Path) -> None:
    """It needs no room. If two of three bookies were full, the ledger could not be recovered without them."""
    files = small_files(tmp_path, 8)
    async with opened(files, tmp_path, free_bytes_min=4 * FILE_BYTES, index_bytes_max=0) as disk:
        await _fill(disk, 1)
        await disk.fence([1])
        ledger = disk.core.contents.ledgers[1]
        await until(lambda: ledger.runs[0].rows is None)
        for entry in range(ledger.last_entry + 1):
            assert await add(disk, 1, entry, bytes(20_000), RECOVERY_ADD) is Status.OK
        assert await add(disk, 1, 0, b"another", RECOVERY_ADD) is Status.CONFLICT
        assert await add(disk, 1, ledger.last_entry + 1, b"new", RECOVERY_ADD) is Status.READ_ONLY
        assert await add(disk, 2, 0, b"new", RECOVERY_ADD) is Status.READ_ONLY
        assert await add(disk, 1, 0, bytes(20_000)) is Status.READ_ONLY
        disk.core.fail("the disk failed")
        assert await add(disk, 1, 0, bytes(20_000), RECOVERY_ADD) is Status.STORAGE_FAILED
