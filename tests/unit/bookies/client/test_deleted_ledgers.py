"""Recoveries of ledgers that metadata names, because it was restored from an old copy, and that bookies have deleted since."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from unit.bookies.bookie_cluster import ENTRIES, Cluster, eventually, run_cluster

from stratalog_core.errors import NoSuchLedger


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with run_cluster(tmp_path) as made:
        for number in range(4):
            await made.start_bookie(f"b{number}", audit_delay_s=3600.0)
        yield made


async def deleted_on(cluster: Cluster, count: int) -> int:
    """Write a ledger and delete it on so many of its bookies. Returns its id."""
    writer = await cluster.write(entries=ENTRIES)
    await eventually(lambda: writer.unconfirmed_bytes == 0)
    ledger_id = writer.ledger.ledger_id
    for name in sorted(cluster.named(ledger_id))[:count]:
        await cluster.bookies[name][0]._disks[0].delete([ledger_id])
    return ledger_id


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_a_ledger_that_bookies_have_deleted_is_reported_at_once(cluster: Cluster, count: int) -> None:
    """Its recovery took the whole deadline, and said that too few bookies answer."""
    with pytest.raises(NoSuchLedger, match="restored from an older copy"):
        await cluster.client.recover([await deleted_on(cluster, count)])


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_such_a_ledger_is_closed_empty_on_demand(cluster: Cluster, count: int) -> None:
    """What others still have was deleted, too, and could not be copied anywhere if there are only three bookies."""
    (found,) = await cluster.client.recover_reading([await deleted_on(cluster, count)], may_be_deleted=True)
    assert (found.ledger.last_entry, found.ledger.end_offset) == (-1, found.ledger.base_offset)


async def test_copies_that_an_old_record_does_not_name_are_found(cluster: Cluster) -> None:
    """The writer changed its ensemble after metadata was copied, so that the record names bookies that lack entries."""
    writer = await cluster.write(entries=ENTRIES // 2)
    await eventually(lambda: writer.unconfirmed_bytes == 0)
    old = cluster.stored(writer.ledger.ledger_id)
    for name in old.fragments[-1].bookies[:2]:
        writer._core.on_bookie_failed(name)
