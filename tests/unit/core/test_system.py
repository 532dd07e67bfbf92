"""The real clock, files and threads."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from random import Random

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground, resident_memory


@pytest.fixture
def files(tmp_path: Path) -> SystemFiles:
    return SystemFiles(tmp_path / "data")


def test_positional_reads_and_writes(files: SystemFiles) -> None:
    file = files.open("log", create=True)
    file.pwritev([b"abc", bytearray(b"de"), memoryview(b"f")], 4)
    assert file.size() == 10
    assert file.pread(100, 4) == b"abcdef"
    assert file.pread(2, 5) == b"bc"
    assert file.pread(4, 0) == b"\x00" * 4
    assert file.pread(5, 10) == b""
    file.datasync()
    file.truncate(5)
    assert file.size() == 5
    file.close()
    file.close()


def test_a_read_that_comes_in_pieces_is_whole(files: SystemFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    file, pread = files.open("log", create=True), os.pread
    file.pwritev([b"abcdefgh"], 0)
    monkeypatch.setattr(os, "pread", lambda descriptor, length, position: pread(descriptor, min(length, 3), position))
    assert file.pread(7, 1) == b"bcdefgh"
    assert file.pread(100, 1) == b"bcdefgh"
    assert file.pread(4, 2) == b"cdef"
    file.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(0, 10**6))
def test_gathered_writes_of_any_shape(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int) -> None:
    files = SystemFiles(tmp_path_factory.mktemp("files"))
    buffers = [Random(seed + number).randbytes(size) for number, size in enumerate(sizes)] * 40
    file = files.open("log", create=True)
    file.pwritev(buffers, 7)
    content = b"".join(buffers)
    assert file.pread(len(content) + 9, 7) == content
    file.close()


def test_a_file_that_is_not_there_is_not_created_by_opening(files: SystemFiles) -> None:
    with pytest.raises(FileNotFoundError):
        files.open("missing")
    with pytest.raises(FileNotFoundError):
        files.read("missing")


def test_atomic_writes_replace_whole_contents(files: SystemFiles) -> None:
    files.make_directory("a/b")
    files.write_atomic("a/b/state", b"one" * 1000)
    files.write_atomic("a/b/state", b"two")
    assert files.read("a/b/state") == b"two"
    assert files.list("a/b") == ["state"]


def test_names_are_listed_renamed_and_removed(files: SystemFiles) -> None:
    assert files.list("nowhere") == []
    for name in ("c", "a", "b"):
        files.open(name, create=True).close()
    files.rename("c", "d")
    files.remove("a")
    files.sync_directory(".")
    assert files.list(".") == ["b", "d"]
    assert files.exists("b")
    assert not files.exists("c")
    assert files.free_bytes() > 0


def test_time_goes_forward() -> None:
    clock = SystemClock()
    first = clock.monotonic()
    assert clock.monotonic() >= first
    assert clock.wall_ms() > 1_600_000_000_000


async def test_blocking_calls_run_aside_and_raise_here() -> None:
    background = ThreadBackground(2, "test-background")
    try:
        assert (await background.run(threading.current_thread)).name.startswith("test-background")
        with pytest.raises(ZeroDivisionError):
            await background.run(lambda: 1 // 0)
    finally:
        background.close()


def _refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_calls_run_in_the_threads_that_the_system_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may allow no more threads when a pool wants its second one."""
    background, ran = ThreadBackground(4, "test-background"), list[int]()
    try:
        await background.run(lambda: ran.append(1))
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", _refuse)
            await background.run(lambda: ran.append(2))
        await background.run(lambda: ran.append(3))
        assert ran == [1, 2, 3], "each call ran once"
        assert len(background._threads) == 2, "only those that run are counted"
    finally:
        background.close()


async def test_a_call_that_no_thread_can_take_is_refused_and_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    background, ran = ThreadBackground(4, "test-background"), list[int]()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", _refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                background.run(lambda: ran.append(1))
        await background.run(lambda: ran.append(2))
        assert ran == [2]
    finally:
        background.close()


async def test_calls_that_have_not_begun_are_cancelled_at_the_end_and_those_that_run_are_awaited() -> None:
    background = ThreadBackground(1, "test-background")
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert go_on.wait(30)
        return "done"

    running, waiting = background.run(slow), background.run(lambda: "never")
    await asyncio.to_thread(begun.wait, 30)
    closing = asyncio.create_task(asyncio.to_thread(background.close))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not closing.done()
    go_on.set()
    assert await running == "done"
    await closing
    with pytest.raises(RuntimeError, match="closed"):
        background.run(slow)


async def test_a_cancelled_call_is_not_made_and_the_next_one_is() -> None:
    background = ThreadBackground(1, "test-background")
    go_on = threading.Event()
    made: list[str] = []
    try:
        blocked = background.run(lambda: go_on.wait(30))
        cancelled = asyncio.ensure_future(background.run(lambda: made.append("cancelled")))
        cancelled.cancel()
        last = background.run(lambda: made.append("last"))
        go_on.set()
        await blocked
        await last
        assert made == ["last"]
    finally:
        background.close()


def test_resident_memory_is_that_of_the_system() -> None:
    before = psutil.Process().memory_info().rss
    assert before // 2 < resident_memory() < 2 * before
