"""Fences, LACs and deletions of more ledgers than a log file has room for."""

from __future__ import annotations

from pathlib import Path

from unit.bookies.disk.one_disk import new_files, opened

from stratalog_bookies.protocol.messages import Status

LEDGERS = range(10_000)


async def test_control_items_may_take_several_files_and_are_there_after_a_restart(tmp_path: Path) -> None:
    files = new_files(tmp_path)
    async with opened(files, tmp_path) as disk:
        assert all(tail.fenced for tail in await disk.fence(LEDGERS))
        assert set(await disk.write_lacs([(ledger_id, 7) for ledger_id in LEDGERS])) == {Status.FENCED}
    async with opened(files, tmp_path) as disk:
        assert all(tail.fenced for tail in await disk.tails(LEDGERS))
        await disk.delete(LEDGERS)
        assert not disk.core.contents.ledgers
    async with opened(files, tmp_path) as disk:
        assert not disk.core.contents.ledgers
