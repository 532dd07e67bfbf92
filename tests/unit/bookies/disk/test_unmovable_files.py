"""A corrupt log file with an entry that cannot be repaired yet: it is not walked through again before the entry is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unit.bookies.disk.one_disk import close_file, damage, new_files, opened
from unit.bookies.disk.test_transient_errors import add, entries, settings_of

from stratalog_bookies.disk.compaction import Compaction
from stratalog_bookies.protocol.messages import Status

PAYLOADS = {entry: bytes([65 + entry]) * 10_000 for entry in range(6)}
BROKEN = 2


async def test_a_corrupt_file_waits_for_the_repair_of_its_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(new_files(tmp_path), tmp_path) as disk:
        generation = disk.core.log.generation
        for entry, payload in PAYLOADS.items():
            assert await add(disk, 1, entry, payload) is Status.OK
        await close_file(disk, generation)
        file = disk.core.contents.files[generation]
        row = file.runs[1].find(BROKEN)
        assert row is not None
        damage(tmp_path, generation, row)
        disk.corruption.files[generation] = "no intact frame"
        compaction = Compaction(disk, settings_of(tmp_path))

        has_newer, calls = disk.reads.has_newer, 0

        async def counted(*arguments: Any) -> bool:
            nonlocal calls
            calls += 1
            return await has_newer(*arguments)

        monkeypatch.setattr(disk.reads, "has_newer", counted)
        await compaction.empty_corrupt_files()
        assert (calls, file.unmovable, len(disk.corruption)) == (len(PAYLOADS), True, 1)
        for _ in range(3):
            await compaction.empty_corrupt_files()
        assert calls == len(PAYLOADS)

        await disk.write_again(1, row, PAYLOADS[BROKEN], generation)
        (corrupt,) = disk.corruption.due(0.0)
        disk.corruption.remove(corrupt)
        disk.allow_compaction(generation)
        await compaction.empty_corrupt_files()
        assert disk.corruption.files == {}
        assert await entries(disk, 1) == PAYLOADS
