"""Writes that the kernel carries out: each end reaches its own, whatever becomes of files, loops, processes and other ends."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratalog_core.files import kernel_io as module
from stratalog_core.files.kernel_io import IN_FLIGHT_MAX, KernelWrites, kernel_writes
from stratalog_core.files.open_files import DirectFile, open_file

PAGE = 4096
FILE_BYTES = 128 * PAGE


def ready_file(path: Path) -> DirectFile:
    """Its space is there and its size durable, so that it may be written by the kernel alone."""
    file = open_file(path, create=True, direct=True)
    if not isinstance(file, DirectFile):
        file.close()
        pytest.skip("the file system of the temporary directory knows no direct writes")
    file.allocate(FILE_BYTES)
    file.datasync()
    return file


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DirectFile]:
    made = ready_file(tmp_path / "log")
    yield made
    made.close()


def writes_of_loop() -> KernelWrites:
    writes = kernel_writes()
    if writes is None:
        pytest.skip("this system knows no such writes")
    return writes


def begun(file: DirectFile, content: bytes, position: int) -> asyncio.Future[OSError | None]:
    ended: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    assert file.begin_write([content], position, ended.set_result)
    return ended


def wait_for_ends(writes: KernelWrites, count: int) -> None:
    """Until so many writes are over; the loop, which does not run meanwhile, sees them all at once."""
    os.set_blocking(writes._event, True)
    seen = 0
    while seen < count:
        seen += os.eventfd_read(writes._event)
    os.set_blocking(writes._event, False)
    os.eventfd_write(writes._event, seen)


async def test_an_end_that_is_taken_badly_keeps_no_other_from_being_told(
    tmp_path: Path, file: DirectFile, caplog: pytest.LogCaptureFixture
) -> None:
    writes, other = writes_of_loop(), ready_file(tmp_path / "other")

    def take_badly(failure: OSError | None) -> None:
        raise ValueError("taken badly")

    assert file.begin_write([b"a" * PAGE], 0, take_badly)
    ended = begun(other, b"b" * PAGE, 0)
    wait_for_ends(writes, 2)
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(60):
            assert await ended is None
    assert "taken badly" in caplog.text
    other.close()


async def test_no_more_are_under_way_than_are_looked_at_once(file: DirectFile) -> None:
    writes = writes_of_loop()
    ends: list[asyncio.Future[int]] = [asyncio.get_running_loop().create_future() for _ in range(IN_FLIGHT_MAX)]
    content = module_memory()
    for number, end in enumerate(ends):
        writes.begin(file._direct.number, content, PAGE, number * PAGE, end.set_result)
    with pytest.raises(BlockingIOError) as refused:
        writes.begin(file._direct.number, content, PAGE, 0, lambda result: None)
    assert refused.value.errno == errno.EAGAIN
    assert not file.begin_write([b"a" * PAGE], 0, lambda failure: None), "a thread is to write it"
    wait_for_ends(writes, IN_FLIGHT_MAX)
    async with asyncio.timeout(60):
        assert await asyncio.gather(*ends) == [PAGE] * IN_FLIGHT_MAX
    assert await begun(file, b"a" * PAGE, 0) is None


_memory = bytearray(2 * PAGE)


def module_memory() -> int:
    """Address of a page that is never let go."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(_memory))
    return address + -address % PAGE


async def test_a_look_that_a_signal_cuts_short_is_no_error(file: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = writes_of_loop()
    really = writes._checked

    def cut_short(*arguments: object) -> int:
        monkeypatch.undo()
        raise InterruptedError(errno.EINTR, "interrupted")

    monkeypatch.setattr(writes, "_checked", cut_short)
    writes._look()
    assert writes._checked == really
    assert await begun(file, b"a" * PAGE, 0) is None


async def test_a_file_may_be_closed_while_it_is_written(tmp_path: Path) -> None:
    """The kernel goes on with its own reference: whoever gets the descriptor's number next is not written to."""
    writes_of_loop()
    for number in range(3):
        file = ready_file(tmp_path / f"closed-{number}")
        ended = begun(file, bytes([number + 1]) * 16 * PAGE, 0)
        file.close()
        gc.collect()
        others = [open_file(tmp_path / f"other-{number}-{each}", create=True, direct=False) for each in range(2)]
        assert await ended is None
        for other in others:
            assert other.size() == 0
            other.close()
        assert (tmp_path / f"closed-{number}").read_bytes()[: 16 * PAGE] == bytes([number + 1]) * 16 * PAGE


def test_a_loop_may_end_while_a_write_is_under_way(tmp_path: Path, file: DirectFile) -> None:
    """Its memory lives until the kernel is done, and what was begun is finished before the context is gone."""
    loops = len(module._writes)

    async def begin() -> None:
        writes_of_loop()
        assert file.begin_write([b"x" * 64 * PAGE], 0, lambda failure: None)

    asyncio.run(begin())
    gc.collect()
    assert len(module._writes) == loops
    assert (tmp_path / "log").read_bytes()[: 64 * PAGE] == b"x" * 64 * PAGE


def lets_go_in_child(writes: KernelWrites) -> bool:
    child = os.fork()
    if child == 0:
        writes.__del__()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


async def test_a_forked_process_disturbs_nothing(file: DirectFile) -> None:
    writes = writes_of_loop()
    ended = begun(file, b"x" * PAGE, 0)
    assert lets_go_in_child(writes)
    assert await ended is None
    assert await begun(file, b"y" * PAGE, PAGE) is None
    assert file.pread(2 * PAGE, 0) == b"x" * PAGE + b"y" * PAGE


async def test_a_loop_without_readers_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    module._writes.pop(loop, None)

    def refuse(*arguments: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(type(loop), "add_reader", refuse, raising=False)
    assert kernel_writes() is None
    monkeypatch.undo()
    assert kernel_writes() is None, "asked once"
    module._writes.pop(loop)
