"""The checks of a writer's invariants before its record changes: a defect ends the writer and is not committed."""

from __future__ import annotations

import pytest
from unit.bookies.client.test_ledger_client import Cluster, batch, cluster, open_writer

from stratalog_core.errors import OutcomeUnknown
from stratalog_metadata.records import Ledger, LedgerState, ledger_key

__all__ = ["cluster"]


def stored(cluster: Cluster, ledger_id: int) -> Ledger:
    found = cluster.metadata.view.find(Ledger, ledger_key(ledger_id))
    assert found is not None
    return found


async def test_an_impossible_state_is_not_committed_by_an_ensemble_change(cluster: Cluster) -> None:
    await cluster.start_bookie("spare")
    writer, recorder = await open_writer(cluster.client())
    writer.append(batch(100))
    await recorder.confirmed(0)
    writer._core.held_bytes += 1
    await cluster.stop_bookie(next(name for name in writer.ledger.fragments[0].bookies if name in cluster.bookies))
    writer.append(batch(101))
    error = await recorder.failed()
    assert isinstance(error, OutcomeUnknown)
    assert "impossible state" in error.message
    assert len(stored(cluster, writer.ledger.ledger_id).fragments) == 1


async def test_an_impossible_state_is_not_sealed(cluster: Cluster) -> None:
    writer, recorder = await open_writer(cluster.client())
    writer.append(batch(100))
    await recorder.confirmed(0)
    writer._core.held_bytes += 1
    with pytest.raises(OutcomeUnknown, match="impossible state"):
        await writer.seal(101)
    assert isinstance(recorder.error, OutcomeUnknown), "the listener is told, too"
    assert stored(cluster, writer.ledger.ledger_id).state is LedgerState.OPEN
