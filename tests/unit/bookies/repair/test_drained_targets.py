"""A bookie that begins to drain while the auditor copies to it is not named any more: it may be removed at any time."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.bookies.bookie_cluster import PAYLOADS, eventually, run_cluster

from stratalog_bookies.repair.copier import Copier
from stratalog_bookies.repair.core.shares import Share
from stratalog_metadata.records import Bookie, Ledger, bookie_key


async def test_a_copy_that_is_complete_after_its_bookie_began_to_drain_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_cluster(tmp_path) as cluster:
        for number in range(3):
            await cluster.start_bookie(f"b{number}", audit_delay_s=0.0 if number else 0.3)
        ledger = await cluster.sealed()
        complete, drained = Copier.complete, False

        async def complete_and_drain(self: Copier, ledger: Ledger, share: Share, bookie: str) -> int:
            nonlocal drained
            copied = await complete(self, ledger, share, bookie)
            if bookie == "b3" and not drained:
                await cluster.drain("b3")
                drained = True
            return copied

        monkeypatch.setattr(Copier, "complete", complete_and_drain)
        await cluster.start_bookie("b3", audit_delay_s=0.0)
        await cluster.stop_bookie("b2")
        counters = cluster.bookies["b0"][0]._counters
        await eventually(lambda: counters.audit_moves > 0 or (drained and "is postponed" in caplog.text))
        record = cluster.metadata.view.find(Bookie, bookie_key("b3"))
        assert record is not None
        assert record.draining
        assert "b3" not in cluster.named(ledger.ledger_id)
        assert counters.audit_moves == 0
        await cluster.start_bookie("b4", audit_delay_s=0.0)
        await eventually(lambda: "b4" in cluster.named(ledger.ledger_id))
        assert await cluster.read_back(ledger.ledger_id) == PAYLOADS
