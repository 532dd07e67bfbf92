"""Recoveries interrupted at every step and repeated by another client; writers that lose several bookies, or too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from uuid import UUID

import pytest
from unit.bookies.bookie_cluster import SETTINGS, Cluster, batch, eventually, run_cluster
from unit.bookies.wrapped_channel import WrappedChannel

from stratalog_bookies.client import LedgerClient, LedgerWriter
from stratalog_bookies.client.ledger_ids import LedgerIds
from stratalog_bookies.client.ledger_records import LedgerRecordPuts
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import Status
from stratalog_core.errors import NotEnoughBookies, OutcomeUnknown, StratalogError
from stratalog_core.ports import Bound, Buffer, Channel, OnReply
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.protocol.broker_loads import BrokerLoad
from stratalog_metadata.protocol.messages import StatusAnswer
from stratalog_metadata.records import Fragment, Ledger, LedgerState, Versioned
from stratalog_metadata.state.commands import ABSENT, Applied, Command, Put

CONFIRMED = 10
TAIL = 3


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with run_cluster(tmp_path) as made:
        for number in range(3):
            await made.start_bookie(f"b{number}", audit_delay_s=0.0)
        yield made


class Cut:
    """Counts the steps of a client. At the given one the client is cut off: nothing is sent or received any more. The step
    itself is lost before it is sent, or carried out and its answer lost.
    """

    def __init__(self, at: int, *, carried_out: bool) -> None:
        self.at = at
        self.carried_out = carried_out
        self.steps = 0
        self.reached = asyncio.Event()

    def leaves(self) -> bool:
        """Count a step; returns whether it is carried out."""
        if self.reached.is_set():
            return False
        self.steps += 1
        if self.steps == self.at:
            self.reached.set()
            return self.carried_out
        return True


class CutChannel(WrappedChannel):
    """A channel to a bookie, until the cut."""

    def __init__(self, channel: Channel, cut: Cut) -> None:
        super().__init__(channel)
        self._cut = cut

    def send(self, method: int, parts: Sequence[Buffer], on_reply: OnReply, timeout_s: float) -> None:
        def hand_over(answer: memoryview | StratalogError) -> None:
            if not self._cut.reached.is_set():
                on_reply(answer)

        if self._cut.leaves():
            super().send(method, parts, hand_over, timeout_s)


class CutTransport:
    def __init__(self, transport: TcpTransport, cut: Cut) -> None:
        self._transport = transport
        self._cut = cut

    def channel(self, address: str) -> Channel:
        return CutChannel(self._transport.channel(address), self._cut)

    async def bind(self, address: str) -> Bound:
        raise NotImplementedError

    async def close(self) -> None: ...


class CutMetadata:
    """The real client, until the cut; only commands are steps."""

    def __init__(self, client: MetadataClient, cut: Cut) -> None:
        self._client = client
        self._cut = cut

    @property
    def view(self) -> MetadataView:
        return self._client.view

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        applied = await self._client.propose(command, timeout_s) if self._cut.leaves() else None
        if applied is None or self._cut.reached.is_set():
            await asyncio.Event().wait()
        assert applied is not None
        return applied

    async def refresh(self, timeout_s: float = 10.0) -> int:
        return await self._client.refresh(timeout_s)

    async def read(self, keys: Sequence[str], timeout_s: float = 10.0) -> list[Versioned | None]:
        return await self._client.read(keys, timeout_s)

    async def scan(self, prefix: str, timeout_s: float = 10.0) -> list[Versioned]:
        raise NotImplementedError

    async def quorum_status(self, timeout_s: float = 10.0) -> StatusAnswer:
        raise NotImplementedError

    async def open_session(
        self,
        holder: str,
        lease_ms: int,
        on_expired: Callable[[], None],
        grace_ms: int = 0,
        load: Callable[[], BrokerLoad | None] | None = None,
    ) -> int:
        raise NotImplementedError

    async def close_session(self, session_id: int) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


async def _left_behind(cluster: Cluster) -> Ledger:
    """A ledger whose writer is gone: ten entries are confirmed; two bookies have the next ones, another bookie the last."""
    writer = await cluster.write(entries=CONFIRMED)
    await eventually(lambda: writer.lac == CONFIRMED - 1)
    await eventually(lambda: writer.unconfirmed_bytes == 0)
    ledger = writer.ledger
    for name, entry_ids in ((ledger.fragments[0].bookies[0], (10, 11)), (ledger.fragments[0].bookies[1], (12,))):
        headers = [messages.pack_entry(ledger.ledger_id, entry_id, 9, (batch(entry_id),)) for entry_id in entry_ids]
        payloads = [batch(entry_id) for entry_id in entry_ids]
        assert set(await cluster.client._requests.add(name, headers, payloads)) == {Status.OK}
    writer.abandon()
    return ledger


async def _copies(cluster: Cluster, ledger: Ledger) -> list[int]:
    """How many of the live bookies have each entry."""
    counts = [0] * (ledger.last_entry + 1)
    for name in cluster.bookies:
        asked = messages.Range(ledger.ledger_id, 0, ledger.last_entry)
        (answer,) = await cluster.client._requests.held(name, asked)
        for entry in answer.entries:
            counts[entry.entry_id] += 1
    return counts


async def _interrupted(cluster: Cluster, ledger: Ledger, cut: Cut) -> None:
    """Recover with a client that is cut off."""
    transport = CutTransport(cluster.transport, cut)
    client = LedgerClient(CutMetadata(cluster.metadata, cut), transport, SystemClock(), Random(3), SETTINGS)
    recovering = asyncio.create_task(client.recover([ledger.ledger_id]))
    ending = asyncio.create_task(cut.reached.wait())
    await asyncio.wait((recovering, ending), return_when=asyncio.FIRST_COMPLETED)
    recovering.cancel()
    ending.cancel()
    await asyncio.wait((recovering, ending))
    await client.close()


@pytest.mark.parametrize("carried_out", [False, True], ids=["request lost", "answer lost"])
@pytest.mark.parametrize("bookie_lost", [False, True], ids=["all bookies", "one replaced"])
async def test_a_recovery_that_is_cut_off_anywhere_is_repeated_by_another(
    cluster: Cluster, carried_out: bool, bookie_lost: bool
) -> None:
    step, ended_alone, fragments = 1, False, set[int]()
    while not ended_alone:
        ledger = await _left_behind(cluster)
        if bookie_lost:
            await cluster.start_bookie(f"spare-{step}", audit_delay_s=0.0)
            await cluster.stop_bookie(ledger.fragments[0].bookies[2])
        cut = Cut(step, carried_out=carried_out)
        await _interrupted(cluster, ledger, cut)
        ended_alone = not cut.reached.is_set()
        before = cluster.stored(ledger.ledger_id)
        (closed,) = await cluster.client.recover([ledger.ledger_id])
        assert closed.state is LedgerState.CLOSED
        assert before in (ledger, closed) or before.state is LedgerState.IN_RECOVERY
        assert closed.last_entry >= CONFIRMED - 1, "what was confirmed stays"
        if before.state is LedgerState.CLOSED:
            assert closed == before, "a ledger is closed once"
        found = await cluster.read_back(ledger.ledger_id)
        assert found == [batch(entry_id) for entry_id in range(closed.last_entry + 1)]
        assert closed.end_offset == closed.last_entry + 1
        assert min(await _copies(cluster, closed)) >= closed.ack_quorum
        fragments.add(len(closed.fragments))
        step += 1
    assert step > 8, "there are that many steps at least"
    assert max(fragments) == (2 if bookie_lost else 1)


async def test_several_bookies_lost_at_once_are_replaced_at_once(cluster: Cluster) -> None:
    writer = await cluster.write(entries=CONFIRMED)
    await eventually(lambda: writer.unconfirmed_bytes == 0)
    for number in (3, 4):
        await cluster.start_bookie(f"b{number}", audit_delay_s=0.0)
    await asyncio.gather(cluster.stop_bookie("b0"), cluster.stop_bookie("b1"))
    for number in range(CONFIRMED, 2 * CONFIRMED):
        writer.append(batch(number))
    # One replacement would be enough to confirm and seal, so wait for the second.
    await eventually(lambda: set(writer.ledger.fragments[-1].bookies) == {"b2", "b3", "b4"})
    ledger = await writer.seal(2 * CONFIRMED)
    assert await cluster.read_back(ledger.ledger_id) == [batch(number) for number in range(2 * CONFIRMED)]


async def test_with_too_few_bookies_left_writing_waits_and_goes_on_when_they_return(cluster: Cluster) -> None:
    writer = await cluster.write(entries=CONFIRMED)
    await eventually(lambda: writer.unconfirmed_bytes == 0)
    for name in ("b0", "b1"):
        await cluster.stop_bookie(name)
    for number in range(CONFIRMED, 2 * CONFIRMED):
        writer.append(batch(number))
    with pytest.raises(NotEnoughBookies, match="start more bookies"):
        await cluster.write(entries=0)
    assert await _stands_still(writer)
    await cluster.start_bookie("b1", audit_delay_s=0.0)
    await eventually(lambda: writer.lac == 2 * CONFIRMED - 1)
    assert writer.error is None
    ledger = await writer.seal(2 * CONFIRMED)
    assert await cluster.read_back(ledger.ledger_id) == [batch(number) for number in range(2 * CONFIRMED)]


class HeldMetadata(CutMetadata):
    """The real client, but changes of a ledger's ensemble are held until the test releases them."""

    def __init__(self, client: MetadataClient) -> None:
        super().__init__(client, Cut(0, carried_out=True))
        self.held = asyncio.Event()
        self.release_held = asyncio.Event()

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        records = [update.record for update in command.updates if isinstance(update, Put)]
        if any(isinstance(record, Ledger) and len(record.fragments) > 1 for record in records):
            self.held.set()
            await self.release_held.wait()
        return await super().propose(command, timeout_s)


async def test_a_change_that_is_not_answered_keeps_no_bookie_from_being_taken_back(cluster: Cluster) -> None:
    """Two of three fail, one is being replaced, and the metadata does not answer: the return of the other is enough."""
    metadata = HeldMetadata(cluster.metadata)
    settings = replace(SETTINGS, bookie_avoid_ms_max=200)
    await cluster.client.close()
    cluster.client = LedgerClient(metadata, cluster.transport, SystemClock(), Random(7), settings)
    writer = await cluster.write(entries=CONFIRMED)
    await eventually(lambda: writer.unconfirmed_bytes == 0)
    await cluster.start_bookie("b3", audit_delay_s=0.0)
    for name in ("b0", "b1"):
        await cluster.stop_bookie(name)
    for number in range(CONFIRMED, 2 * CONFIRMED):
        writer.append(batch(number))
    await metadata.held.wait()
    assert await _stands_still(writer)
    for name in ("b0", "b1"):
        await cluster.start_bookie(name, audit_delay_s=0.0)
    await eventually(lambda: writer.lac == 2 * CONFIRMED - 1)
    assert not metadata.release_held.is_set()
    metadata.release_held.set()
    ledger = await writer.seal(2 * CONFIRMED)
    assert "b3" in ledger.fragments[-1].bookies
    assert await cluster.read_back(ledger.ledger_id) == [batch(number) for number in range(2 * CONFIRMED)]
    assert min(await _copies(cluster, ledger)) >= ledger.ack_quorum


class MuteMetadata(CutMetadata):
    """The real client over a link that loses the first answers; here their time-out passes at once."""

    def __init__(self, client: MetadataClient, swallowed: int) -> None:
        super().__init__(client, Cut(0, carried_out=True))
        self.waits_s: list[float] = []
        self._swallowed = swallowed

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        self.waits_s.append(timeout_s)
        if len(self.waits_s) <= self._swallowed:
            raise OutcomeUnknown("no answer in time")
        return await super().propose(command, timeout_s)


async def test_an_answer_that_never_comes_is_waited_for_only_a_small_part_of_the_time(cluster: Cluster) -> None:
    metadata = MuteMetadata(cluster.metadata, 2)
    ledger = Ledger(
        ledger_id=77, topic_id=UUID(int=1), partition=0, base_offset=0, leader_epoch=1, write_quorum=1, ack_quorum=1,
        fragments=(Fragment(first_entry=0, bookies=("b0",)),),
    )  # fmt: skip
    await LedgerRecordPuts(metadata).put(ledger, ABSENT, timeout_s=30.0, share=False)
    assert cluster.stored(77) == ledger
    assert len(metadata.waits_s) == 3
    assert max(metadata.waits_s) <= 3.0


async def test_ledger_ids_whose_answer_is_lost_are_asked_for_again_soon(cluster: Cluster) -> None:
    metadata = MuteMetadata(cluster.metadata, 1)
    ids = LedgerIds(metadata, 10)
    assert await ids.take() >= 0
    assert metadata.waits_s == [3.0, 10.0]
    await ids.close()


async def _stands_still(writer: LedgerWriter) -> bool:
    """One bookie has everything, and nothing is confirmed."""
    core = writer._core
    await eventually(lambda: core.first_copied == 2 * CONFIRMED - 1)
    return writer.lac == CONFIRMED - 1 and writer.error is None
