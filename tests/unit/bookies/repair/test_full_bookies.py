"""The auditor does not move the data of every ledger to a bookie that is full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from unit.bookies.bookie_cluster import ENTRIES, batch, eventually, run_cluster
from unit.bookies.disk.test_transient_errors import Rationed

from stratalog_bookies.protocol.messages import ReadEntry
from stratalog_bookies.repair.auditor import Auditor
from stratalog_bookies.repair.copier import Copier
from stratalog_core.system import SystemFiles

LEDGERS = 8


async def test_a_full_disk_is_offered_one_copy_in_each_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, audit, pace = Copier._add, Auditor.audit, Copier._pace
    calls: list[str] = []
    audits: list[int] = []

    async def noted_add(self: Copier, ledger_id: int, entries: Sequence[ReadEntry], bookie: str) -> None:
        calls.append("add")
        await add(self, ledger_id, entries, bookie)

    async def noted_pace(self: Copier, moved_bytes: int) -> None:
        calls.append("pace")
        await pace(self, moved_bytes)

    async def noted_audit(self: Auditor) -> None:
        calls.clear()
        await audit(self)
        if "add" in calls:
            assert calls[calls.index("add") - 1] == "pace", "what is refused counts for the rate"
            audits.append(calls.count("add"))

    monkeypatch.setattr(Copier, "_add", noted_add)
    monkeypatch.setattr(Copier, "_pace", noted_pace)
    monkeypatch.setattr(Auditor, "audit", noted_audit)
    async with run_cluster(tmp_path) as cluster:
        for number in range(3):
            await cluster.start_bookie(f"b{number}", audit_delay_s=0.0 if number else 3600.0)
        writers = [await cluster.write(entries=ENTRIES // 2) for _ in range(LEDGERS)]
        await eventually(lambda: all(writer.unconfirmed_bytes == 0 for writer in writers))
        await cluster.stop_bookie("b2")
        for writer in writers:
            for number in range(ENTRIES // 2, ENTRIES):
                writer.append(batch(number))
        ledgers = [await writer.seal(ENTRIES) for writer in writers]
        full = Rationed(SystemFiles(tmp_path / "b2"))
        full.free = 0
        await cluster.start_bookie("b2", audit_delay_s=0.0, disks=[full])  # type: ignore[list-item]
        await eventually(lambda: len(audits) >= 2)
        assert max(audits) == 1
        full.free = None
        async with asyncio.timeout(60):
            while any([await cluster.gaps(ledger) for ledger in ledgers]):  # noqa: ASYNC110 - only the bookies' answers tell
                await asyncio.sleep(0.02)
