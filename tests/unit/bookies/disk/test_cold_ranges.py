"""A read of many ledgers whose index rows are not in memory, as takeovers make it after a bookie's restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unit.bookies.disk.one_disk import close_file, new_files, opened
from unit.bookies.disk.test_transient_errors import add

from stratalog_bookies.disk.core import lookup
from stratalog_bookies.disk.core.lookup import Budget
from stratalog_bookies.protocol.messages import ENTRIES_MAX, Range, Status

LEDGERS = 50
FILES = 3


async def test_ranges_are_located_again_once_for_each_file_and_not_for_each_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(new_files(tmp_path), tmp_path) as disk:
        contents = disk.core.contents
        for entry in range(FILES):
            generation = disk.core.log.generation
            for ledger_id in range(LEDGERS):
                assert await add(disk, ledger_id, entry, bytes(100)) is Status.OK
            await close_file(disk, generation)
            for run in contents.files[generation].runs.values():
                contents.cache.drop(run)

        locate_range, calls = lookup._locate_range, 0

        def counted(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return locate_range(*arguments)

        monkeypatch.setattr(lookup, "_locate_range", counted)
        ranges = [Range(ledger_id, 0, 100) for ledger_id in range(LEDGERS)]
        found = await disk.reads.read(ranges, Budget(1 << 20, ENTRIES_MAX), None)
        assert [len(each.payloads) for each in found] == [FILES] * LEDGERS
        assert calls <= (FILES + 1) * LEDGERS
