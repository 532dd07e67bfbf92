"""A real bookie over real sockets and files, with a real metadata node: what it serves, survives and refuses."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest
from support.embedded_quorum import EmbeddedQuorum, embedded_quorum
from unit.bookies.hanging_disk import HangingFiles
from unit.bookies.started_bookie import StartedBookie

from stratalog_bookies.client.ledger_ids import LedgerIds
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.core.cookie import disk_key
from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.disk.log_files import LogFiles, log_path
from stratalog_bookies.metrics import Counters
from stratalog_bookies.node import boot, registration
from stratalog_bookies.node.collector import Collector
from stratalog_bookies.node.registration import Registration
from stratalog_bookies.node.server import BookieServer
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import (
    FENCE_FIRST,
    RECOVERY_ADD,
    BookieInfo,
    Control,
    EntryState,
    LedgerTail,
    Range,
    Status,
)
from stratalog_core.errors import Invalid, Overloaded, StorageFailed, StratalogError, Unavailable
from stratalog_core.ports import Buffer, Channel, File, Files, OnWritten
from stratalog_core.restarting import restarting
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import (
    CLUSTER_KEY,
    LEDGER_IDS,
    Bookie,
    Cluster,
    Counter,
    Fragment,
    KnownLedgers,
    Ledger,
    Versioned,
    bookie_key,
    counter_key,
    ledger_key,
)
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Allocate, Command, Delete, ExpireSession, Put

OK = Status.OK
TIMEOUT_S = 60.0


class Talk:
    """Requests to one bookie, as a client makes them."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    async def add(self, *entries: tuple[int, int, bytes], flags: int = 0) -> list[Status]:
        headers = [messages.pack_entry(ledger, entry, entry - 1, (payload,), flags) for ledger, entry, payload in entries]
        parts = messages.encode_add(headers, [payload for *_, payload in entries])
        return [Status(status) for status in messages.decode_statuses(await self.call(messages.ADD, parts))]

    async def read(self, *ranges: Range, flags: int = 0, max_bytes: int = 1 << 24) -> list[messages.RangeAnswer]:
        return messages.decode_read_answer(await self.call(messages.READ, messages.encode_read(ranges, max_bytes, flags)))

    async def entries(self, ledger_id: int) -> dict[int, bytes]:
        """All entries of a ledger, over as many requests as needed."""
        found: dict[int, bytes] = {}
        first = 0
        while first <= 1_000_000:
            (answer,) = await self.read(Range(ledger_id, first, 1_000_000))
            assert all(entry.state == EntryState.PRESENT for entry in answer.entries)
            found.update((entry.entry_id, bytes(entry.payload)) for entry in answer.entries)
            first = answer.decided_to + 1
        return found

    async def tails(self, method: int, *ledger_ids: int) -> tuple[LedgerTail, ...]:
        body = await self.call(method, [messages.encode(messages.LedgerIds(ledger_ids=ledger_ids))])
        return messages.decode(messages.LedgerTails, body).ledgers

    async def statuses(self, method: int, request: Control) -> list[Status]:
        return [Status(status) for status in messages.decode_statuses(await self.call(method, [messages.encode(request)]))]

    async def info(self) -> BookieInfo:
        return messages.decode(BookieInfo, await self.call(messages.INFO, []))

    async def counter(self, name: str) -> int:
        return (await self.info()).counters[name]

    async def call(self, method: int, parts: Sequence[Buffer]) -> memoryview:
        return await self.channel.call(method, parts, TIMEOUT_S)


class Place:
    """A directory with a metadata quorum, on which bookies are started and stopped."""

    def __init__(self, directory: Path, quorum: EmbeddedQuorum, transport: TcpTransport) -> None:
        self.directory = directory
        self.quorum = quorum
        self.transport = transport
        self.settings = BookieSettings(
            bookie_id="b1",
            data_dirs=(str(directory / "disk"),),
            log_file_bytes=128 * 1024,
            spare_files=1,
            free_bytes_min=0,
            collect_interval_s=0.05,
            scrub_interval_s=1000,
            scrub_bytes_per_s=1 << 30,
            compaction_bytes_per_s=1 << 30,
        )

    @asynccontextmanager
    async def bookie(self, files: Sequence[Files] | None = None, **changes: object) -> AsyncIterator[Talk]:
        settings = replace(self.settings, **changes)  # type: ignore[arg-type]
        disks = files or [SystemFiles(Path(directory)) for directory in settings.data_dirs]
        background = ThreadBackground(settings.threads, "bookie")
        server = BookieServer(settings, self.quorum.client, self.transport, disks, SystemClock(), Random(1), background)
        client = TcpTransport()
        try:
            await server.start()
            yield Talk(client.channel(server.address))
        finally:
            await client.close()
            await server.close()
            background.close()

    async def know(self, *ledger_ids: int) -> None:
        """Put records of these ledgers into metadata, so that they are not collected."""
        updates = tuple(
            Put(
                record=Ledger(
                    ledger_id=ledger_id,
                    topic_id=UUID(int=1),
                    partition=0,
                    base_offset=0,
                    leader_epoch=0,
                    write_quorum=1,
                    ack_quorum=1,
                    fragments=(Fragment(first_entry=0, bookies=("b1",)),),
                )
            )
            for ledger_id in ledger_ids
        )
        await self.quorum.client.propose(Command(updates=updates))

    async def forget(self, *ledger_ids: int) -> None:
        await self.quorum.client.propose(Command(updates=tuple(Delete(key=ledger_key(each)) for each in ledger_ids)))

    def record(self) -> Bookie:
        record = self.quorum.client.view.find(Bookie, bookie_key("b1"))
        assert record is not None
        return record


IDS_GIVEN = 1000
"""Number of ledger ids that metadata has allocated, from 0 on."""


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    transport = TcpTransport()
    async with embedded_quorum(tmp_path / "metadata", transport) as quorum:
        place = Place(tmp_path, quorum, transport)
        await place.know(*range(1, 10))
        await quorum.client.propose(Command(updates=(Allocate(counter=LEDGER_IDS, count=IDS_GIVEN),)))
        yield place
    await transport.close()


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that another task or process causes; the condition may be a coroutine function."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            held = condition()
            if await held if isinstance(held, Awaitable) else held:
                return
            await asyncio.sleep(0.01)


class FaultyFiles:
    """A disk whose syncs and file replacements can fail, whose renames can be held, and whose free space can be set."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.broken = False
        self.broken_in_kernel = False
        self.broken_checkpoints = 0
        self.free: int | None = None
        self.renames = threading.Event()
        self.renames.set()

    def rename(self, source: str, target: str) -> None:
        self.renames.wait(TIMEOUT_S)
        self._files.rename(source, target)

    def write_atomic(self, path: str, content: bytes) -> None:
        if self.broken_checkpoints:
            raise OSError(self.broken_checkpoints, "the disk is broken")
        self._files.write_atomic(path, content)

    def __getattr__(self, name: str) -> object:
        return getattr(self._files, name)

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> File:
        return FaultyFile(self._files.open(path, create=create, direct=direct), self)  # type: ignore[return-value]

    def free_bytes(self) -> int:
        return self._files.free_bytes() if self.free is None else self.free


class FaultyFile:
    def __init__(self, file: File, disk: FaultyFiles) -> None:
        self._file = file
        self._disk = disk

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def datasync(self) -> None:
        if self._disk.broken:
            raise OSError(errno.EIO, "the disk is broken")
        self._file.datasync()

    def begin_write(self, buffers: Sequence[Buffer], position: int, done: OnWritten) -> bool:
        """The kernel's writes fail, too; threads write as long as nothing is broken."""
        if self._disk.broken_in_kernel:
            asyncio.get_running_loop().call_soon(done, OSError(errno.EIO, "the disk is broken"))
        return self._disk.broken_in_kernel


async def test_a_disk_that_hangs_leaves_the_other_one_alone(place: Place, tmp_path: Path) -> None:
    data_dirs = tuple(str(tmp_path / f"disk{number}") for number in range(2))
    hanging = HangingFiles(SystemFiles(Path(data_dirs[0])))
    files: list[Any] = [hanging, SystemFiles(Path(data_dirs[1]))]
    small = {"in_flight_bytes_max": 1 << 20, "log_file_bytes": 4 << 20, "read_jobs": 1, "requests_max": 20}
    payload = os.urandom(200_000)
    async with place.bookie(files, data_dirs=data_dirs, disk_stall_ms=2000, spare_files=0, **small) as bookie:
        assert await bookie.add((1, 0, payload), (2, 0, payload)) == [OK, OK]
        hanging.works.clear()
        try:
            adds = [asyncio.ensure_future(bookie.add((2, entry, payload))) for entry in range(1, 7)]
            reads = [asyncio.ensure_future(bookie.read(Range(2, 0, 0))) for _ in range(5)]
            fence = asyncio.ensure_future(bookie.tails(messages.FENCE, 4, 3))
            for entry in range(1, 4):
                await until(lambda entry=entry: _is(bookie.add((1, entry, payload)), [OK]))  # type: ignore[misc]
            assert await adds[-1] in ([Status.OVERLOADED], [Status.READ_ONLY])
            for answers in await asyncio.gather(*reads):
                assert [answer.status for answer in answers] == [Status.STORAGE_FAILED]
            assert (await fence)[0].status == Status.STORAGE_FAILED
            await until(lambda: _is(bookie.add((2, 7, b"refused"), (1, 5, b"five")), [Status.READ_ONLY, OK]))
            await until(lambda: _answers(bookie.read(Range(2, 0, 0), Range(1, 5, 5)), [], [b"five"]))
            (refused,) = await bookie.read(Range(2, 0, 0))
            assert (refused.status, refused.decided_to) == (Status.STORAGE_FAILED, -1)
            (disk, _) = (await bookie.info()).disks
            assert disk.state == "read_only"
            assert "the disk hangs" in disk.reason
            assert not adds[0].done(), "it is not durable"
            await until(lambda: (place.record().read_only, place.record().failed_disks) == (False, (0,)))
        finally:
            hanging.works.set()
        stored = {0: payload, 7: b"seven"}
        stored |= {entry: payload for entry, add in enumerate(adds, 1) if await add == [OK]}
        assert 1 in stored
        await until(lambda: _is(bookie.add((2, 7, b"seven")), [OK]))
        await until(lambda: place.record().failed_disks == ())
        assert await bookie.entries(2) == stored
        assert (await bookie.tails(messages.LAC, 4))[0].fenced, "a fence that was answered with an error may hold"
        assert await bookie.counter("corrupt_entries") == 0


async def _answers(read: Awaitable[list[messages.RangeAnswer]], *payloads: list[bytes]) -> bool:
    return [[bytes(entry.payload) for entry in answer.entries] for answer in await read] == list(payloads)


async def _is(add: Awaitable[list[Status]], statuses: list[Status]) -> bool:
    return await add == statuses


async def test_entries_are_served(place: Place) -> None:
    async with place.bookie() as bookie:
        assert await bookie.add((1, 0, b"zero"), (2, 0, b""), (1, 1, b"one" * 1000)) == [OK, OK, OK]
        assert await bookie.add((1, 0, b"zero"), (1, 1, b"another")) == [OK, Status.CONFLICT]
        first, second, third = await bookie.read(Range(1, 0, 5), Range(2, 0, 0), Range(3, 0, 9))
        assert [(entry.entry_id, entry.lac, bytes(entry.payload)) for entry in first.entries] == [
            (0, -1, b"zero"), (1, 0, b"one" * 1000)
        ]  # fmt: skip
        assert all(messages.entry_matches(1, entry) for entry in first.entries)
        assert (first.status, first.decided_to) == (OK, 5)
        assert [bytes(entry.payload) for entry in second.entries] == [b""]
        assert (third.status, third.decided_to, third.entries) == (Status.NO_SUCH_LEDGER, 9, [])
        assert await bookie.read() == []


async def test_heads_are_served_without_payloads(place: Place) -> None:
    async with place.bookie() as bookie:
        await bookie.add(*[(1, entry, bytes([entry]) * (20 + 60 * entry)) for entry in range(5)])
        parts = messages.encode_read_headers([Range(1, 1, 9), Range(1, 0, 0)], 61, 5)
        answers = messages.decode_read_answer(await bookie.call(messages.READ_HEADERS, parts), 61)
        assert [(entry.entry_id, entry.payload_bytes, len(entry.payload)) for entry in answers[0].entries] == [
            (1, 80, 61), (2, 140, 61), (3, 200, 61), (4, 260, 61)
        ]  # fmt: skip
        assert [bytes(entry.payload) for entry in answers[1].entries] == [bytes(20)]


async def test_a_large_answer_is_cut_and_goes_on(place: Place) -> None:
    async with place.bookie(read_bytes_max=5000) as bookie:
        payloads = {entry: bytes([entry]) * 3000 for entry in range(20)}
        await bookie.add(*[(1, entry, payload) for entry, payload in payloads.items()])
        (answer,) = await bookie.read(Range(1, 0, 19))
        assert len(answer.entries) == 1
        assert await bookie.entries(1) == payloads


async def test_fences_lacs_and_tails(place: Place) -> None:
    async with place.bookie() as bookie:
        await bookie.add((1, 0, b"zero"))
        assert await bookie.statuses(messages.WRITE_LAC, messages.ExplicitLacs(lacs=((1, 0), (9, 0)))) == [
            OK,
            Status.NO_SUCH_LEDGER,
        ]
        assert await bookie.tails(messages.LAC, 1, 9) == (
            LedgerTail(ledger_id=1, last_entry=0, lac=0),
            LedgerTail(ledger_id=9, status=Status.NO_SUCH_LEDGER),
        )
        assert await bookie.tails(messages.FENCE, 1, 4) == (
            LedgerTail(ledger_id=1, last_entry=0, lac=0, fenced=True),
            LedgerTail(ledger_id=4, fenced=True),
        )
        assert await bookie.add((1, 1, b"late"), (4, 0, b"late")) == [Status.FENCED, Status.FENCED]
        assert await bookie.add((1, 1, b"recovered"), flags=RECOVERY_ADD) == [OK]
        (answer,) = await bookie.read(Range(2, 0, 3), flags=FENCE_FIRST)
        assert (answer.status, answer.decided_to, answer.entries) == (OK, 3, [])
        assert await bookie.add((2, 0, b"late")) == [Status.FENCED]
    async with place.bookie() as bookie:
        assert await bookie.add((1, 2, b"late"), (2, 0, b"late"), (4, 0, b"late")) == [Status.FENCED] * 3


async def test_everything_is_there_after_a_restart(place: Place) -> None:
    payloads = {entry: os.urandom(5000) for entry in range(200)}
    async with place.bookie() as bookie:
        for first in range(0, 200, 10):
            assert set(await bookie.add(*[(1, entry, payloads[entry]) for entry in range(first, first + 10)])) == {OK}
        cookie = place.record().cookie
    assert place.record().session_id == 0
    for index_bytes_max in (1 << 20, 0):
        async with place.bookie(index_bytes_max=index_bytes_max) as bookie:
            assert place.record().cookie == cookie
            assert place.record().session_id != 0
            assert await bookie.entries(1) == payloads
            assert await bookie.add((1, 3, payloads[3]), (1, 4, b"other"), (1, 5, payloads[5])) == [OK, Status.CONFLICT, OK]
            info = await bookie.info()
            assert info.disks[0].log_files > 5
            assert info.disks[0].live_bytes == 200 * 5000


async def test_ledgers_are_listed_in_pages(place: Place) -> None:
    async with place.bookie() as bookie:
        await bookie.add(*[(ledger, 0, b"x" * ledger) for ledger in (5, 1, 3)])
        body = await bookie.call(messages.LIST, [messages.encode(messages.ListLedgers(limit=2))])
        page = messages.decode(messages.LedgerPage, body)
        assert [(each.ledger_id, each.entries, each.payload_bytes) for each in page.ledgers] == [(1, 1, 1), (3, 1, 3)]
        assert page.more
        body = await bookie.call(messages.LIST, [messages.encode(messages.ListLedgers(after=3))])
        page = messages.decode(messages.LedgerPage, body)
        assert ([each.ledger_id for each in page.ledgers], page.more) == ([5], False)


@pytest.mark.parametrize("advertised", ["storage", "a..b:9400"])
async def test_an_address_that_no_client_could_use_is_not_registered(place: Place, advertised: str) -> None:
    with pytest.raises(Invalid, match=r"\[bookie\] advertised"):
        async with place.bookie(advertised=advertised):
            pass
    assert place.quorum.client.view.find(Bookie, bookie_key("b1")) is None


async def test_several_disks_share_the_ledgers(place: Place, tmp_path: Path) -> None:
    data_dirs = tuple(str(tmp_path / f"disk{number}") for number in range(3))
    entries = [(1 + number % 7, number // 7, bytes([number]) * 50) for number in range(70)]
    async with place.bookie(data_dirs=data_dirs) as bookie:
        assert set(await bookie.add(*entries)) == {OK}
        assert await bookie.add((1, 0, b"other"), (2, 10, b"new"), (3, 0, b"other")) == [Status.CONFLICT, OK, Status.CONFLICT]
        assert [tail.last_entry for tail in await bookie.tails(messages.FENCE, 3, 2, 8, 1)] == [9, 10, -1, 9]
        answers = await bookie.read(*[Range(ledger, 0, 9) for ledger in (7, 1, 2, 3)], max_bytes=600)
        assert [len(answer.entries) for answer in answers] == [10, 2, 0, 0]
        assert [answer.decided_to for answer in answers] == [9, 1, -1, -1]
    with pytest.raises(Invalid, match="number of disks"):
        async with place.bookie(data_dirs=data_dirs[:2]):
            pass
    async with place.bookie(data_dirs=data_dirs) as bookie:
        assert await bookie.entries(7) == {entry: payload for ledger, entry, payload in entries if ledger == 7}


async def test_an_add_counts_once_for_each_disk_however_its_entries_alternate(place: Place, tmp_path: Path) -> None:
    data_dirs = tuple(str(tmp_path / f"disk{number}") for number in range(2))
    entries = [(1 + number % 2, number // 2, bytes(4000)) for number in range(100)]
    async with place.bookie(data_dirs=data_dirs, log_file_bytes=1 << 20, in_flight_bytes_max=1 << 20) as bookie:
        assert set(await bookie.add(*entries)) == {OK}
        assert await bookie.counter("adds_overloaded") == 0


async def test_wrong_requests_are_answered_and_harm_nothing(place: Place) -> None:
    async with place.bookie() as bookie:
        for method, body in (
            (messages.ADD, b""),
            (messages.ADD, b"\0\0\0\0"),
            (messages.ADD, b"\0\0\0\x01" + bytes(33 + 200 * 1024)),
            (messages.READ, b"x"),
            (messages.READ_HEADERS, b"x" * 40),
            (messages.FENCE, b"\x93"),
            (messages.DELETE, b"\x80"),
            (0x02FF, b""),
        ):
            with pytest.raises(Invalid):
                await bookie.call(method, [body])
        too_large = bytes(140 * 1024)
        with pytest.raises(Invalid, match="send it in parts"):
            await bookie.add((1, 0, too_large))
        assert await bookie.add((1, 0, b"fine")) == [OK]


async def test_too_much_at_once_is_refused(place: Place) -> None:
    disk = HangingFiles(SystemFiles(place.directory / "disk"))
    async with place.bookie([disk], in_flight_bytes_max=1 << 20) as bookie:
        disk.works.clear()  # A disk that is faster than the requests' arrival has never too much.
        adding = [asyncio.create_task(bookie.add((1, entry, bytes(100_000)))) for entry in range(30)]
        await until(lambda: any(each.done() for each in adding))
        disk.works.set()
        statuses = await asyncio.gather(*adding)
        counts = {status: [each for (each,) in statuses].count(status) for status in (OK, Status.OVERLOADED)}
        assert sum(counts.values()) == 30
        assert counts[OK] >= 10
        assert counts[Status.OVERLOADED] >= 1
        assert len(await bookie.entries(1)) == counts[OK]
    async with place.bookie(requests_max=1) as bookie:
        outcomes = await asyncio.gather(*(bookie.info() for _ in range(5)), return_exceptions=True)
        assert any(isinstance(outcome, Overloaded) for outcome in outcomes)
        assert isinstance(outcomes[0], BookieInfo)


@pytest.mark.parametrize("fault", ["hangs", "fails"])
async def test_explicit_lacs_of_other_disks_are_written_while_one_hangs_or_fails(
    place: Place, tmp_path: Path, fault: str
) -> None:
    data_dirs = tuple(str(tmp_path / f"disk{number}") for number in range(2))
    hanging = HangingFiles(SystemFiles(Path(data_dirs[0])))
    faulty = FaultyFiles(hanging)
    files: list[Any] = [faulty if fault == "fails" else hanging, SystemFiles(Path(data_dirs[1]))]
    async with place.bookie(files, data_dirs=data_dirs, disk_stall_ms=3_600_000) as bookie:
        assert await bookie.add((1, 0, b"sound"), (2, 0, b"unsound")) == [OK, OK]
        faulty.broken = fault == "fails"
        hanging.works.clear() if fault == "hangs" else None
        try:
            writing = asyncio.ensure_future(
                bookie.statuses(messages.WRITE_LAC, messages.ExplicitLacs(lacs=((2, 0), (1, 0), (7, 0))))
            )
            await until(lambda: _has_lac(bookie, 1, 0))
        finally:
            hanging.works.set()
        assert await writing == [OK if fault == "hangs" else Status.STORAGE_FAILED, OK, Status.NO_SUCH_LEDGER]


async def _has_lac(bookie: Talk, ledger_id: int, lac: int) -> bool:
    (tail,) = await bookie.tails(messages.LAC, ledger_id)
    return tail.lac == lac


@pytest.mark.parametrize("fault", ["broken", "broken_in_kernel"])
async def test_a_failed_sync_retires_the_disk(place: Place, fault: str) -> None:
    disk = FaultyFiles(SystemFiles(place.directory / "disk"))
    async with place.bookie([disk]) as bookie:  # type: ignore[list-item]
        assert await bookie.add((1, 0, b"durable")) == [OK]
        setattr(disk, fault, True)
        assert await bookie.add((1, 1, b"lost"), (1, 1, b"conflict")) == [Status.STORAGE_FAILED, Status.CONFLICT]
        setattr(disk, fault, False)
        assert await bookie.add((1, 2, b"too late")) == [Status.STORAGE_FAILED]
        assert await bookie.entries(1) == {0: b"durable"}
        assert {tail.status for tail in await bookie.tails(messages.FENCE, 1)} == {Status.STORAGE_FAILED}
        assert {tail.status for tail in await bookie.tails(messages.LAC, 1)} == {Status.STORAGE_FAILED}
        (refused,) = await bookie.read(Range(1, 0, 1), flags=FENCE_FIRST)
        assert (refused.status, refused.decided_to, refused.entries) == (Status.STORAGE_FAILED, -1, [])
        await until(lambda: place.record().read_only)
        info = await bookie.info()
        assert (info.read_only, info.disks[0].state) == (True, "failed")
        assert "broken" in info.disks[0].reason
    async with place.bookie() as bookie:
        assert (await bookie.entries(1))[0] == b"durable"
        await until(lambda: not place.record().read_only)


async def test_adds_wait_for_the_next_file_in_order(place: Place) -> None:
    disk = FaultyFiles(SystemFiles(place.directory / "disk"))
    async with place.bookie([disk]) as bookie:  # type: ignore[list-item]
        assert await bookie.add((1, 0, bytes(100))) == [OK]
        disk.renames.clear()
        adds = [asyncio.create_task(bookie.add((1, entry, bytes(20_000)))) for entry in range(1, 11)]
        fence = asyncio.create_task(bookie.tails(messages.FENCE, 1))
        await until(lambda: any(add.done() for add in adds))
        assert not adds[-1].done()
        disk.renames.set()
        assert await asyncio.gather(*adds) == [[OK]] * 10
        assert [tail.last_entry for tail in await fence] == [10]
        assert await bookie.add((1, 11, b"late")) == [Status.FENCED]


async def test_a_checkpoint_that_fails_retires_the_disk(place: Place) -> None:
    disk = FaultyFiles(SystemFiles(place.directory / "disk"))
    async with place.bookie([disk]) as bookie:  # type: ignore[list-item]
        disk.broken_checkpoints = errno.EIO
        entry, statuses = 0, [OK]
        while statuses == [OK]:
            statuses = await bookie.add((1, entry, bytes(30_000)))
            entry += 1
        assert statuses == [Status.STORAGE_FAILED]
        disk.broken_checkpoints = 0
    async with place.bookie() as bookie:
        assert set(await bookie.entries(1)) >= set(range(entry - 1))


async def test_an_entry_whose_file_is_gone_is_unreadable_and_not_absent(place: Place) -> None:
    async with place.bookie() as bookie:
        await bookie.add((1, 0, b"zero"))
        (place.directory / "disk" / log_path(2)).unlink()
        (answer,) = await bookie.read(Range(1, 0, 3))
        assert [(entry.entry_id, entry.state) for entry in answer.entries] == [(0, EntryState.UNREADABLE)]
        assert answer.decided_to == 3
        assert await bookie.counter("unreadable_entries") == 1


class AbsentMetadata:
    """A metadata client that can be made to fail, or to belong to another cluster."""

    def __init__(self, client: MetadataClient) -> None:
        self._client = client
        self.failure: StratalogError | None = None
        self.cluster_id = ""

    async def read(self, keys: Sequence[str]) -> list[Versioned | None]:
        found = await self._client.read(keys)
        if self.cluster_id and CLUSTER_KEY in keys:
            found[list(keys).index(CLUSTER_KEY)] = Versioned(version=1, record=Cluster(cluster_id=self.cluster_id))
        return found

    async def scan(self, prefix: str) -> list[Versioned]:
        if self.failure is not None:
            raise self.failure
        return await self._client.scan(prefix)


async def test_nothing_is_collected_on_a_guess(place: Place) -> None:
    background = ThreadBackground(8, "bookie")
    files = SystemFiles(place.directory / "disk")
    store, core = boot.recover_disk(_set_up(files), "ab" * 16, 0, place.settings)
    disk = Disk(0, core, store, place.settings, background, Counters(), lambda: None)
    await disk.files.prepare()
    disk.files.start()
    metadata = AbsentMetadata(place.quorum.client)
    cluster_id = await Registration(place.settings, place.quorum.client).cluster_id()
    collector = Collector(metadata, [disk], cluster_id)  # type: ignore[arg-type]
    await disk.fence([1, 100])
    metadata.failure = Unavailable("no leader")
    assert await collector.collect() == 0
    metadata.failure = None
    metadata.cluster_id = "another"
    assert await collector.collect() == 0
    assert list(await collector.delete([1, 100])) == [Status.CONFLICT, Status.CONFLICT]
    assert set(core.contents.ledgers) == {1, 100}
    metadata.cluster_id = ""
    await disk.fence([IDS_GIVEN])
    assert await collector.collect() == 0, "metadata that never gave this id has forgotten more than that"
    assert collector.refusal == (
        "this bookie has held ledger 1000, but metadata has allocated only ids below 1000: it was restored from an old copy"
    )
    assert list(await collector.delete([100])) == [Status.CONFLICT]
    assert set(core.contents.ledgers) == {1, 100, IDS_GIVEN}
    await place.quorum.client.propose(Command(updates=(Allocate(counter=LEDGER_IDS, count=1),)))
    assert await collector.collect() == 2
    assert not collector.refusal
    assert set(core.contents.ledgers) == {1}
    await disk.close()
    background.close()


async def test_ledgers_that_restored_metadata_may_have_forgotten_are_kept(place: Place) -> None:
    """The bookie reports the greatest id that it has held or deleted; ledgers below it are kept, later ones are deleted."""
    background = ThreadBackground(8, "bookie")
    files = SystemFiles(place.directory / "disk")
    store, core = boot.recover_disk(_set_up(files), "ab" * 16, 0, place.settings)
    disk = Disk(0, core, store, place.settings, background, Counters(), lambda: None)
    await disk.files.prepare()
    disk.files.start()
    registering = Registration(place.settings, place.quorum.client)
    client = place.quorum.client
    collector = Collector(client, [disk], await registering.cluster_id(), registering.report_ledger_ids)
    await registering.register(
        "ab" * 16,
        "h:1",
        read_only=False,
        low_on_space=False,
        failed_disks=(),
        full_disks=(),
        greatest_ledger_id=collector.greatest_ledger_id,
    )
    await disk.fence([1, 100, 107, IDS_GIVEN + 10])
    await disk.delete([IDS_GIVEN + 10])

    assert await collector.collect() == 0
    assert "metadata has allocated only ids below 1000" in collector.refusal
    await until(lambda: _lost_below(client) == IDS_GIVEN + 11)
    assert await collector.collect() == 0
    assert list(await collector.delete([107])) == [Status.CONFLICT]
    assert "2 ledgers with ids below 1011 have no record and are kept" in collector.refusal
    ids = LedgerIds(client, 1)
    later = await ids.take()
    assert later == IDS_GIVEN + 11
    await disk.fence([later])
    assert await collector.collect() == 1
    assert set(core.contents.ledgers) == {1, 100, 107}
    await client.propose(Command(updates=(Put(record=KnownLedgers(ledger_ids=(100, later))),)))
    assert list(await collector.delete([1, 107])) == [Status.CONFLICT, Status.CONFLICT]
    assert await collector.collect() == 1, "the copy knew the ledger, so its record went later"
    assert set(core.contents.ledgers) == {1, 107}
    await ids.close()
    await registering.close()
    await disk.close()
    background.close()


@pytest.mark.parametrize("ledger_id", [10, 16, 0x1A])
async def test_a_deletion_is_heard_of_by_the_ledgers_own_number(place: Place, ledger_id: int) -> None:
    """Keys name ledgers in hexadecimal digits: 16 is ``10``."""
    background = ThreadBackground(8, "bookie")
    files = SystemFiles(place.directory / "disk")
    store, core = boot.recover_disk(_set_up(files), "ab" * 16, 0, place.settings)
    disk = Disk(0, core, store, place.settings, background, Counters(), lambda: None)
    await disk.files.prepare()
    disk.files.start()
    collector = Collector(place.quorum.client, [disk], "cluster")
    await disk.fence([10, 16, 0x1A])

    collector._on_changes([Change(key=ledger_key(ledger_id), before=None, after=None)])

    assert list(collector._gone) == [ledger_id]
    await disk.close()
    background.close()


def _lost_below(client: QuorumClient) -> int:
    found = client.view.find(Counter, counter_key(LEDGER_IDS))
    assert found is not None
    return found.lost_below


def _set_up(files: SystemFiles) -> SystemFiles:
    recovery.create(LogFiles(files, disk_key("ab" * 16, 0), 128 * 1024))
    return files


async def test_a_full_disk_serves_reads_and_takes_adds_again_when_there_is_space(place: Place) -> None:
    disk = FaultyFiles(SystemFiles(place.directory / "disk"))
    async with place.bookie([disk], spare_files=0, free_bytes_min=1 << 20) as bookie:  # type: ignore[list-item]
        statuses = await bookie.add((1, 0, b"fits"))
        assert statuses == [OK]
        disk.free = 1 << 20
        entry = 1
        while statuses == [OK]:
            statuses = await bookie.add((1, entry, bytes(10_000)))
            entry += 1
        assert statuses == [Status.READ_ONLY]
        await until(lambda: place.record().read_only)
        assert len(await bookie.entries(1)) == entry - 1
        assert [tail.fenced for tail in await bookie.tails(messages.FENCE, 2)] == [True]
        disk.free = 1 << 30
        await until(lambda: not place.record().read_only)
        assert await bookie.add((1, entry - 1, bytes(10_000))) == [OK]


async def test_a_bookie_reports_that_space_is_short_before_it_refuses_adds(place: Place) -> None:
    disk = FaultyFiles(SystemFiles(place.directory / "disk"))
    disk.free = 1 << 30
    async with place.bookie([disk], spare_files=0, free_bytes_min=1 << 20, free_bytes_low=1 << 29) as bookie:  # type: ignore[list-item]
        assert not place.record().low_on_space
        disk.free = (1 << 29) - 1
        await until(lambda: place.record().low_on_space)
        assert not place.record().read_only
        assert await bookie.add((1, 0, b"fits")) == [OK]
        disk.free = 1 << 29

        async def measured() -> bool:
            return (await bookie.info()).free_bytes == 1 << 29

        await until(measured)
        assert place.record().low_on_space, "its state does not flicker"
        disk.free = 1 << 30
        await until(lambda: not place.record().low_on_space)


async def test_ledgers_that_metadata_lost_are_collected_and_their_files_recycled(place: Place) -> None:
    async with place.bookie() as bookie:
        for entry in range(60):
            assert await bookie.add((1, entry, bytes(5000)), (2, entry, bytes(50))) == [OK, OK]
        assert await bookie.statuses(messages.DELETE, messages.LedgerIds(ledger_ids=(1, 2))) == [Status.CONFLICT] * 2
        assert len(await bookie.entries(1)) == 60
        await place.forget(1)

        async def collected() -> bool:
            info = await bookie.info()
            return info.counters["files_recycled"] > 0 and info.disks[0].live_bytes == 60 * 50

        await until(collected)
        assert await bookie.add((1, 60, b"late")) == [Status.NO_SUCH_LEDGER]
        assert len(await bookie.entries(2)) == 60
        assert await bookie.counter("compacted_bytes") > 0
    async with place.bookie() as bookie:
        assert await bookie.entries(2) == {entry: bytes(50) for entry in range(60)}
        assert (await bookie.read(Range(1, 0, 100)))[0].status == Status.NO_SUCH_LEDGER
        await place.forget(2)
        assert await bookie.statuses(messages.DELETE, messages.LedgerIds(ledger_ids=(2,))) == [OK]
        assert (await bookie.info()).disks[0].live_bytes == 0


@pytest.mark.parametrize("gone", [1, 0x1A])
async def test_a_ledger_whose_record_goes_is_deleted_without_waiting_for_a_pass(place: Place, gone: int) -> None:
    await place.know(gone)
    async with place.bookie(collect_interval_s=1000) as bookie:
        assert await bookie.add((gone, 0, b"one"), (2, 0, b"two")) == [OK, OK]
        await place.forget(gone)
        await until(partial(bookie.counter, "ledgers_deleted"))
        assert (await bookie.read(Range(gone, 0, 1)))[0].status == Status.NO_SUCH_LEDGER
        assert await bookie.entries(2) == {0: b"two"}
        assert await bookie.add((gone, 1, b"late")) == [Status.NO_SUCH_LEDGER]


async def test_the_scrub_finds_rot_and_compaction_keeps_the_evidence(place: Place) -> None:
    async with place.bookie(collect_interval_s=1000) as bookie:
        for entry in range(60):
            assert await bookie.add((1, entry, bytes([entry]) * 5000), (2, entry, bytes([100 + entry]) * 50)) == [OK, OK]
    path = place.directory / "disk" / log_path(2)
    content = bytearray(path.read_bytes())
    content[content.index(bytes([103]) * 50)] ^= 1
    path.write_bytes(content)
    async with place.bookie(scrub_interval_s=0.05, compaction_live_ratio=0.0) as bookie:
        await until(partial(bookie.counter, "scrub_errors"))
    await place.forget(1)
    async with place.bookie() as bookie:
        await until(partial(bookie.counter, "files_recycled"))
        (answer,) = await bookie.read(Range(2, 0, 59))
        states = {entry.entry_id: entry.state for entry in answer.entries}
        assert [entry for entry, state in states.items() if state == EntryState.UNREADABLE] == [3]
        assert len(states) == 60
    assert path.exists()


async def test_an_empty_disk_of_a_known_bookie_is_refused(place: Place) -> None:
    async with place.bookie() as bookie:
        await bookie.add((1, 0, b"zero"))
    (place.directory / "disk").rename(place.directory / "lost")
    with pytest.raises(Invalid, match="is empty, but the cluster knows bookie b1"):
        async with place.bookie():
            pass
    async with place.bookie(bookie_id="b2"):
        pass
    with pytest.raises(Invalid, match="belongs to bookie 'b2', not 'b1'"):
        async with place.bookie():
            pass
    async with place.bookie(data_dirs=(str(place.directory / "lost"),)) as bookie:
        assert await bookie.entries(1) == {0: b"zero"}
    (place.directory / "lost" / "cookie").unlink()
    with pytest.raises(StratalogError, match="holds data but no file"):
        async with place.bookie(data_dirs=(str(place.directory / "lost"),)):
            pass


async def test_a_lost_session_is_opened_again(place: Place) -> None:
    async with place.bookie(lease_ms=60_000) as bookie:
        lost = place.record().session_id
        await place.quorum.client.propose(Command(updates=(ExpireSession(session_id=lost),)))
        await until(lambda: place.record().session_id not in (0, lost))
        assert await bookie.add((1, 0, b"zero")) == [OK]


async def test_a_bookie_registers_again_whatever_it_was_refused_by(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "restarting", partial(restarting, pause_s=0.01))
    monkeypatch.setattr(registration, "_REFUSED_PAUSE_S", 0.01)
    client = place.quorum.client
    opened, refusals = client.open_session, [RuntimeError("unexpected"), StorageFailed("the leader's disk", read_only=False)]

    async def refused(*arguments: Any, **named: Any) -> int:
        if refusals:
            raise refusals.pop()
        return await opened(*arguments, **named)

    async with place.bookie(lease_ms=60_000):
        monkeypatch.setattr(client, "open_session", refused)
        lost = place.record().session_id
        await client.propose(Command(updates=(ExpireSession(session_id=lost),)))
        await until(lambda: place.record().session_id not in (0, lost))
    assert not refusals


@asynccontextmanager
async def bookie_process(directory: Path) -> AsyncIterator[Talk]:
    """Requests to a bookie in a process of its own, which is killed at the end of the block."""
    async with StartedBookie(directory) as started:
        yield Talk(started.transport.channel(started.address))


async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    acknowledged: dict[int, bytes] = {}

    async def write(bookie: Talk) -> None:
        first = len(acknowledged)
        while True:
            payloads = {first + index: os.urandom(3000) for index in range(5)}
            assert await bookie.add(*[(1, entry, payload) for entry, payload in payloads.items()]) == [OK] * 5
            acknowledged.update(payloads)
            first += 5

    for _ in range(2):
        async with bookie_process(tmp_path) as bookie:
            found = await bookie.entries(1)
            assert found.items() >= acknowledged.items()
            acknowledged.update(found)
            goal = len(acknowledged) + 150
            writing = asyncio.create_task(write(bookie))
            await until(partial(_reached, acknowledged, goal, writing))
        with pytest.raises(StratalogError):
            await writing
    async with bookie_process(tmp_path) as bookie:
        assert (await bookie.entries(1)).items() >= acknowledged.items()
        assert len(acknowledged) >= 300


def _reached(acknowledged: dict[int, bytes], goal: int, writing: asyncio.Task[None]) -> bool:
    return len(acknowledged) >= goal or writing.done()
