"""A lost index of a log file that several reads need at once is rebuilt once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path

import pytest
from unit.bookies.disk.one_disk import new_files, opened, until_closed
from unit.bookies.disk.test_transient_errors import add, entries

from stratalog_bookies.disk.log_files import index_path
from stratalog_bookies.protocol.messages import Status


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
