"""Fences, LACs and deletions of more ledgers than a log file has room for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from unit.bookies.disk.test_transient_errors import COOKIE, Rationed, running, settings_of

from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.core.cookie import disk_key
from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.protocol.messages import Status
from stratalog_core.system import SystemFiles, ThreadBackground

LEDGERS = range(10_000)


@asynccontextmanager
async def opened(files: SystemFiles, path: Path) -> AsyncIterator[Disk]:
    background = ThreadBackground(8, "disk")
    async with running(Rationed(files), settings_of(path), background) as disk:
        yield disk
    background.close()


async def test_control_items_may_take_several_files_and_are_there_after_a_restart(tmp_path: Path) -> None:
    files = SystemFiles(tmp_path)
    recovery.create(LogFiles(files, disk_key(COOKIE, 0), 64 * 1024))
    async with opened(files, tmp_path) as disk:
        assert all(tail.fenced for tail in await disk.fence(LEDGERS))
        assert set(await disk.write_lacs([(ledger_id, 7) for ledger_id in LEDGERS])) == {Status.FENCED}
    async with opened(files, tmp_path) as disk:
        assert all(tail.fenced for tail in await disk.tails(LEDGERS))
        await disk.delete(LEDGERS)
        assert not disk.core.contents.ledgers
    async with opened(files, tmp_path) as disk:
        assert not disk.core.contents.ledgers
