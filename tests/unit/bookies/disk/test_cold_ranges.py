"""A read of many ledgers whose index rows are not in memory, as takeovers make it after a bookie's restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from unit.bookies.disk.test_transient_errors import COOKIE, Rationed, add, running, settings_of

from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.core import lookup
from stratalog_bookies.disk.core.cookie import disk_key
from stratalog_bookies.disk.core.lookup import Budget
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.protocol.messages import ENTRIES_MAX, Range, Status
from stratalog_core.system import SystemFiles, ThreadBackground

LEDGERS = 50
FILES = 3


async def test_ranges_are_located_again_once_for_each_file_and_not_for_each_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SystemFiles(tmp_path)
    recovery.create(LogFiles(files, disk_key(COOKIE, 0), 64 * 1024))
    background = ThreadBackground(8, "disk")
    async with running(Rationed(files), settings_of(tmp_path), background) as disk:
        contents = disk.core.contents
        for entry in range(FILES):
            generation = disk.core.log.generation
            for ledger_id in range(LEDGERS):
                assert await add(disk, ledger_id, entry, bytes(100)) is Status.OK
            await disk.leave_file(generation)
            await disk.commit.durable(disk.core.log.sequence)
            disk.files.advance()
            async with asyncio.timeout(60):
                while not contents.files[generation].closed:  # noqa: ASYNC110 - nothing signals it
                    await asyncio.sleep(0.005)
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
    background.close()
