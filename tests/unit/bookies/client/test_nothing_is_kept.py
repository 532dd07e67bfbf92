"""What writers and recoveries that have ended leave in their client: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from unit.bookies.client.test_ledger_client import SETTINGS, Cluster, batch, cluster, eventually, open_writer, settled
from unit.bookies.wrapped_channel import WrappedChannel

from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import Status
from stratalog_core.errors import Unavailable
from stratalog_core.ports import Buffer, OnReply
from stratalog_core.rpc.tcp import TcpChannel, TcpTransport

_ = cluster


class FullChannel(WrappedChannel):
    """Every add is refused as by a bookie whose disk is full, which still takes fences and reads."""

    def send(self, method: int, parts: Sequence[Buffer], on_reply: OnReply, timeout_s: float) -> None:
        if method != messages.ADD:
            super().send(method, parts, on_reply, timeout_s)
            return
        count = int.from_bytes(bytes(parts[0][: messages.COUNT_BYTES]), "big")
        refusal = memoryview(messages.encode_statuses(bytes((Status.READ_ONLY,)) * count))
        asyncio.get_running_loop().call_soon(on_reply, refusal)


class FullTransport(TcpTransport):
    def channel(self, address: str) -> TcpChannel:
        return FullChannel(super().channel(address))  # type: ignore[return-value]


async def test_a_recovery_that_cannot_copy_its_entries_holds_none_of_them_afterwards(cluster: Cluster) -> None:
    old = cluster.client()
    writer, recorder = await open_writer(old)
    writer.append(batch(100))
    await recorder.confirmed(0)
    await settled(writer)
    ledger = writer.ledger
    writer.abandon()
    payload = batch(101)
    header = messages.pack_entry(ledger.ledger_id, 1, 0, (payload,))
    for name in ledger.fragments[0].bookies[:2]:
        assert set(await old._requests.add(name, [header], [payload])) == {Status.OK}

    full = FullTransport()
    cluster.stack.push_async_callback(full.close)
    settings = replace(SETTINGS, recovery_deadline_ms=1000)
    client = cluster.client_over(full, settings)
    recovering = asyncio.ensure_future(client.recover([ledger.ledger_id]))
    await eventually(lambda: recovering.done() or sum(holder.held_bytes for holder in client._busy) > 0)
    with pytest.raises(Unavailable, match="could not be recovered"):
        await recovering
    assert sum(holder.held_bytes for holder in client._busy) == 0
    await eventually(lambda: not client._busy)
    (closed,) = await cluster.client().recover([ledger.ledger_id])
    assert closed.last_entry == 1


@pytest.mark.parametrize("end", ["seal", "abandon", "fence"])
async def test_a_writer_that_has_ended_is_ticked_no_more(cluster: Cluster, end: str) -> None:
    """Although no entry has carried its last LAC to the bookies."""
    client = cluster.client()
    writer, recorder = await open_writer(client)
    writer.append(batch(100))
    await recorder.confirmed(0)
    if end == "seal":
        await writer.seal(101)
    elif end == "abandon":
        writer.abandon()
    else:
        await cluster.client().recover([writer.ledger.ledger_id])
        writer.append(batch(101))
        await recorder.failed()
    async with asyncio.timeout(10):
        await eventually(lambda: not client._busy)
