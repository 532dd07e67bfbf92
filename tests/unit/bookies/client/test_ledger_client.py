"""The ledger client over real bookies, a real embedded quorum and real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from uuid import UUID

import msgspec
import pytest
from support.embedded_quorum import embedded_quorum
from unit.bookies.bookie_cluster import started_bookie
from unit.bookies.wrapped_channel import WrappedChannel

from stratalog_bookies.client import LedgerClient, LedgerClientSettings, LedgerSpec, LedgerWriter
from stratalog_bookies.client.ledger_records import LedgerRecordPuts
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.node.server import BookieServer
from stratalog_bookies.protocol import messages
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import (
    Conflict,
    Invalid,
    LedgerFenced,
    NoSuchEntry,
    NoSuchLedger,
    NotEnoughBookies,
    OutcomeUnknown,
    Overloaded,
    StaleEpoch,
    StratalogError,
    Unavailable,
)
from stratalog_core.ports import Buffer, Channel, OnReply
from stratalog_core.rpc.tcp import TcpChannel, TcpTransport
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.protocol.messages import StatusAnswer
from stratalog_metadata.records import (
    CLUSTER_KEY,
    Bookie,
    Fragment,
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    Partition,
    Versioned,
    ledger_key,
    log_key,
    partition_key,
)
from stratalog_metadata.state.commands import ABSENT, Applied, Command, Delete, EpochIs, Put, Update, VersionIs
from stratalog_metadata.state.guarded_update import Superseded

TOPIC = UUID(int=1)
SPEC = LedgerSpec(
    topic_id=TOPIC, partition=0, base_offset=100, leader_epoch=3, ensemble_size=3, write_quorum=3, ack_quorum=2
)  # fmt: skip
NEVER_MS = 3_600_000
"""For what must not be waited for: a test that waits for it ends at its limit."""
SETTINGS = LedgerClientSettings(
    tick_ms=20, bookie_silence_ms=NEVER_MS, bookie_avoid_ms=100, recovery_retry_ms=50, hedge_delay_ms=100,
    confirm_deadline_ms=NEVER_MS, request_timeout_ms=60_000, read_deadline_ms=60_000, recovery_deadline_ms=60_000,
)  # fmt: skip


@dataclass
class Recorder:
    """A listener that records its calls and lets a test wait for them."""

    first_copies: list[int] = field(default_factory=list)
    lac: int = -1
    error: StratalogError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_first_copy(self, entry_id: int) -> None:
        assert self.error is None
        self.first_copies.append(entry_id)
        self.changed.set()

    def on_confirmed(self, lac: int) -> None:
        assert self.error is None
        assert lac > self.lac
        assert self.first_copies == list(range(len(self.first_copies)))
        assert len(self.first_copies) > lac
        self.lac = lac
        self.changed.set()

    def on_failed(self, error: StratalogError) -> None:
        assert self.error is None, "told once"
        self.error = error
        self.changed.set()

    async def confirmed(self, entry_id: int) -> None:
        while self.lac < entry_id and self.error is None:
            self.changed.clear()
            await self.changed.wait()
        assert self.lac >= entry_id, self.error

    async def failed(self) -> StratalogError:
        while self.error is None:
            self.changed.clear()
            await self.changed.wait()
        return self.error


class CountingTransport(TcpTransport):
    """The real transport; counts requests by method and keeps the buffers of adds."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[int, str]] = Counter()
        self.parts: list[Buffer] = []

    def channel(self, address: str) -> TcpChannel:
        return CountingChannel(self, super().channel(address))  # type: ignore[return-value]

    def count(self, method: int) -> int:
        return sum(count for (sent, _), count in self.sent.items() if sent == method)


class CountingChannel(WrappedChannel):
    def __init__(self, transport: CountingTransport, channel: Channel) -> None:
        super().__init__(channel)
        self._transport = transport

    def send(self, method: int, parts: Sequence[Buffer], on_reply: OnReply, timeout_s: float) -> None:
        self._transport.sent[method, self.address] += 1
        if method == messages.ADD:
            self._transport.parts.extend(parts)
        super().send(method, parts, on_reply, timeout_s)


@dataclass
class Cluster:
    """A quorum, bookies and clients; everything that is opened is closed at the end."""

    path: Path
    metadata: MetadataClient
    stack: AsyncExitStack
    transport: TcpTransport
    bookies: dict[str, tuple[BookieServer, ThreadBackground]] = field(default_factory=dict)

    async def start_bookie(self, name: str, rack: str = "") -> None:
        directory = self.path / name
        settings = BookieSettings(
            bookie_id=name, data_dirs=(str(directory),), rack=rack, log_file_bytes=4 * 1024 * 1024, spare_files=0,
            free_bytes_min=0, scrub_bytes_per_s=0,
        )  # fmt: skip
        self.bookies[name] = await started_bookie(settings, self.metadata, self.transport)

    async def stop_bookie(self, name: str) -> None:
        server, background = self.bookies.pop(name)
        await server.close()
        background.close()

    async def silent_bookie(self, name: str) -> str:
        """A bookie that is registered and takes requests but never answers, like one stopped by SIGSTOP.

        Returns its address.
        """
        listener = await (await self.transport.bind("127.0.0.1:0")).listen(lambda request: None)
        self.stack.push_async_callback(listener.close)
        session_id = await self.metadata.open_session(name, 30_000, lambda: None)
        record = Bookie(bookie_id=name, address=listener.address, cookie="silent", session_id=session_id)
        await self.metadata.propose(Command(updates=(Put(record=record),)))
        return listener.address

    def client(self, settings: LedgerClientSettings = SETTINGS, *, metadata: MetadataClient | None = None) -> LedgerClient:
        return self.client_over(self.transport, settings, metadata=metadata)

    def client_over(
        self,
        transport: TcpTransport,
        settings: LedgerClientSettings = SETTINGS,
        *,
        metadata: MetadataClient | None = None,
    ) -> LedgerClient:
        client = LedgerClient(metadata or self.metadata, transport, SystemClock(), Random(7), settings)
        self.stack.push_async_callback(client.close)
        return client

    def counting_transport(self) -> CountingTransport:
        transport = CountingTransport()
        self.stack.push_async_callback(transport.close)
        return transport

    async def stored(self, ledger_id: int) -> Ledger:
        (found,) = await self.metadata.read([ledger_key(ledger_id)])
        assert found is not None
        assert isinstance(found.record, Ledger)
        return found.record

    async def close(self) -> None:
        for name in list(self.bookies):
            await self.stop_bookie(name)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        transport = TcpTransport()
        stack.push_async_callback(transport.close)
        quorum = await stack.enter_async_context(embedded_quorum(tmp_path / "metadata", transport))
        made = Cluster(path=tmp_path, metadata=quorum.client, stack=stack, transport=transport)
        stack.push_async_callback(made.close)
        await eventually(lambda: quorum.client.view.get(CLUSTER_KEY) is not None)
        for number in range(3):
            await made.start_bookie(f"bookie-{number}", rack=f"rack-{number}")
        yield made


def no_updates(ledger: Ledger) -> tuple[Update, ...]:
    return ()


def batch(offset: int, value: bytes = b"value") -> bytes:
    return bytes(build_batch([Record(offset=offset, timestamp_ms=1, key=None, value=value)]))


async def open_writer(client: LedgerClient, spec: LedgerSpec = SPEC) -> tuple[LedgerWriter, Recorder]:
    recorder = Recorder()
    return await client.create(spec, updates=no_updates, listener=recorder), recorder


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for a condition that nothing signals."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.005)


async def settled(writer: LedgerWriter) -> None:
    """Wait until every copy has arrived."""
    await eventually(lambda: writer.unconfirmed_bytes == 0)


async def read_all(client: LedgerClient, ledger: Ledger) -> list[bytes]:
    payloads: list[bytes] = []
    while len(payloads) <= ledger.last_entry:
        payloads += [bytes(entry.payload) for entry in await client.read(ledger, len(payloads), ledger.last_entry, 2000)]
    return payloads


async def copies(client: LedgerClient, ledger: Ledger, bookie: str) -> list[int]:
    """Entries of a ledger that one bookie has."""
    asked = messages.Range(ledger.ledger_id, 0, max(ledger.last_entry, 100))
    (answer,) = await client._requests.read(bookie, [asked], 1 << 20)
    return [entry.entry_id for entry in answer.entries]


# -- writing


async def test_written_sealed_and_read_back(cluster: Cluster) -> None:
    client = cluster.client()
    writer, recorder = await open_writer(client)
    payloads = [batch(100 + number) for number in range(50)]
    for number, payload in enumerate(payloads):
        view = memoryview(payload)
        assert writer.append((view[:20], bytearray(view[20:])) if number % 2 else payload) == number
    assert writer.unconfirmed_bytes == sum(map(len, payloads))
    sealed = await writer.seal(150)
    assert recorder.lac == 49
    assert recorder.first_copies == list(range(50))
    assert sealed == await cluster.stored(sealed.ledger_id)
    assert sealed == writer.ledger
    assert (sealed.state, sealed.last_entry, sealed.end_offset) == (LedgerState.CLOSED, 49, 150)
    assert sealed.payload_bytes == sum(map(len, payloads))
    assert sealed.closed_at_ms > 0
    assert await read_all(client, sealed) == payloads
    heads = await client.read_headers(sealed, 3, 49)
    assert [(head.entry_id, head.payload_bytes, head.head) for head in heads] == [
        (number, len(payloads[number]), payloads[number][:61]) for number in range(3, 50)
    ]
    assert await client.read_lac(sealed) == 49
    with pytest.raises(Invalid, match="sealed"):
        writer.append(b"late")


async def test_first_copies_are_told_from_when_they_are_wanted(cluster: Cluster) -> None:
    class Confirmations(Recorder):
        def on_confirmed(self, lac: int) -> None:
            self.lac = lac
            self.changed.set()

    recorder = Confirmations()
    writer = await cluster.client().create(SPEC, updates=no_updates, listener=recorder)
    writer.tell_first_copies(False)
    for number in range(3):
        writer.append(batch(100 + number))
    await recorder.confirmed(2)
    assert recorder.first_copies == []
    writer.tell_first_copies(True)
    for number in range(3, 6):
        writer.append(batch(100 + number))
    await recorder.confirmed(5)
    assert recorder.first_copies == [3, 4, 5]


async def test_an_empty_ledger_is_sealed(cluster: Cluster) -> None:
    writer, _ = await open_writer(cluster.client())
    sealed = await writer.seal(100)
    assert (sealed.last_entry, sealed.payload_bytes, sealed.end_offset) == (-1, 0, 100)


async def test_striped_over_more_bookies_than_hold_each_entry(cluster: Cluster) -> None:
    for number in (3, 4):
        await cluster.start_bookie(f"bookie-{number}")
    client = cluster.client()
    spec = LedgerSpec(
        topic_id=TOPIC, partition=0, base_offset=0, leader_epoch=1, ensemble_size=5, write_quorum=3, ack_quorum=2
    )  # fmt: skip
    writer, _ = await open_writer(client, spec)
    payloads = [batch(number) for number in range(40)]
    for payload in payloads:
        writer.append(payload)
    sealed = await writer.seal(40)
    await settled(writer)
    assert await read_all(client, sealed) == payloads
    bookie = sealed.fragments[0].bookies[0]
    assert await copies(client, sealed, bookie) == [number for number in range(40) if number % 5 in (0, 3, 4)]
    assert [head.entry_id for head in await client.read_headers(sealed, 0, 39)] == list(range(40))


async def test_one_add_for_each_bookie_and_turn_and_no_copies(cluster: Cluster) -> None:
    transport = cluster.counting_transport()
    client = cluster.client_over(transport)
    writers = [(await open_writer(client)) for _ in range(20)]
    payload = batch(100)
    for writer, _ in writers:
        writer.append(payload)
        writer.append(payload)
    for _, recorder in writers:
        await recorder.confirmed(1)
    assert transport.count(messages.ADD) == 3
    assert sum(part is payload for part in transport.parts) == 3 * 40


async def test_large_turns_are_split(cluster: Cluster) -> None:
    transport = cluster.counting_transport()
    client = cluster.client_over(transport, replace(SETTINGS, request_bytes_max=64 * 1024, request_entries_max=100))
    writer, recorder = await open_writer(client)
    for _ in range(12):
        writer.append(bytes(20_000))
    for _ in range(150):
        writer.append(b"small")
    await recorder.confirmed(161)
    assert transport.count(messages.ADD) == 3 * 5


async def test_held_bytes_are_bounded(cluster: Cluster) -> None:
    client = cluster.client(replace(SETTINGS, held_bytes_max=1024 * 1024))
    writer, recorder = await open_writer(client)
    other, _ = await open_writer(client)
    for _ in range(10):
        writer.append(bytes(100_000))
    with pytest.raises(Overloaded, match="held_bytes_max"):
        other.append(bytes(100_000))
    await recorder.confirmed(9)
    await settled(writer)
    other.append(bytes(100_000))


async def test_an_entry_beyond_the_limit_is_refused(cluster: Cluster) -> None:
    writer, _ = await open_writer(cluster.client())
    with pytest.raises(Invalid, match="smaller batches"):
        writer.append(bytes(33 * 1024 * 1024))


async def test_an_idle_ledgers_lac_reaches_the_bookies(cluster: Cluster) -> None:
    client, reader = cluster.client(), cluster.client()
    writer, recorder = await open_writer(client)
    writer.append(batch(100))
    await recorder.confirmed(0)
    async with asyncio.timeout(60):
        while await reader.read_lac(writer.ledger) != 0:  # noqa: ASYNC110 - only its answers tell
            await asyncio.sleep(0.01)
    writer.append(batch(101))
    await recorder.confirmed(1)


# -- failing bookies


async def test_a_bookie_that_goes_away_is_replaced_without_a_stop(cluster: Cluster) -> None:
    await cluster.start_bookie("spare")
    client = cluster.client()
    writer, recorder = await open_writer(client)
    for number in range(20):
        writer.append(batch(100 + number))
    await recorder.confirmed(19)
    await settled(writer)  # Otherwise the victim may lack some, and is replaced from there.
    victim = next(name for name in writer.ledger.fragments[0].bookies if name in cluster.bookies)
    replacement = ({"spare", "bookie-0", "bookie-1", "bookie-2"} - set(writer.ledger.fragments[0].bookies)).pop()
    await cluster.stop_bookie(victim)
    for number in range(20, 40):
        writer.append(batch(100 + number))
    await recorder.confirmed(39)
    await settled(writer)  # A broken connection tells at once: silence would be noticed after an hour.
    sealed = await writer.seal(140)
    assert sealed.fragments[-1].first_entry == 20
    assert set(sealed.fragments[-1].bookies) == set(sealed.fragments[0].bookies) - {victim} | {replacement}
    assert await copies(client, sealed, replacement) == list(range(20, 40))
    assert await read_all(client, sealed) == [batch(100 + number) for number in range(40)]


async def test_a_silent_bookie_is_replaced_and_holds_nobody_up(cluster: Cluster) -> None:
    await cluster.stop_bookie("bookie-2")
    await cluster.silent_bookie("bookie-2s")
    await cluster.start_bookie("spare")
    client = cluster.client(replace(SETTINGS, bookie_silence_ms=2_000))
    writer, recorder = await open_writer(client)
    while "bookie-2s" not in writer.ledger.fragments[0].bookies:
        writer, recorder = await open_writer(client)
    writer.append(batch(100))
    await recorder.confirmed(0)
    await settled(writer)
    assert "bookie-2s" not in writer.ledger.fragments[-1].bookies
    assert len(writer.ledger.fragments) == 1, "the silent bookie's fragment begins at 0 and is replaced whole"
    assert await copies(client, writer.ledger, writer.ledger.fragments[0].bookies[0]) == [0]


async def test_without_a_spare_it_goes_on_and_heals_when_the_bookie_returns(cluster: Cluster) -> None:
    client = cluster.client()
    writer, recorder = await open_writer(client)
    writer.append(batch(100))
    await recorder.confirmed(0)
    await cluster.stop_bookie("bookie-1")
    writer.append(batch(101))
    await recorder.confirmed(1)
    late, late_recorder = await open_writer(client)
    assert "bookie-1" in late.ledger.fragments[0].bookies, "a ledger may be born with one bookie down"
    late.append(batch(100))
    await late_recorder.confirmed(0)
    await cluster.start_bookie("bookie-1")
    number = 2
    while number - 1 not in await copies(client, writer.ledger, "bookie-1"):
        writer.append(batch(100 + number))
        await recorder.confirmed(number)
        await asyncio.sleep(0.02)
        number += 1
    assert writer.ledger.fragments == (await cluster.stored(writer.ledger.ledger_id)).fragments
    assert len(writer.ledger.fragments) == 1
    assert await read_all(client, await writer.seal(100 + number)) == [batch(100 + each) for each in range(number)]


async def test_no_ack_quorum_ends_in_an_unknown_outcome(cluster: Cluster) -> None:
    client = cluster.client(
        LedgerClientSettings(tick_ms=20, bookie_silence_ms=100, confirm_deadline_ms=300, bookie_avoid_ms=50)
    )  # fmt: skip
    opened: list[tuple[LedgerWriter, Recorder]] = []
    while not opened:
        with contextlib.suppress(OutcomeUnknown):  # The deadline bounds creation, too, and is short for a slow machine.
            opened.append(await open_writer(client))
    writer, recorder = opened[0]
    await cluster.stop_bookie("bookie-0")
    await cluster.stop_bookie("bookie-1")
    writer.append(batch(100))
    assert isinstance(await recorder.failed(), OutcomeUnknown)
    assert recorder.lac == -1
    with pytest.raises(OutcomeUnknown):
        writer.append(batch(101))
    with pytest.raises(OutcomeUnknown):
        await writer.seal(101)


async def test_too_few_bookies_are_named(cluster: Cluster) -> None:
    await cluster.stop_bookie("bookie-0")
    await cluster.stop_bookie("bookie-1")
    with pytest.raises(NotEnoughBookies):
        await open_writer(cluster.client())


async def test_reads_pass_over_dead_bookies(cluster: Cluster) -> None:
    client = cluster.client()
    writer, _ = await open_writer(client)
    for number in range(10):
        writer.append(batch(100 + number))
    sealed = await writer.seal(110)
    await settled(writer)
    await cluster.stop_bookie("bookie-0")
    await cluster.stop_bookie("bookie-2")
    for _ in range(5):
        assert len(await client.read(sealed, 0, 9, 1 << 20)) == 10
    with pytest.raises(Unavailable):
        await client.read(sealed, 10, 10, 1 << 20)
    await cluster.stop_bookie("bookie-1")
    with pytest.raises(Unavailable):
        await client.read(sealed, 0, 9, 1 << 20)


async def test_absence_is_explicit(cluster: Cluster) -> None:
    client = cluster.client()
    writer, _ = await open_writer(client)
    writer.append(batch(100))
    sealed = await writer.seal(101)
    await settled(writer)
    with pytest.raises(NoSuchEntry):
        await client.read(sealed, 1, 1, 100)
    with pytest.raises(NoSuchEntry):
        await client.read_headers(sealed, 0, 1)


async def test_a_silent_bookie_costs_reads_one_hedge(cluster: Cluster) -> None:
    transport = cluster.counting_transport()
    settings = replace(
        SETTINGS,
        hedge_delay_ms=1_000, bookie_avoid_ms=NEVER_MS, bookie_avoid_ms_max=NEVER_MS, request_timeout_ms=NEVER_MS,
    )  # fmt: skip
    client = cluster.client_over(transport, settings)
    writer, _ = await open_writer(client)
    writer.append(batch(100))
    sealed = await writer.seal(101)
    await settled(writer)
    await cluster.stop_bookie("bookie-1")
    silent = await cluster.silent_bookie("bookie-1")
    asked = transport.sent
    while not asked[messages.READ, silent]:
        assert len(await client.read(sealed, 0, 0, 100)) == 1
    asked.clear()
    for _ in range(20):
        assert len(await client.read(sealed, 0, 0, 100)) == 1
    to_silent = asked[messages.READ, silent]
    hedges = transport.count(messages.READ) - to_silent - 20
    assert to_silent <= hedges, "a bookie that is known to be silent is asked only if another is slow, too"


async def test_a_read_that_nobody_answers_ends_at_its_deadline(cluster: Cluster) -> None:
    client = cluster.client(replace(SETTINGS, hedge_delay_ms=20, read_deadline_ms=200))
    writer, _ = await open_writer(client)
    writer.append(batch(100))
    sealed = await writer.seal(101)
    for name in list(cluster.bookies):
        await cluster.stop_bookie(name)
        await cluster.silent_bookie(name)
    with pytest.raises(Unavailable):
        await client.read(sealed, 0, 0, 100)


async def test_a_long_ledger_is_measured_in_pieces(cluster: Cluster) -> None:
    old, new = cluster.client(), cluster.client()
    writer, recorder = await open_writer(old)
    for number in range(200):
        writer.append(batch(100 + number) if number < 120 else b"SLCK" + bytes(60))
    await recorder.confirmed(199)
    (closed,) = await new.recover([writer.ledger.ledger_id])
    assert (closed.last_entry, closed.end_offset) == (199, 220)
    assert closed.payload_bytes == 120 * len(batch(100)) + 80 * 64


async def test_a_sealed_ledger_holds_nothing_for_a_dead_bookie(cluster: Cluster) -> None:
    client = cluster.client(replace(SETTINGS, bookie_silence_ms=200))
    await cluster.stop_bookie("bookie-1")
    await cluster.silent_bookie("bookie-1")
    writer, _ = await open_writer(client)
    writer.append(batch(100))
    assert (await writer.seal(101)).last_entry == 0
    await settled(writer)


async def test_a_listener_that_fails_costs_nobody_else_anything(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorder):
        def on_confirmed(self, lac: int) -> None:
            raise ZeroDivisionError

    client = cluster.client()
    broken = Broken()
    bad = await client.create(SPEC, updates=no_updates, listener=broken)
    good, recorder = await open_writer(client)
    bad.append(batch(100))
    good.append(batch(100))
    assert isinstance(await broken.failed(), OutcomeUnknown)
    good.append(batch(101))
    await recorder.confirmed(1)
    await settled(good)
    assert good.ledger.fragments[0].first_entry == 0
    assert "ZeroDivisionError" in caplog.text


# -- taking over


async def test_a_takeover_fences_the_old_writer(cluster: Cluster) -> None:
    old, new = cluster.client(), cluster.client()
    writer, recorder = await open_writer(old)
    for number in range(30):
        writer.append(batch(100 + number))
    await recorder.confirmed(9)
    (closed,) = await new.recover([writer.ledger.ledger_id])
    acknowledged = recorder.lac
    if writer.error is None:
        writer.append(batch(200))
    assert isinstance(await recorder.failed(), LedgerFenced)
    assert recorder.lac == acknowledged or recorder.lac <= closed.last_entry
    assert closed.last_entry >= recorder.lac
    assert closed.state is LedgerState.CLOSED
    assert closed == await cluster.stored(closed.ledger_id)
    payloads = await read_all(new, closed)
    assert payloads == [batch(100 + number) for number in range(len(payloads))]
    assert closed.payload_bytes == sum(map(len, payloads))
    assert closed.end_offset == 100 + len(payloads)
    with pytest.raises(LedgerFenced):
        await writer.seal(130)
    with pytest.raises(LedgerFenced):
        writer.append(b"late")


async def test_a_recovery_read_fences_by_itself(cluster: Cluster) -> None:
    """bookkeeper#2614: a bookie that no fence reached takes no more adds once recovery has read from it."""
    client = cluster.client()
    writer, recorder = await open_writer(client)
    asked = messages.Range(writer.ledger.ledger_id, 0, 10)
    answer = await client._requests.recovery_read("bookie-1", asked)
    assert (answer.decided_to, answer.entries) == (10, [])
    writer.append(batch(100))
    assert isinstance(await recorder.failed(), LedgerFenced)


async def test_an_idle_old_writer_cannot_seal_after_a_takeover(cluster: Cluster) -> None:
    old, new = cluster.client(), cluster.client()
    writer, recorder = await open_writer(old)
    writer.append(batch(100))
    await recorder.confirmed(0)
    await settled(writer)
    (closed,) = await new.recover([writer.ledger.ledger_id])
    assert closed.last_entry == 0
    with pytest.raises(LedgerFenced):
        await writer.seal(101)
    assert isinstance(recorder.error, LedgerFenced)


async def test_recovery_with_a_dead_bookie(cluster: Cluster) -> None:
    old, new = cluster.client(), cluster.client()
    writer, recorder = await open_writer(old)
    for number in range(30):
        writer.append(batch(100 + number))
    await recorder.confirmed(29)
    writer.abandon()
    await cluster.stop_bookie("bookie-1")
    (closed,) = await new.recover([writer.ledger.ledger_id])
    assert closed.last_entry == 29
    assert closed.end_offset == 130


async def test_recovery_with_a_silent_bookie_does_not_wait_for_it(cluster: Cluster) -> None:
    await cluster.stop_bookie("bookie-2")
    await cluster.silent_bookie("bookie-2s")
    patient = replace(SETTINGS, request_timeout_ms=NEVER_MS, recovery_deadline_ms=NEVER_MS)
    old, new = cluster.client(), cluster.client(patient)
    writer, recorder = await open_writer(old)
    writer.append(batch(100))
    await recorder.confirmed(0)
    writer.abandon()
    (closed,) = await new.recover([writer.ledger.ledger_id])
    assert closed.last_entry == 0


async def test_recovery_gives_up_at_the_deadline_and_can_be_repeated(cluster: Cluster) -> None:
    settings = LedgerClientSettings(tick_ms=20, recovery_deadline_ms=1_500, recovery_retry_ms=50)
    old, new = cluster.client(), cluster.client(settings)
    writer, recorder = await open_writer(old)
    writer.append(batch(100))
    await recorder.confirmed(0)
    await settled(writer)
    writer.abandon()
    await cluster.stop_bookie("bookie-0")
    await cluster.stop_bookie("bookie-1")
    async with asyncio.timeout(60):
        # On a slow machine the deadline passes before the record says so.
        while (await cluster.stored(writer.ledger.ledger_id)).state is not LedgerState.IN_RECOVERY:
            with pytest.raises(Unavailable, match="could not be recovered"):
                await new.recover([writer.ledger.ledger_id])
    await cluster.start_bookie("bookie-0")
    closed = list[Ledger]()
    async with asyncio.timeout(60):
        while not closed:
            with contextlib.suppress(Unavailable):  # The deadline is short for a slow machine.
                closed = await new.recover([writer.ledger.ledger_id])
    assert [ledger.last_entry for ledger in closed] == [0]


async def test_two_recoveries_at_once_agree(cluster: Cluster) -> None:
    old, new, newer = cluster.client(), cluster.client(), cluster.client()
    writer, recorder = await open_writer(old)
    for number in range(20):
        writer.append(batch(100 + number))
    await recorder.confirmed(0)
    first, second = await asyncio.gather(new.recover([writer.ledger.ledger_id]), newer.recover([writer.ledger.ledger_id]))
    assert first == second
    assert first[0].last_entry >= recorder.lac


async def test_a_recovered_ledger_of_checkpoints_alone_ends_at_its_base_offset(cluster: Cluster) -> None:
    old, new = cluster.client(), cluster.client()
    writer, recorder = await open_writer(old)
    writer.append(b"SLCK" + bytes(100))
    writer.append(b"SLCK" + bytes(100))
    await recorder.confirmed(1)
    empty, _ = await open_writer(old)
    closed = await new.recover([writer.ledger.ledger_id, empty.ledger.ledger_id])
    assert [(ledger.last_entry, ledger.end_offset, ledger.payload_bytes) for ledger in closed] == [(1, 100, 208), (-1, 100, 0)]


async def test_many_ledgers_are_recovered_in_few_requests(cluster: Cluster) -> None:
    old = cluster.client()
    opened = await asyncio.gather(*(open_writer(old) for _ in range(100)))
    for writer, _ in opened:
        writer.append(batch(100))
        writer.append(batch(101))
    for _, recorder in opened:
        await recorder.confirmed(1)
    transport = cluster.counting_transport()
    # Without repeated and hedged requests, which a slow machine would make.
    new = cluster.client_over(transport, replace(SETTINGS, recovery_retry_ms=60_000, hedge_delay_ms=60_000))
    closed = await new.recover([writer.ledger.ledger_id for writer, _ in opened])
    assert [ledger.ledger_id for ledger in closed] == [writer.ledger.ledger_id for writer, _ in opened]
    assert {(ledger.last_entry, ledger.end_offset) for ledger in closed} == {(1, 102)}
    assert transport.count(messages.FENCE) == 3
    assert sum(transport.sent.values()) < 60


async def test_closed_ledgers_pass_through_and_unknown_ones_are_named(cluster: Cluster) -> None:
    client = cluster.client()
    writer, _ = await open_writer(client)
    sealed = await writer.seal(100)
    assert await client.recover([sealed.ledger_id]) == [sealed]
    assert await client.recover([]) == []
    with pytest.raises(NoSuchLedger):
        await client.recover([sealed.ledger_id, 10**9])


# -- metadata


async def make_partition(cluster: Cluster, epoch: int) -> EpochIs:
    partition = Partition(topic_id=TOPIC, index=0, owner=1, leader_epoch=epoch)
    await cluster.metadata.propose(Command(updates=(Put(record=partition),)))
    return EpochIs(key=partition_key(TOPIC, 0), owner=1, leader_epoch=epoch)


async def test_a_ledger_is_opened_with_the_callers_updates_or_not_at_all(cluster: Cluster) -> None:
    client = cluster.client()
    absent = VersionIs(key=log_key(TOPIC, 0), version=ABSENT)

    def updates(ledger: Ledger) -> tuple[Update, ...]:
        reference = LedgerRef(ledger_id=ledger.ledger_id, base_offset=100, leader_epoch=3)
        return (Put(record=Log(topic_id=TOPIC, index=0, ledgers=(reference,))),)

    writer = await client.create(SPEC, requirements=(absent,), updates=updates, listener=Recorder())
    log = cluster.metadata.view.find(Log, log_key(TOPIC, 0))
    assert log is not None
    assert [reference.ledger_id for reference in log.ledgers] == [writer.ledger.ledger_id]
    with pytest.raises(Conflict):
        await client.create(SPEC, requirements=(absent,), updates=updates, listener=Recorder())
    assert [ledger.ledger_id for ledger in cluster.metadata.view.all(Ledger)] == [writer.ledger.ledger_id]


async def test_a_stale_epoch_stops_opening_sealing_and_recovering(cluster: Cluster) -> None:
    client = cluster.client()
    epoch = await make_partition(cluster, 3)
    recorder = Recorder()
    writer = await client.create(SPEC, requirements=(epoch,), updates=no_updates, listener=recorder)
    await make_partition(cluster, 4)
    with pytest.raises(StaleEpoch):
        await client.create(SPEC, requirements=(epoch,), updates=no_updates, listener=Recorder())
    with pytest.raises(StaleEpoch):
        await client.recover([writer.ledger.ledger_id], requirements=(epoch,))
    with pytest.raises(StaleEpoch):
        await writer.seal(100)
    assert isinstance(recorder.error, StaleEpoch)
    assert (await cluster.stored(writer.ledger.ledger_id)).state is LedgerState.OPEN


class UnsureMetadata:
    """The real client, but commands that touch ledgers raise ``OutcomeUnknown``, carried out or not as the test says."""

    def __init__(self, client: MetadataClient, fates: list[bool]) -> None:
        self._client = client
        self._fates = fates

    @property
    def view(self) -> MetadataView:
        return self._client.view

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        is_ledger = any(isinstance(update, Put) and isinstance(update.record, Ledger) for update in command.updates)
        if not is_ledger or not self._fates:
            return await self._client.propose(command, timeout_s)
        if self._fates.pop(0):
            await self._client.propose(command, timeout_s)
        raise OutcomeUnknown("lost the answer")

    async def refresh(self, timeout_s: float = 10.0) -> int:
        return await self._client.refresh(timeout_s)

    async def read(self, keys: Sequence[str], timeout_s: float = 10.0) -> list[Versioned | None]:
        return await self._client.read(keys, timeout_s)

    async def scan(self, prefix: str, timeout_s: float = 10.0) -> list[Versioned]:
        return await self._client.scan(prefix, timeout_s)

    async def quorum_status(self, timeout_s: float = 10.0) -> StatusAnswer:
        raise NotImplementedError

    async def open_session(
        self, holder: str, lease_ms: int, on_expired: object, grace_ms: int = 0, load: object = None
    ) -> int:  # fmt: skip
        raise NotImplementedError

    async def close_session(self, session_id: int) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("fates", [[True], [False], [False, False, True], [True, True]])
async def test_an_unknown_outcome_is_looked_up_and_never_guessed(cluster: Cluster, fates: list[bool]) -> None:
    """Creation, an ensemble change and a seal, each with a lost answer."""
    await cluster.start_bookie("spare")
    remaining: list[bool] = list(fates)
    client = cluster.client(metadata=UnsureMetadata(cluster.metadata, remaining))
    writer, recorder = await open_writer(client)
    assert writer.ledger == await cluster.stored(writer.ledger.ledger_id)
    remaining.extend(fates)
    await cluster.stop_bookie(next(name for name in writer.ledger.fragments[0].bookies if name != "spare"))
    writer.append(batch(100))
    await recorder.confirmed(0)
    await settled(writer)
    remaining.extend(fates)
    sealed = await writer.seal(101)
    assert recorder.error is None
    assert sealed == await cluster.stored(sealed.ledger_id)
    assert len(list(cluster.metadata.view.all(Ledger))) == 1


@pytest.mark.parametrize("fates", [[True], [False], [True, True, False]])
async def test_recovery_looks_up_unknown_outcomes(cluster: Cluster, fates: list[bool]) -> None:
    old = cluster.client()
    writer, recorder = await open_writer(old)
    writer.append(batch(100))
    await recorder.confirmed(0)
    new = cluster.client(metadata=UnsureMetadata(cluster.metadata, list(fates)))
    (closed,) = await new.recover([writer.ledger.ledger_id])
    assert closed == await cluster.stored(closed.ledger_id)
    assert closed.last_entry == 0


async def test_a_superseded_record_is_told_from_a_failed_requirement(cluster: Cluster) -> None:
    ledger = Ledger(
        ledger_id=5000, topic_id=TOPIC, partition=0, base_offset=0, leader_epoch=0, write_quorum=1, ack_quorum=1,
        fragments=(Fragment(first_entry=0, bookies=("bookie-0",)),),
    )  # fmt: skip
    version = await LedgerRecordPuts(cluster.metadata).put(ledger, ABSENT, timeout_s=60, share=False)
    with pytest.raises(Superseded):
        await LedgerRecordPuts(cluster.metadata).put(
            msgspec.structs.replace(ledger, leader_epoch=9), ABSENT, timeout_s=60, share=False
        )
    assert await LedgerRecordPuts(cluster.metadata).put(ledger, ABSENT, timeout_s=60, share=False) == version


async def test_ledger_ids_are_never_handed_out_twice(cluster: Cluster) -> None:
    settings = LedgerClientSettings(ledger_id_block=3)
    clients = [cluster.client(settings) for _ in range(3)]
    opened = await asyncio.gather(*(open_writer(client) for client in clients for _ in range(10)))
    assert len({writer.ledger.ledger_id for writer, _ in opened}) == 30


async def test_deleted_ledgers_are_gone_and_take_no_adds(cluster: Cluster) -> None:
    client = cluster.client()
    writer, recorder = await open_writer(client)
    writer.append(batch(100))
    await recorder.confirmed(0)
    await settled(writer)
    await cluster.metadata.propose(Command(updates=(Delete(key=ledger_key(writer.ledger.ledger_id)),)))
    await client.delete([writer.ledger.ledger_id])
    with pytest.raises(NoSuchEntry):
        await client.read(writer.ledger, 0, 0, 100)
    writer.append(batch(101))
    assert isinstance(await recorder.failed(), LedgerFenced)
