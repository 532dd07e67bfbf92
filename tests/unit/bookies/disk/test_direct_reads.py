"""Large reads of a running bookie bypass the page cache without a thread; corruption and failures are
reported as for others.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from unit.bookies.node.test_server import Place, Talk, place, until

from stratalog_bookies.protocol.messages import EntryState, Range, Status
from stratalog_core.files import open_files as files_module
from stratalog_core.files.kernel_io import Transfer, kernel_reads
from stratalog_core.files.open_files import DirectFile
from stratalog_core.memory.receive_buffers import ReceiveBuffers

__all__ = ["place"]
SIZE = 30_000


def payload(entry: int) -> bytes:
    return bytes([entry + 1]) * SIZE


async def add(bookie: Talk, count: int) -> None:
    """Entries of two ledgers in turns, over several log files."""
    for entry in range(count):
        await bookie.add((1, entry, payload(entry)), (2, entry, payload(entry + 100)))


async def contents(bookie: Talk, ledger_id: int, last: int) -> list[bytes]:
    (answer,) = await bookie.read(Range(ledger_id, 0, last))
    assert answer.status == Status.OK
    assert all(entry.state == EntryState.PRESENT for entry in answer.entries)
    return [bytes(entry.payload) for entry in answer.entries]


def skip_without_direct_reads(place: Place) -> None:
    path = place.directory / "probe"
    file = files_module.open_file(path, create=True, direct=True)
    is_direct = isinstance(file, DirectFile)
    file.close()
    if not is_direct or kernel_reads() is None:
        pytest.skip("this system knows no such reads")


async def test_large_reads_need_no_thread_and_small_ones_the_page_cache(place: Place) -> None:
    skip_without_direct_reads(place)
    async with place.bookie() as bookie:
        await add(bookie, 12)
        assert await contents(bookie, 1, 11) == [payload(entry) for entry in range(12)]
        assert await contents(bookie, 2, 11) == [payload(entry + 100) for entry in range(12)]
        assert await bookie.counter("direct_reads") == 2
        assert await contents(bookie, 1, 0) == [payload(0)]
        assert await bookie.counter("direct_reads") == 2
        first, second = await bookie.read(Range(1, 0, 3), Range(2, 0, 3))
        assert [bytes(entry.payload) for entry in first.entries + second.entries] == [
            *map(payload, range(4)), *map(payload, range(100, 104))
        ]  # fmt: skip
        assert await bookie.counter("direct_reads") == 3


async def test_through_the_page_cache_if_logs_are_written_so(place: Place) -> None:
    async with place.bookie(direct_io=False) as bookie:
        await add(bookie, 6)
        assert await contents(bookie, 1, 5) == [payload(entry) for entry in range(6)]
        assert await bookie.counter("direct_reads") == 0


async def test_what_is_damaged_is_unreadable_and_the_rest_is_given(place: Place) -> None:
    async with place.bookie() as bookie:
        await add(bookie, 6)
    for log in sorted((place.directory / "disk" / "log").glob("*.log")):
        flip_first(log, payload(3))
    async with place.bookie(scrub_interval_s=1000) as bookie:
        (answer,) = await bookie.read(Range(1, 0, 5))
        states = [entry.state for entry in answer.entries]
        assert states == [EntryState.UNREADABLE if entry == 3 else EntryState.PRESENT for entry in range(6)]
        await until(lambda: _is_noted(bookie))


async def _is_noted(bookie: Talk) -> bool:
    return await bookie.counter("unreadable_entries") > 0


def flip_first(log: Path, content: bytes) -> None:
    stored = bytearray(log.read_bytes())
    position = stored.find(content)
    if position >= 0:
        stored[position + 100] ^= 1
        log.write_bytes(stored)


class FailingReads:
    """Reads that all fail."""

    def __init__(self) -> None:
        self.buffers = ReceiveBuffers()
        self.begun = 0

    def begin_all(self, descriptor: int, transfers: Sequence[Transfer]) -> int:
        self.begun += len(transfers)
        for transfer in transfers:
            asyncio.get_running_loop().call_soon(transfer.on_end, -errno.EIO)
        return len(transfers)


async def test_what_the_kernel_cannot_read_a_thread_reads_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_direct_reads(place)
    failing = FailingReads()
    async with place.bookie() as bookie:
        await add(bookie, 6)
        monkeypatch.setattr(files_module, "kernel_reads", lambda: failing)
        assert await contents(bookie, 1, 5) == [payload(entry) for entry in range(6)]
        assert failing.begun > 0
        assert await bookie.counter("direct_reads") == 0


async def test_files_that_are_read_may_go(place: Place) -> None:
    """Files are recycled between reads: no read uses the descriptor of a recycled file."""
    async with place.bookie() as bookie:
        for turn in range(4):
            ledger_id = 3 + turn
            for entry in range(12):
                await bookie.add((ledger_id, entry, payload(10 * turn + entry)))
            assert await contents(bookie, ledger_id, 11) == [payload(10 * turn + entry) for entry in range(12)]
            recycled = await bookie.counter("files_recycled")
            await place.forget(ledger_id)
            await until(partial(_recycled_more, bookie, recycled))


async def _recycled_more(bookie: Talk, than: int) -> bool:
    return await bookie.counter("files_recycled") > than
