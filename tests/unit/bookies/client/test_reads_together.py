"""Batched reads of many ledgers, and what the bound on an answer leaves out."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from unit.bookies.client.test_ledger_client import SETTINGS, SPEC, Cluster, batch, cluster, open_writer, settled

from stratalog_bookies.client import bookie_requests
from stratalog_bookies.protocol import messages
from stratalog_core.errors import NoSuchEntry
from stratalog_metadata.records import Ledger

__all__ = ["cluster"]
LEDGERS = 24


async def _sealed(cluster: Cluster, value_bytes: int) -> list[Ledger]:
    """Ledgers of three entries each, with distinguishable values."""
    client = cluster.client()
    ledgers = []
    for number in range(LEDGERS):
        writer, recorder = await open_writer(client, SPEC)
        for entry in range(3):
            writer.append(batch(100 + entry, bytes([number, entry]) * (value_bytes // 2)))
        await recorder.confirmed(2)
        ledgers.append(await writer.seal(103))
        await settled(writer)  # What a bookie lacks is asked of another one, which counts as a request.
    return ledgers


async def test_one_request_for_each_bookie(cluster: Cluster) -> None:
    ledgers = await _sealed(cluster, 100)
    counting = cluster.counting_transport()
    client = cluster.client_over(counting, replace(SETTINGS, hedge_delay_ms=60_000))
    found = await asyncio.gather(*(client.read_together(ledger, 0, 2) for ledger in ledgers))
    assert counting.count(messages.READ) <= len(cluster.bookies)
    for number, entries in enumerate(found):
        assert [bytes(entry.payload) for entry in entries] == [
            batch(100 + entry, bytes([number, entry]) * 50) for entry in range(3)
        ]


async def test_what_does_not_fit_is_asked_again_of_the_same_bookie(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers = await _sealed(cluster, 1000)
    monkeypatch.setattr(bookie_requests, "_READ_TOGETHER_BYTES_MAX", 3 * 3 * 1100)
    counting = cluster.counting_transport()
    # No hedges: on a slow machine they would be counted.
    client = cluster.client_over(counting, replace(SETTINGS, hedge_delay_ms=60_000))
    found = await asyncio.gather(*(client.read_together(ledger, 0, 2) for ledger in ledgers))
    # Each answer has about three ledgers. Asking the next bookie for the rest would leave none in the end.
    assert LEDGERS // 4 <= counting.count(messages.READ) <= LEDGERS // 2
    for number, entries in enumerate(found):
        assert entries[0].entry_id == 0
        for entry in entries:
            assert bytes(entry.payload) == batch(100 + entry.entry_id, bytes([number, entry.entry_id]) * 500)


async def test_an_entry_beyond_the_bound_comes_alone(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers = await _sealed(cluster, 1000)
    monkeypatch.setattr(bookie_requests, "_READ_TOGETHER_BYTES_MAX", 1)
    client = cluster.client()
    found = await asyncio.gather(*(client.read_together(ledger, 0, 2) for ledger in ledgers[:5]))
    assert [[entry.entry_id for entry in entries] for entries in found] == [[0]] * 5


async def test_what_does_not_exist_is_told(cluster: Cluster) -> None:
    ledgers = await _sealed(cluster, 100)
    with pytest.raises(NoSuchEntry):
        await cluster.client().read_together(ledgers[0], 7, 7)


async def test_many_recoveries_share_a_small_bound(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    client = cluster.client(replace(SETTINGS, tick_ms=60_000))  # no bookie learns what is confirmed
    opened = [await open_writer(client, SPEC) for _ in range(LEDGERS)]
    for number, (writer, recorder) in enumerate(opened):
        writer.append(batch(100, bytes([number]) * 1000))
        await recorder.confirmed(0)
    monkeypatch.setattr(bookie_requests, "_RECOVERY_READ_BYTES_MAX", 1)
    # A retry would come too late for this test: what is left out must be asked again at once.
    hasty = cluster.client(replace(SETTINGS, recovery_retry_ms=60_000))
    closed = await hasty.recover([writer.ledger.ledger_id for writer, _ in opened])
    for number, ledger in enumerate(closed):
        assert ledger.last_entry == 0
        (entry,) = await hasty.read(ledger, 0, 0, 1 << 20)
        assert bytes(entry.payload) == batch(100, bytes([number]) * 1000)
