"""The auditor in real bookies, over a real embedded quorum and real sockets: lost copies are restored,
and ledgers stay readable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from unit.bookies.bookie_cluster import ENTRIES, PAYLOADS, Cluster, batch, eventually, run_cluster

from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import Status
from stratalog_bookies.repair.auditor import AUDIT_WORK
from stratalog_core.errors import Invalid, NoSuchLedger
from stratalog_core.ports import Request
from stratalog_metadata.records import (
    Bookie,
    Lease,
    LedgerState,
    bookie_key,
    lease_key,
    ledger_key,
    session_key,
)
from stratalog_metadata.state.commands import Command, Delete, Put


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with run_cluster(tmp_path) as made:
        yield made


async def test_a_bookie_lost_for_good_is_made_up_for(cluster: Cluster) -> None:
    for number in range(4):
        await cluster.start_bookie(f"b{number}")
    ledgers = [(await cluster.sealed()).ledger_id for _ in range(6)]
    await cluster.stop_bookie("b1")
    await eventually(lambda: all("b1" not in cluster.named(ledger_id) for ledger_id in ledgers))
    for ledger_id in ledgers:
        assert await cluster.missing(cluster.stored(ledger_id)) == 0
    await cluster.stop_bookie("b0")
    for ledger_id in ledgers:
        assert await cluster.read_back(ledger_id) == PAYLOADS
        assert cluster.stored(ledger_id).state is LedgerState.CLOSED


async def test_striped_fragments_keep_their_number_of_copies(cluster: Cluster) -> None:
    for number in range(6):
        await cluster.start_bookie(f"b{number}")
    ledger = await cluster.sealed(ensemble_size=5, write_quorum=2)
    victim = ledger.fragments[0].bookies[3]
    await cluster.stop_bookie(victim)
    await eventually(lambda: victim not in cluster.named(ledger.ledger_id))
    moved = cluster.stored(ledger.ledger_id)
    assert await cluster.missing(moved) == 0
    await cluster.stop_bookie(moved.fragments[0].bookies[4])
    assert await cluster.read_back(ledger.ledger_id) == PAYLOADS


async def test_ledgers_of_several_fragments_and_empty_ones_move(cluster: Cluster) -> None:
    for number in range(5):
        await cluster.start_bookie(f"b{number}", audit_delay_s=1.5)
    writer = await cluster.write(entries=ENTRIES // 2)
    await eventually(lambda: writer.unconfirmed_bytes == 0)
    first = writer.ledger.fragments[0].bookies[0]
    await cluster.stop_bookie(first)
    for number in range(ENTRIES // 2, ENTRIES):
        writer.append(batch(number))
    ledger = await writer.seal(ENTRIES)
    empty = await cluster.sealed(entries=0)
    second = ledger.fragments[-1].bookies[1]
    assert len(ledger.fragments) == 2
    await cluster.stop_bookie(second)
    both = (ledger.ledger_id, empty.ledger_id)
    await eventually(lambda: not any({first, second} & cluster.named(ledger_id) for ledger_id in both))
    assert await cluster.missing(cluster.stored(ledger.ledger_id)) == 0
    assert await cluster.read_back(ledger.ledger_id) == PAYLOADS


async def test_a_bookie_that_returns_in_time_gets_what_it_missed_and_nothing_moves(cluster: Cluster) -> None:
    for number in range(3):
        await cluster.start_bookie(f"b{number}", audit_delay_s=60.0)
    writer = await cluster.write(entries=ENTRIES // 2)
    await eventually(lambda: writer.unconfirmed_bytes == 0)
    await cluster.stop_bookie("b2")
    for number in range(ENTRIES // 2, ENTRIES):
        writer.append(batch(number))
    ledger = await writer.seal(ENTRIES)
    await cluster.start_bookie("b2", audit_delay_s=60.0)
    async with asyncio.timeout(60):
        while await cluster.gaps(ledger):  # noqa: ASYNC110 - only the bookies' answers tell
            await asyncio.sleep(0.02)
    assert cluster.stored(ledger.ledger_id) == ledger
    await cluster.stop_bookie("b0")
    await cluster.stop_bookie("b1")
    assert await cluster.read_back(ledger.ledger_id) == PAYLOADS


async def test_a_draining_bookie_gets_nothing_new_and_is_emptied(cluster: Cluster) -> None:
    for number in range(4):
        await cluster.start_bookie(f"b{number}", audit_delay_s=60.0)
    ledgers = [(await cluster.sealed()).ledger_id for _ in range(4)]
    await cluster.drain("b3")
    ledgers.append((await cluster.sealed()).ledger_id)
    assert "b3" not in cluster.named(ledgers[-1])
    await eventually(lambda: all("b3" not in cluster.named(ledger_id) for ledger_id in ledgers))
    for ledger_id in ledgers:
        assert await cluster.missing(cluster.stored(ledger_id)) == 0
    await cluster.stop_bookie("b3")
    await cluster.start_bookie("b3")
    record = cluster.metadata.view.find(Bookie, bookie_key("b3"))
    assert record is not None
    assert record.draining, "draining outlives restarts"
    assert record.session_id


async def test_an_open_ledger_is_its_writers(cluster: Cluster) -> None:
    for number in range(3):
        await cluster.start_bookie(f"b{number}")
    writer = await cluster.write()
    await eventually(lambda: writer.unconfirmed_bytes == 0)
    opened = writer.ledger
    closed = await cluster.sealed()
    await cluster.stop_bookie("b2")
    await cluster.start_bookie("b3")
    await eventually(lambda: "b2" not in cluster.named(closed.ledger_id))
    assert cluster.stored(opened.ledger_id) == opened
    await writer.seal(ENTRIES)
    await eventually(lambda: "b2" not in cluster.named(opened.ledger_id))
    assert await cluster.missing(cluster.stored(opened.ledger_id)) == 0


async def test_copies_in_one_rack_are_spread_when_another_rack_comes(cluster: Cluster) -> None:
    for number in range(3):
        await cluster.start_bookie(f"b{number}", rack=f"r{number // 2}")
    ledger = await cluster.sealed()
    await cluster.start_bookie("b9", rack="r9")
    await eventually(lambda: "b9" in cluster.named(ledger.ledger_id))
    moved = cluster.stored(ledger.ledger_id)
    assert {"b2", "b9"} < cluster.named(ledger.ledger_id)
    assert await cluster.missing(moved) == 0


async def test_copies_on_one_host_are_spread_as_other_hosts_come(cluster: Cluster) -> None:
    """All three copies are on one host; each new host takes one, and moved copies are complete."""
    for number in range(3):
        await cluster.start_bookie(f"b{number}", host="h0")
    ledger_id = (await cluster.sealed()).ledger_id
    for number in (8, 9):
        await cluster.start_bookie(f"b{number}", host=f"h{number}")
    await eventually(lambda: {"b8", "b9"} < cluster.named(ledger_id))
    assert await cluster.missing(cluster.stored(ledger_id)) == 0
    assert await cluster.read_back(ledger_id) == PAYLOADS
    fresh = await cluster.sealed()
    assert {"b8", "b9"} < set(fresh.fragments[0].bookies), "the next ledger spans the hosts from the start"


async def test_another_auditor_takes_over_from_one_that_is_gone(cluster: Cluster) -> None:
    for number in range(4):
        await cluster.start_bookie(f"b{number}")
    ledger = await cluster.sealed()
    await eventually(lambda: cluster.metadata.view.get(lease_key(AUDIT_WORK)) is not None)
    lease = cluster.metadata.view.find(Lease, lease_key(AUDIT_WORK))
    assert lease is not None
    assert cluster.metadata.view.get(session_key(lease.session_id)) is not None
    auditors = [each.bookie_id for each in cluster.metadata.view.all(Bookie) if each.session_id == lease.session_id]
    await cluster.stop_bookie(auditors[0])
    await eventually(lambda: auditors[0] not in cluster.named(ledger.ledger_id))
    assert await cluster.missing(cluster.stored(ledger.ledger_id)) == 0


async def test_copies_are_made_no_faster_than_allowed(cluster: Cluster) -> None:
    """40 entries of about 570 bytes at 20 KiB per second take at least a second, however fast the machine is."""
    cluster.audit_bytes_per_s = 20 * 1024
    for number in range(4):
        await cluster.start_bookie(f"b{number}", audit_delay_s=0.1)
    ledger = await cluster.sealed()
    (spare,) = {f"b{number}" for number in range(4)} - set(ledger.fragments[0].bookies)
    await cluster.stop_bookie(ledger.fragments[0].bookies[0])
    counters = cluster.bookies[spare][0]._disks[0].counters
    began = time.monotonic()
    await eventually(lambda: spare in cluster.named(ledger.ledger_id))
    assert time.monotonic() - began > 0.9 * sum(map(len, PAYLOADS)) / cluster.audit_bytes_per_s
    assert counters.add_entries == ENTRIES


async def test_a_ledger_deleted_meanwhile_stays_deleted(cluster: Cluster) -> None:
    cluster.audit_bytes_per_s = 20 * 1024
    for number in range(4):
        await cluster.start_bookie(f"b{number}", audit_delay_s=0.1)
    ledger = await cluster.sealed()
    victim = ledger.fragments[0].bookies[0]
    (spare,) = {f"b{number}" for number in range(4)} - set(ledger.fragments[0].bookies)
    await cluster.stop_bookie(victim)
    await eventually(lambda: cluster.bookies[spare][0]._disks[0].counters.add_entries > 0)
    await cluster.metadata.propose(Command(updates=(Delete(key=ledger_key(ledger.ledger_id)),)))
    await cluster.client.delete([ledger.ledger_id])
    other = await cluster.sealed()
    await eventually(lambda: victim not in cluster.named(other.ledger_id))
    assert cluster.metadata.view.get(ledger_key(ledger.ledger_id)) is None
    with pytest.raises(NoSuchLedger):
        await cluster.client.recover([ledger.ledger_id])


async def test_a_target_that_refuses_is_never_named(cluster: Cluster) -> None:
    """A bookie that claims to hold nothing and stores nothing: the copy is not moved there, but to another one."""
    for number in range(3):
        await cluster.start_bookie(f"b{number}")
    ledger = await cluster.sealed()
    refused: list[str] = []

    def refuse(request: Request) -> None:
        if request.method == messages.READ_HEADERS:
            ((_, _, last),), _, _ = messages.decode_read_headers(request.body)
            request.reply(*messages.encode_read_answer([(Status.NO_SUCH_LEDGER, last, 0)], [], []))
        elif request.method == messages.ADD:
            refused.append("add")
            request.reply(messages.encode_statuses([Status.READ_ONLY] * len(messages.decode_add(request.body))))
        else:
            request.fail(Invalid("not served"))

    listener = await (await cluster.transport.bind("127.0.0.1:0")).listen(refuse)
    session_id = await cluster.metadata.open_session("full", 30_000, lambda: None)
    full = Bookie(bookie_id="full", address=listener.address, cookie="full", session_id=session_id)
    await cluster.metadata.propose(Command(updates=(Put(record=full),)))
    await cluster.stop_bookie("b2")
    await eventually(lambda: len(refused) >= 1)
    assert cluster.stored(ledger.ledger_id) == ledger
    await cluster.start_bookie("b9")
    await eventually(lambda: "b9" in cluster.named(ledger.ledger_id))
    moved = cluster.stored(ledger.ledger_id)
    assert cluster.named(ledger.ledger_id) == {"b0", "b1", "b9"}
    assert await cluster.missing(moved) == 0
    await listener.close()


async def test_zero_delay_means_no_audit(cluster: Cluster) -> None:
    for number in range(3):
        await cluster.start_bookie(f"b{number}", audit_delay_s=0.0)
    await cluster.sealed()
    assert cluster.metadata.view.get(lease_key(AUDIT_WORK)) is None
