"""A corrupt log file with an entry that cannot be repaired yet: it is not walked through again before the entry is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from unit.bookies.disk.test_transient_errors import COOKIE, Rationed, add, entries, running, settings_of

from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.compaction import Compaction
from stratalog_bookies.disk.core.cookie import disk_key
from stratalog_bookies.disk.log_files import LogFiles, log_path
from stratalog_bookies.protocol.messages import Status
from stratalog_core.system import SystemFiles, ThreadBackground

PAYLOADS = {entry: bytes([65 + entry]) * 10_000 for entry in range(6)}
BROKEN = 2


async def test_a_corrupt_file_waits_for_the_repair_of_its_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SystemFiles(tmp_path)
    recovery.create(LogFiles(files, disk_key(COOKIE, 0), 64 * 1024))
    background = ThreadBackground(8, "disk")
    settings = settings_of(tmp_path)
    async with running(Rationed(files), settings, background) as disk:
        generation = disk.core.log.generation
        for entry, payload in PAYLOADS.items():
            assert await add(disk, 1, entry, payload) is Status.OK
        await disk.leave_file(generation)
        await disk.commit.durable(disk.core.log.sequence)
        disk.files.advance()
        file = disk.core.contents.files[generation]
        async with asyncio.timeout(60):
            while not file.closed:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.005)
        row = file.runs[1].find(BROKEN)
        assert row is not None
        with (tmp_path / log_path(generation)).open("r+b") as log_file:
            log_file.seek(row.position)
            log_file.write(b"rot")
        disk.corruption.files[generation] = "no intact frame"
        compaction = Compaction(disk, settings)

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
    background.close()
