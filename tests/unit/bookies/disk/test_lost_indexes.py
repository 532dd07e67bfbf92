"""A lost index of a log file is rebuilt once, however many need it. Each attempt reads the whole file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.bookies.disk.one_disk import new_files, opened, until_closed
from unit.bookies.disk.test_transient_errors import add, entries, settings_of

from stratalog_bookies.disk.compaction import Compaction
from stratalog_bookies.disk.log_files import LogFiles, index_path, log_path
from stratalog_bookies.protocol.messages import Status
from stratalog_bookies.repair.scrub import Scrub
from stratalog_core.errors import Corrupt


async def test_reads_that_need_a_lost_index_at_once_rebuild_it_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(new_files(tmp_path), tmp_path, index_bytes_max=0) as disk:
        first = disk.core.log.generation
        for entry in range(8):
            for ledger_id in (1, 2):
                assert await add(disk, ledger_id, entry, bytes(5000)) is Status.OK
        await until_closed(disk, first)
        path = tmp_path / index_path(first)
        path.write_bytes(bytes(path.stat().st_size))

        replace, meeting = os.replace, threading.Barrier(2)

        def replace_together(source: Path, target: Path) -> None:
            if target == path:
                with contextlib.suppress(threading.BrokenBarrierError):
                    meeting.wait(0.5)
            replace(source, target)

        monkeypatch.setattr(os, "replace", replace_together)
        found = await asyncio.gather(*(entries(disk, ledger_id) for ledger_id in (1, 2)))
        assert [len(each) for each in found] == [8, 8]
        assert disk.corruption.files == {}


async def test_a_file_whose_index_and_header_are_corrupt_is_read_whole_once_until_the_next_scrub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_log: Callable[[LogFiles, int], bytes] = LogFiles.read_log
    read: list[int] = []

    def noted(self: LogFiles, generation: int) -> bytes:
        read.append(generation)
        return read_log(self, generation)

    async with opened(new_files(tmp_path), tmp_path, index_bytes_max=0) as disk:
        first = disk.core.log.generation
        for entry in range(16):
            assert await add(disk, 1, entry, bytes(5000)) is Status.OK
        await until_closed(disk, first)
        index, log = tmp_path / index_path(first), tmp_path / log_path(first)
        index.write_bytes(bytes(index.stat().st_size))
        sound = log.read_bytes()
        log.write_bytes(bytes(100) + sound[100:])
        monkeypatch.setattr(LogFiles, "read_log", noted)
        compaction = Compaction(disk, settings_of(tmp_path))
        for _ in range(3):
            with pytest.raises(Corrupt):
                await entries(disk, 1)
            await compaction.empty_corrupt_files()
        assert read == [first]
        assert list(disk.corruption.files) == [first]
        log.write_bytes(sound)
        await Scrub(disk, settings_of(tmp_path), b"cookie", lambda: None).scrub()
        assert len(await entries(disk, 1)) == 16
        await compaction.empty_corrupt_files()
        assert (disk.corruption.files, disk.reads.lost_indexes) == ({}, {})
        assert len(await entries(disk, 1)) == 16
