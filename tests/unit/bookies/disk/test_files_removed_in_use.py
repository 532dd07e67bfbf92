"""Files and ledgers removed while compaction, a scrub or a read is about to use them: none of them fails, nor does the disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest
from simulation.world.disk import Disk as SimulatedDisk
from unit.bookies.disk.test_transient_errors import COOKIE, Rationed, add, entries, running, settings_of

from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.compaction import Compaction
from stratalog_bookies.disk.core import log_format
from stratalog_bookies.disk.core.cookie import disk_key
from stratalog_bookies.disk.core.index import ROW, ROW_BYTES
from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.disk.log_files import LogFiles, index_path, log_path
from stratalog_bookies.protocol.messages import Status
from stratalog_bookies.repair.core.log_check import Copy
from stratalog_bookies.repair.scrub import Scrub

Result = TypeVar("Result")
_PAYLOAD = bytes(40_000)


class HeldBackground:
    """Runs calls at once, except those that a test holds: the next call of that name waits until it is released."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[asyncio.Event, asyncio.Event]] = {}

    def hold(self, name: str) -> tuple[asyncio.Event, asyncio.Event]:
        """Two events: the call is about to be made; the call may be made."""
        self._held[name] = (asyncio.Event(), asyncio.Event())
        return self._held[name]

    async def run(self, call: Callable[[], Result]) -> Result:
        function = call.func if isinstance(call, partial) else call
        held = self._held.pop(getattr(function, "__name__", ""), None)
        if held is not None:
            reached, may_go_on = held
            reached.set()
            await may_go_on.wait()
        await asyncio.sleep(0)
        return call()

    def close(self) -> None: ...


class _Bench:
    """A disk of three closed files and an open one: ledger 10 + n fills file n + 1, with a few entries of ledger 1 in each."""

    def __init__(self, disk: Disk, background: HeldBackground, path: Path) -> None:
        self.disk = disk
        self._files = disk.store._files
        self.background = background
        self.contents = disk.core.contents
        self.settings = settings_of(path, index_bytes_max=0, compaction_live_ratio=1.0)
        self.upkeep = Compaction(disk, self.settings)
        self.scrub = Scrub(disk, self.settings, b"", lambda: None)

    async def roll(self, ledger_id: int) -> None:
        """Fill the open file with another ledger until it is closed."""
        file = self.contents.files[self.disk.core.log.generation]
        for entry_id in range(3):
            await add(self.disk, ledger_id, entry_id, _PAYLOAD)
        await self.until(lambda: file.closed)
        self.contents.cache.trim()

    async def rot_entry(self, ledger_id: int, entry_id: int) -> None:
        run = next(run for run in self.contents.ledgers[ledger_id].runs if run.may_hold(entry_id))
        rows = await self.disk.reads.rows(run)
        at = next(ROW.unpack_from(rows, at) for at in range(0, len(rows), ROW_BYTES) if rows[at + 7] == entry_id)[1]
        self._overwrite(log_path(run.generation), at)

    async def lose(self, generation: int) -> None:
        """Corrupt a log file's first frame of entries and its index."""
        (frame, *_) = log_format.scan(self.disk.store.read_log(generation), self.disk.store.seed(generation)).frames
        self._overwrite(log_path(generation), frame.end)
        self._overwrite(index_path(generation), self._files.open(index_path(generation)).size() - 4)

    def _overwrite(self, path: str, position: int) -> None:
        self._files.open(path).pwritev((b"rot!",), position)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for the file lifecycle, which advances in turns of the event loop."""
        for _ in range(10_000):
            if is_so():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never came to be")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[_Bench]:
    files = SimulatedDisk("disk", Random(1)).mount()
    recovery.create(LogFiles(files, disk_key(COOKIE, 0), 64 * 1024))
    background = HeldBackground()
    async with running(Rationed(files), settings_of(tmp_path, index_bytes_max=0), background) as disk:
        bench = _Bench(disk, background, tmp_path)
        for number in range(4):
            assert await add(disk, 1, number, bytes(100)) is Status.OK
            assert await add(disk, 10 + number, 0, _PAYLOAD) is Status.OK
        await bench.until(lambda: sum(file.closed for file in bench.contents.files.values()) >= 3)
        bench.contents.cache.trim()
        yield bench
        assert not disk.core.failure
        disk.core.validate_state()
        assert not any(file.pins for file in bench.contents.files.values())


async def test_a_file_that_is_read_while_it_is_let_go_of_stays_until_the_next_time(bench: _Bench) -> None:
    generation = bench.contents.ledgers[11].runs[0].generation
    header_is_read, read = bench.background.hold("check_header")
    scrub = asyncio.ensure_future(bench.scrub.scrub())
    await header_is_read.wait()
    state_is_written, written = bench.background.hold("save_state")
    await bench.disk.delete([1, 11])
    await state_is_written.wait()
    header_is_read, next_read = bench.background.hold("check_header")
    read.set()
    await header_is_read.wait()
    assert bench.contents.files[generation].pins
    written.set()
    await bench.until(lambda: not bench.disk.files._lock.locked())
    assert generation in bench.contents.files, "what is read stays"
    next_read.set()
    await scrub
    bench.disk.files.wake()
    await bench.until(lambda: generation not in bench.contents.files)


async def test_compaction_comes_to_a_file_that_has_been_emptied_by_deletions(bench: _Bench) -> None:
    sparse = bench.contents.sparse_files(1.0)
    assert len(sparse) >= 3
    payloads_are_read, read = bench.background.hold("read_places")
    compaction = asyncio.ensure_future(bench.upkeep.compact())
    await payloads_are_read.wait()
    state_is_written, written = bench.background.hold("save_state")
    await bench.disk.delete([1, 11, 12])
    await state_is_written.wait()
    read.set()
    await compaction
    written.set()
    await bench.until(lambda: sparse[-1].generation not in bench.contents.files)
    assert set(await entries(bench.disk, 10)) == {0}


async def test_rows_of_a_run_that_goes_while_they_are_asked_for_are_none(bench: _Bench) -> None:
    (run,) = bench.contents.ledgers[12].runs
    assert run.rows is None
    rows_are_read, read = bench.background.hold("load_rows")
    question = asyncio.ensure_future(bench.disk.reads.has_newer(12, 0, 0))
    await rows_are_read.wait()
    await bench.disk.delete([1, 10, 11, 12])
    for _ in range(100):
        await asyncio.sleep(0)
    assert run.generation in bench.contents.files, "the file stays while its index is read"
    read.set()
    assert not await question
    assert run.rows is None, "nothing is kept of what has gone"
    bench.disk.files.wake()
    await bench.until(lambda: run.generation not in bench.contents.files)
    assert await bench.disk.reads.rows(run) == b""


async def test_a_read_finds_what_compaction_moves_meanwhile(bench: _Bench) -> None:
    (run,) = bench.contents.ledgers[11].runs
    rows_are_read, read = bench.background.hold("load_rows")
    reading = asyncio.ensure_future(entries(bench.disk, 11))
    await rows_are_read.wait()
    assert await bench.upkeep._empty(bench.contents.files[run.generation])
    assert not bench.contents.holds(run)
    read.set()
    assert await reading == {0: _PAYLOAD}


async def test_compaction_lets_go_of_a_file_only_when_what_it_moved_is_durable(bench: _Bench) -> None:
    (run,) = bench.contents.ledgers[11].runs
    move_is_begun, written = bench.background.hold("write")
    emptying = asyncio.ensure_future(bench.upkeep._empty(bench.contents.files[run.generation]))
    await bench.until(move_is_begun.is_set)
    bench.disk.files.wake()
    for _ in range(100):
        await asyncio.sleep(0)
    assert bench.contents.holds(run), "a power cut now would leave this copy alone"
    assert not emptying.done()
    written.set()
    assert await emptying
    await bench.until(lambda: run.generation not in bench.contents.files)
    assert await entries(bench.disk, 11) == {0: _PAYLOAD}


async def test_a_scrub_passes_over_a_ledger_that_is_deleted_while_it_looks(bench: _Bench) -> None:
    (run,) = bench.contents.ledgers[12].runs
    file = bench.contents.files[run.generation]
    rows = await bench.disk.reads.rows(run)
    position = int.from_bytes(rows[8:12], "big")
    rows_are_read, read = bench.background.hold("load_rows")
    looking = asyncio.ensure_future(bench.scrub._is_current(file, Copy(12, 0, position)))
    await rows_are_read.wait()
    await bench.disk.delete([12])
    read.set()
    assert not await looking
    assert len(bench.disk.corruption) == 0


async def test_a_scrub_goes_on_behind_a_file_that_is_lost_with_its_index(bench: _Bench) -> None:
    first, second = (bench.contents.ledgers[ledger_id].runs[0].generation for ledger_id in (10, 11))
    await bench.rot_entry(11, 0)
    await bench.lose(first)
    await bench.scrub.scrub()
    assert set(bench.disk.corruption.files) == {first}
    assert [(each.ledger_id, each.generation) for each in bench.disk.corruption.due(0)] == [(11, second)]


async def test_another_files_damage_is_not_this_ones(bench: _Bench) -> None:
    """Newer files tell whether a corrupt copy matters. One that cannot tell does not make this file corrupt."""
    await add(bench.disk, 20, 5, bytes(100))
    await bench.roll(21)
    await add(bench.disk, 20, 0, bytes(100))
    await add(bench.disk, 20, 9, bytes(100))
    await bench.roll(22)
    older, newer = (run.generation for run in bench.contents.ledgers[20].runs)
    await bench.rot_entry(20, 5)
    await bench.lose(newer)
    await bench.scrub.scrub()
    assert set(bench.disk.corruption.files) == {newer}
    assert (20, 5, older) in [(each.ledger_id, each.entry_id, each.generation) for each in bench.disk.corruption.due(0)]
