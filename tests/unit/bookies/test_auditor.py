"""The auditor in real bookies, over a real embedded quorum and real sockets: what is lost is made anew, and stays readable."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from uuid import UUID

import msgspec
import pytest

from stratalog_bookies import messages
from stratalog_bookies.audit.claim import AUDIT_WORK
from stratalog_bookies.audit.shares import share_of
from stratalog_bookies.client import LedgerClient, LedgerClientSettings, LedgerSpec, LedgerWriter
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.messages import Status
from stratalog_bookies.server import BookieServer
from stratalog_core.errors import Invalid, NoSuchLedger, StratalogError
from stratalog_core.ports import Request
from stratalog_core.records import Record, build_batch
from stratalog_core.rpc import TcpTransport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.api import MetadataClient
from stratalog_metadata.commands import Command, Delete, Put, Update
from stratalog_metadata.embedded import embedded_quorum
from stratalog_metadata.records import (
    CLUSTER_KEY,
    Bookie,
    Lease,
    Ledger,
    LedgerState,
    bookie_key,
    lease_key,
    ledger_key,
    session_key,
)

SETTINGS = LedgerClientSettings(
    tick_ms=20, bookie_silence_ms=200, bookie_avoid_ms=100, hedge_delay_ms=100, confirm_deadline_ms=5000
)  # fmt: skip
ENTRIES = 40


class Silent:
    """A listener that does not listen."""

    def on_first_copy(self, entry_id: int) -> None: ...
    def on_confirmed(self, lac: int) -> None: ...
    def on_failed(self, error: StratalogError) -> None: ...


@dataclass
class Cluster:
    """A quorum, bookies that audit, and one client."""

    path: Path
    metadata: MetadataClient
    transport: TcpTransport
    client: LedgerClient
    audit_bytes_per_s: int = 256 * 1024 * 1024
    bookies: dict[str, tuple[BookieServer, ThreadBackground]] = field(default_factory=dict)

    async def start_bookie(self, name: str, rack: str = "", audit_delay_s: float = 0.3, **changes: object) -> None:
        directory = self.path / name
        settings = BookieSettings(
            bookie_id=name, data_dirs=(str(directory),), rack=rack, log_file_bytes=4 * 1024 * 1024, spare_files=0,
            free_bytes_min=0, scrub_bytes_per_s=0, audit_delay_s=audit_delay_s, audit_interval_s=0.05,
            audit_bytes_per_s=self.audit_bytes_per_s,
        )  # fmt: skip
        settings = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]
        background = ThreadBackground(settings.threads, name)
        server = BookieServer(
            settings, self.metadata, self.transport, [SystemFiles(Path(each)) for each in settings.data_dirs], SystemClock(),
            Random(1), background,
        )  # fmt: skip
        await server.start()
        self.bookies[name] = (server, background)

    async def stop_bookie(self, name: str) -> None:
        server, background = self.bookies.pop(name)
        await server.close()
        background.close()

    async def write(self, ensemble_size: int = 3, write_quorum: int = 3, entries: int = ENTRIES) -> LedgerWriter:
        spec = LedgerSpec(
            topic_id=UUID(int=1), partition=0, base_offset=0, leader_epoch=1, ensemble_size=ensemble_size,
            write_quorum=write_quorum, ack_quorum=min(2, write_quorum),
        )  # fmt: skip
        writer = await self.client.create(spec, updates=_no_updates, listener=Silent())
        for number in range(entries):
            writer.append(batch(number))
        return writer

    async def sealed(self, ensemble_size: int = 3, write_quorum: int = 3, entries: int = ENTRIES) -> Ledger:
        writer = await self.write(ensemble_size, write_quorum, entries)
        return await writer.seal(entries)

    def stored(self, ledger_id: int) -> Ledger:
        found = self.metadata.view.find(Ledger, ledger_key(ledger_id))
        assert found is not None
        return found

    def named(self, ledger_id: int) -> set[str]:
        return {name for fragment in self.stored(ledger_id).fragments for name in fragment.bookies}

    async def missing(self, ledger: Ledger) -> int:
        """Copies that the bookies of the record do not have, each asked itself."""
        return sum([len(entries) for entries in (await self.gaps(ledger)).values()])

    async def gaps(self, ledger: Ledger) -> dict[tuple[int, str], list[int]]:
        lacking: dict[tuple[int, str], list[int]] = {}
        for number, fragment in enumerate(ledger.fragments):
            for position, name in enumerate(fragment.bookies):
                share = share_of(ledger, number, position)
                (answer,) = await self.client._services.requests.held(name, messages.Range(ledger.ledger_id, 0, 1000))
                held = {entry.entry_id for entry in answer.entries}
                lacking[number, name] = [entry_id for entry_id in share.within(0, 1000) if entry_id not in held]
        return {place: entries for place, entries in lacking.items() if entries}

    async def read_back(self, ledger_id: int) -> list[bytes]:
        ledger, payloads = self.stored(ledger_id), list[bytes]()
        while len(payloads) <= ledger.last_entry:
            found = await self.client.read(ledger, len(payloads), ledger.last_entry, 1 << 20)
            payloads += [bytes(entry.payload) for entry in found]
        return payloads

    async def drain(self, name: str) -> None:
        found = self.metadata.view.get(bookie_key(name))
        assert found is not None
        assert isinstance(found.record, Bookie)
        await self.metadata.propose(Command(updates=(Put(record=msgspec.structs.replace(found.record, draining=True)),)))

    async def close(self) -> None:
        await self.client.close()
        for name in list(self.bookies):
            await self.stop_bookie(name)


def _no_updates(ledger: Ledger) -> tuple[Update, ...]:
    return ()


def batch(offset: int) -> bytes:
    return bytes(build_batch([Record(offset=offset, timestamp_ms=1, key=None, value=b"value" * 100)]))


PAYLOADS = [batch(number) for number in range(ENTRIES)]


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what nobody announces."""
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it did not happen in 20 s")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        transport = TcpTransport()
        stack.push_async_callback(transport.close)
        quorum = await stack.enter_async_context(embedded_quorum(tmp_path / "metadata", transport))
        await eventually(lambda: quorum.client.view.get(CLUSTER_KEY) is not None)
        client = LedgerClient(quorum.client, transport, SystemClock(), Random(7), SETTINGS)
        made = Cluster(path=tmp_path, metadata=quorum.client, transport=transport, client=client)
        stack.push_async_callback(made.close)
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
    for _ in range(400):
        if not await cluster.missing(ledger):
            break
        await asyncio.sleep(0.02)
    assert await cluster.gaps(ledger) == {}
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
    """40 entries of about 570 bytes at 20 KiB a second take a second at least, however fast the machine is."""
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
    """A bookie that says it holds nothing and stores nothing: the copy is not moved there, and goes to another one."""
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

    listener = await cluster.transport.serve("127.0.0.1:0", refuse)
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
