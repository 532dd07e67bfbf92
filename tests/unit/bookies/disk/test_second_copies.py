"""An interrupted compaction leaves two copies of an entry. The older one is kept, or moved, if the newer one is corrupt."""

from __future__ import annotations

from pathlib import Path

from unit.bookies.disk.one_disk import close_file, damage, new_files, opened
from unit.bookies.disk.test_transient_errors import add, entries, settings_of

from stratalog_bookies.disk.compaction import Compaction
from stratalog_bookies.disk.core.lookup import Budget
from stratalog_bookies.protocol.messages import Range, Status

PAYLOADS = {entry: bytes([65 + entry]) * 10_000 for entry in range(4)}


async def test_a_good_copy_is_not_freed_for_the_sake_of_a_corrupt_one(tmp_path: Path) -> None:
    async with opened(new_files(tmp_path), tmp_path) as disk:
        older = disk.core.log.generation
        for entry, payload in PAYLOADS.items():
            assert await add(disk, 1, entry, payload) is Status.OK
        await close_file(disk, older)
        run = disk.core.contents.files[older].runs[1]
        row = run.find(2)
        assert row is not None
        disk.core.move(1, row, PAYLOADS[2], older)
        newer = disk.core.log.generation
        await close_file(disk, newer)
        copy = disk.core.contents.files[newer].runs[1].find(2)
        assert copy is not None
        damage(tmp_path, newer, copy)
        (found,) = await disk.reads.read([Range(1, 0, 10)], Budget(1 << 20, 100), None)
        assert len(found.payloads) == len(PAYLOADS) - 1, "the newer copy is used"

        disk.corruption.files[older] = "planted"
        await Compaction(disk, settings_of(tmp_path)).empty_corrupt_files()
        assert disk.corruption.files == {}
        assert await entries(disk, 1) == PAYLOADS
