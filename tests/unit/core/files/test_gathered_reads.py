"""Reads that the kernel carries out: the very bytes of each extent, and a failure for all if one of them failed."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratalog_core.files import open_files as files
from stratalog_core.files.kernel_io import IN_FLIGHT_MAX, KernelReads, Transfer, kernel_reads
from stratalog_core.files.open_files import DirectDescriptor, DirectFile, open_file
from stratalog_core.memory.receive_buffers import ReceiveBuffers
from stratalog_core.ports import Extent

FILE_BYTES = 64 * 4096
CONTENT = bytes((position * 7 + position // 4096) % 251 for position in range(FILE_BYTES))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DirectFile]:
    (tmp_path / "log").write_bytes(CONTENT)
    opened = open_file(tmp_path / "log", create=False, direct=True)
    if not isinstance(opened, DirectFile):
        opened.close()
        pytest.skip("the file system of the temporary directory knows no direct reads")
    yield opened
    opened.close()


async def read(file: DirectFile, extents: Sequence[Extent]) -> list[memoryview] | OSError | None:
    """None if they are left to threads."""
    ended: asyncio.Future[list[memoryview] | OSError] = asyncio.get_running_loop().create_future()
    return await ended if file.begin_reads(extents, ended.set_result) else None


def reads_of_loop() -> KernelReads:
    reads = kernel_reads()
    if reads is None:
        pytest.skip("this system knows no such reads")
    return reads


PLACES = st.tuples(st.integers(0, FILE_BYTES - 1), st.integers(1, 3 * 4096))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(places=st.lists(PLACES, min_size=1, max_size=20))
def test_each_extent_is_seen_as_it_is(file: DirectFile, places: list[tuple[int, int]]) -> None:
    async def look() -> None:
        reads_of_loop()
        extents = [Extent(position, min(length, FILE_BYTES - position)) for position, length in places]
        views = await read(file, extents)
        assert isinstance(views, list)
        assert [bytes(view) for view in views] == [CONTENT[position : position + length] for position, length in extents]

    asyncio.run(look())


async def test_an_extent_beyond_the_end_fails_all(file: DirectFile) -> None:
    reads_of_loop()
    failure = await read(file, [Extent(0, 10), Extent(FILE_BYTES - 10, 11)])
    assert isinstance(failure, OSError)


async def test_memory_is_not_used_again_while_it_is_seen(file: DirectFile) -> None:
    reads_of_loop()
    first = await read(file, [Extent(4096, 8192)])
    others = [await read(file, [Extent(5 * 4096 + number, 8192)]) for number in range(8)]
    assert isinstance(first, list)
    assert first[0] == CONTENT[4096:12_288]
    assert len({id(other) for other in others}) == len(others)


async def test_memory_is_used_again_as_soon_as_nobody_sees_it(file: DirectFile) -> None:
    reads_of_loop()
    gc.collect()
    gc.disable()
    try:
        addresses = {address_of(await read(file, [Extent(4096, 8192), Extent(0, 10)])) for _ in range(10)}
    finally:
        gc.enable()
    assert len(addresses) <= 2, "a circle of references keeps memory until the collector comes by"


def address_of(views: list[memoryview] | OSError | None) -> int:
    assert isinstance(views, list)
    return ctypes.addressof(ctypes.c_char.from_buffer(views[0]))


async def test_too_many_at_once_fail_when_those_that_found_room_are_over(file: DirectFile) -> None:
    reads_of_loop()
    failure = await read(file, [Extent(0, 10)] * (IN_FLIGHT_MAX + 3))
    assert isinstance(failure, BlockingIOError)
    views = await read(file, [Extent(0, 10)] * IN_FLIGHT_MAX)
    assert isinstance(views, list), "there is room again"


async def test_what_the_kernel_refuses_is_left_to_threads(file: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    reads_of_loop()
    write_only = os.open(os.devnull, os.O_WRONLY)
    monkeypatch.setattr(file, "_direct", DirectDescriptor(write_only))
    assert await read(file, [Extent(0, 10)]) is None
    os.close(write_only)
    monkeypatch.undo()
    monkeypatch.setattr(files, "kernel_reads", lambda: None)
    assert await read(file, [Extent(0, 10)]) is None
    monkeypatch.undo()
    assert await read(file, [Extent(0, 10)]) is not None


class EndedReads:
    """Reads that end at once, with what the kernel would say."""

    def __init__(self, result: int) -> None:
        self.buffers = ReceiveBuffers()
        self._result = result

    def begin_all(self, descriptor: int, transfers: Sequence[Transfer]) -> int:
        for transfer in transfers:
            asyncio.get_running_loop().call_soon(transfer.on_end, self._result)
        return len(transfers)


@pytest.mark.parametrize(("result", "number"), [(-errno.EIO, errno.EIO), (9, errno.EIO)])
async def test_a_read_that_fails_or_ends_early_says_so(
    file: DirectFile, monkeypatch: pytest.MonkeyPatch, result: int, number: int
) -> None:
    monkeypatch.setattr(files, "kernel_reads", lambda: EndedReads(result))
    failure = await read(file, [Extent(0, 10), Extent(8192, 10)])
    assert isinstance(failure, OSError)
    assert failure.errno == number
