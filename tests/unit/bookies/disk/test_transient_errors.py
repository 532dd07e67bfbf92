"""Transient errors (no descriptors, no space) fail no disk and lose no entry, whichever call they meet."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from simulation.world.disk import Disk as SimulatedDisk
from unit.bookies.started_bookie import StartedBookie

from stratalog_bookies.config import BookieSettings
from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.compaction import Compaction
from stratalog_bookies.disk.core.cookie import disk_key
from stratalog_bookies.disk.core.lookup import Budget
from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.metrics import Counters
from stratalog_bookies.node import boot
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import EntryState, Range, Status
from stratalog_core.errors import StratalogError
from stratalog_core.ports import Background, File, Files
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemFiles, ThreadBackground

COOKIE = "ab" * 16
TIMEOUT_S = 60.0


class Rationed:
    """A disk that refuses some of the calls that need a descriptor or space."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.calls = 0
        self.refused: Callable[[int], bool] = lambda number: False
        self.failure = errno.EMFILE
        self.free: int | None = None

    def _count(self) -> None:
        self.calls += 1
        if self.refused(self.calls):
            raise OSError(self.failure, os.strerror(self.failure))

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> File:
        self._count()
        return self._files.open(path, create=create, direct=direct)

    def write_atomic(self, path: str, content: bytes) -> None:
        self._count()
        self._files.write_atomic(path, content)

    def sync_directory(self, path: str) -> None:
        self._count()
        self._files.sync_directory(path)

    def free_bytes(self) -> int:
        return self._files.free_bytes() if self.free is None else self.free

    def __getattr__(self, name: str) -> object:
        return getattr(self._files, name)


class Small(Rationed):
    """A disk with room for so many log files and spares."""

    def __init__(self, files: Files, log_files: int, file_bytes: int = 64 * 1024) -> None:
        super().__init__(files)
        self.log_files = log_files
        self._file_bytes = file_bytes

    def free_bytes(self) -> int:
        return (self.log_files - len(self._files.list("log"))) * self._file_bytes


def settings_of(path: Path, **changes: object) -> BookieSettings:
    values: dict[str, object] = {
        "bookie_id": "b1", "data_dirs": (str(path),), "log_file_bytes": 64 * 1024, "spare_files": 0, "free_bytes_min": 0,
        "compaction_bytes_per_s": 1 << 40, "scrub_bytes_per_s": 1 << 40, **changes,
    }  # fmt: skip
    return BookieSettings(**values)  # type: ignore[arg-type]


@asynccontextmanager
async def running(rationed: Rationed, settings: BookieSettings, background: Background) -> AsyncIterator[Disk]:
    store, core = boot.recover_disk(rationed, COOKIE, 0, settings)  # type: ignore[arg-type]
    disk = Disk(0, core, store, settings, background, Counters(), lambda: None)
    await disk.files.prepare()
    disk.files.start()
    try:
        yield disk
    finally:
        await disk.close()


async def add(disk: Disk, ledger_id: int, entry_id: int, payload: bytes, flags: int = 0) -> Status:
    header = messages.pack_entry(ledger_id, entry_id, entry_id - 1, (payload,), flags)
    body = memoryview(b"".join(messages.encode_add([header], [payload])))
    answered: asyncio.Future[bytearray] = asyncio.get_running_loop().create_future()
    start = messages.payloads_start(1)
    disk.add(messages.decode_add(body), body, messages.COUNT_BYTES, start, len(body), answered.set_result)
    return Status((await answered)[0])


async def entries(disk: Disk, ledger_id: int) -> dict[int, bytes]:
    (found,) = await disk.reads.read([Range(ledger_id, 0, 1 << 40)], Budget(1 << 30, messages.ENTRIES_MAX), None)
    assert [place.row.entry_id for place in found.found.places] == sorted(place.row.entry_id for place in found.found.places)
    assert len(found.payloads) == len(found.headers), "every entry can be read"
    return {place.row.entry_id: bytes(payload) for place, payload in zip(found.found.places, found.payloads, strict=True)}


async def _live_through_it(path: Path, background: Background, refused: Callable[[int], bool]) -> int:
    """Fill files, delete, compact, with some calls refused; returns how many calls there were."""
    files = SimulatedDisk("disk", Random(1)).mount()
    recovery.create(LogFiles(files, disk_key(COOKIE, 0), 64 * 1024))
    rationed = Rationed(files)
    written = 0
    async with running(rationed, settings_of(path), background) as disk:
        upkeep = Compaction(disk, settings_of(path))
        rationed.calls = 0
        rationed.refused = refused
        for entry in range(12):
            for ledger_id, payload in ((1, bytes([entry]) * 20_000), (2, bytes([entry]) * 3000)):
                while (status := await add(disk, ledger_id, entry, payload)) is Status.READ_ONLY:
                    await disk.files.check_space()
                    await asyncio.sleep(0)
                assert status is Status.OK
            written += 1
        await disk.delete([1])
        while disk.core.contents.sparse_files(0.4) or disk.core.contents.dead_files() or disk.files._dropped:
            await upkeep.compact()
            await disk.files.check_space()
            await asyncio.sleep(0.001)
            assert not disk.core.failure
        calls = rationed.calls
        rationed.refused = lambda number: False
        assert await entries(disk, 2) == {entry: bytes([entry]) * 3000 for entry in range(written)}
        disk.core.validate_state()
        assert disk.counters.files_recycled >= 3
        assert not any(file.unmovable for file in disk.core.contents.files.values())
    async with running(rationed, settings_of(path), background) as disk:
        assert await entries(disk, 2) == {entry: bytes([entry]) * 3000 for entry in range(written)}
        assert 1 in disk.core.contents.tombstones
    return calls


@pytest.mark.parametrize("failure", [errno.EMFILE, errno.ENOSPC])
async def test_a_shortage_at_any_call_costs_nothing(tmp_path: Path, failure: int) -> None:
    background = ThreadBackground(4, "bookie")
    calls = await _live_through_it(tmp_path / "whole", background, lambda number: False)
    assert calls > 20
    for refused in range(1, calls + 1, 3 if failure == errno.EMFILE else 9):
        await _live_through_it(tmp_path / str(refused), background, lambda number, at=refused: at <= number < at + 3)  # type: ignore[misc]
    background.close()


async def test_a_read_without_a_descriptor_says_nothing_about_the_entry(tmp_path: Path) -> None:
    background = ThreadBackground(4, "bookie")
    files = SystemFiles(tmp_path)
    recovery.create(LogFiles(files, disk_key(COOKIE, 0), 64 * 1024))
    rationed = Rationed(files)
    async with running(rationed, settings_of(tmp_path), background) as disk:
        assert await add(disk, 1, 0, b"zero") is Status.OK
        rationed.refused = lambda number: True
        with pytest.raises(OSError, match="Too many open files"):
            await entries(disk, 1)
        assert disk.counters.unreadable_entries == 0
        rationed.refused = lambda number: False
        assert await entries(disk, 1) == {0: b"zero"}
    background.close()


async def test_a_full_disk_of_dead_files_is_compacted_with_space_lent_for_it(tmp_path: Path) -> None:
    """Every file has a few live entries: none can be removed, and adds are refused until compaction has made room."""
    background = ThreadBackground(4, "bookie")
    files = SystemFiles(tmp_path)
    recovery.create(LogFiles(files, disk_key(COOKIE, 0), 64 * 1024))
    settings = settings_of(tmp_path, free_bytes_min=100 * 1024)
    async with running(Small(files, 6), settings, background) as disk:
        status, entry = Status.OK, 0
        while status is Status.OK:
            assert await add(disk, 2, entry, b"long-lived") in (Status.OK, Status.READ_ONLY)
            status = await add(disk, 1, entry, bytes(20_000))
            entry += 1
        assert status is Status.READ_ONLY
        await disk.delete([1])
        upkeep = Compaction(disk, settings)
        async with asyncio.timeout(TIMEOUT_S):
            while disk.core.read_only:
                await upkeep.compact()
                await disk.files.check_space()
                await asyncio.sleep(0)
        assert await add(disk, 2, entry, b"there is room") is Status.OK
        assert set((await entries(disk, 2)).values()) == {b"long-lived", b"there is room"}
    background.close()


async def test_a_file_that_is_freed_before_its_turn_does_not_end_compaction(tmp_path: Path) -> None:
    """Simulation, scenario log, seed 307: the contents of a sparse file were deleted while another file was being compacted."""
    background = ThreadBackground(4, "bookie")
    files = SystemFiles(tmp_path)
    recovery.create(LogFiles(files, disk_key(COOKIE, 0), 64 * 1024))
    settings = settings_of(tmp_path)
    async with running(Rationed(files), settings, background) as disk:
        for entry in range(12):
            assert await add(disk, 2, entry, b"long-lived") is Status.OK
            assert await add(disk, 1, entry, bytes(20_000)) is Status.OK
        await disk.delete([1])
        upkeep, contents = Compaction(disk, settings), disk.core.contents
        await until(lambda: len(contents.sparse_files(0.4)) >= 2)
        first = contents.sparse_files(0.4)[0].generation
        async with asyncio.timeout(TIMEOUT_S), upkeep._lock:
            compaction = asyncio.create_task(upkeep.compact())
            await asyncio.sleep(0)
            await disk.delete([2])
            await until(lambda: first not in contents.files)
        await compaction
    background.close()


class Limited(StartedBookie):
    """A started bookie whose file descriptors a test can limit."""

    def ration(self, more: int) -> None:
        descriptors = [int(name) for name in os.listdir(f"/proc/{self.process.pid}/fd")]
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (max(descriptors) + 1 + more, 4096))

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def add(self, entry_id: int, payload: bytes) -> Status:
        parts = messages.encode_add([messages.pack_entry(1, entry_id, entry_id - 1, (payload,))], [payload])
        answer = await self.transport.channel(self.address).call(messages.ADD, parts, TIMEOUT_S)
        return Status(messages.decode_statuses(answer)[0])

    async def read(self) -> messages.RangeAnswer:
        parts = messages.encode_read([Range(1, 0, 1 << 40)], 1 << 24)
        answer = await self.transport.channel(self.address).call(messages.READ, parts, TIMEOUT_S)
        return messages.decode_read_answer(answer)[0]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_out_of_descriptors_it_turns_read_only_and_comes_back(tmp_path: Path, loop: str) -> None:
    async with Limited(tmp_path, loop) as bookie:
        assert await bookie.add(0, b"zero") is Status.OK
        bookie.ration(0)
        statuses, entry = [Status.OK], 1
        while statuses[-1] is Status.OK:
            statuses.append(await bookie.add(entry, bytes(30_000)))
            entry += 1
        assert statuses[-1] is Status.READ_ONLY
        answer = await bookie.read()
        assert (answer.status, answer.decided_to, answer.entries) == (Status.OVERLOADED, -1, [])
        strangers = [TcpTransport() for _ in range(5)]
        asked = [asyncio.ensure_future(_info(stranger, bookie.address)) for stranger in strangers]
        before = bookie.cpu_s()
        await asyncio.sleep(1.5)
        assert bookie.cpu_s() - before < 0.75, "it waits for descriptors and does not spin"
        bookie.ration(100)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                if await bookie.add(entry - 1, bytes(30_000)) is Status.OK:
                    break
                await asyncio.sleep(0.05)
            await asyncio.gather(*asked)
        answer = await bookie.read()
        assert [each.entry_id for each in answer.entries] == list(range(entry))
        assert all(each.state == EntryState.PRESENT for each in answer.entries)
        for stranger in strangers:
            await stranger.close()


async def _info(transport: TcpTransport, address: str) -> None:
    """Ask until there is an answer: without descriptors a connection is not accepted, or closed at once."""
    while True:
        try:
            await transport.channel(address).call(messages.INFO, (), 2.0)
            return
        except StratalogError:
            await asyncio.sleep(0.05)
