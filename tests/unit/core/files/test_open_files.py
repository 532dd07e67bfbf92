"""Open files: what is written around the page cache is the same file in the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.files import open_files as files
from stratalog_core.files.kernel_io import OnEnd, kernel_writes
from stratalog_core.files.open_files import DirectDescriptor, DirectFile, SystemFile, open_file

SIZE = 64 * 1024
PIECES = st.lists(st.binary(max_size=9000), min_size=1, max_size=4)


@pytest.fixture(scope="module", autouse=True)
def small_gathering() -> object:
    """A buffer of four pages, so that writes of a few kilobytes fill it more than once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_GATHERED_BYTES", 4 * 4096)
        patch.setattr(files, "_gathered_kept", deque(maxlen=2))
        yield


def is_direct(directory: Path) -> bool:
    file = open_file(directory / "probe", create=True, direct=True)
    file.close()
    return isinstance(file, DirectFile)


@given(writes=st.lists(st.tuples(st.none() | st.integers(0, SIZE), PIECES), max_size=12))
def test_direct_writes_leave_the_same_bytes_as_others(writes: list[tuple[int | None, list[bytes]]]) -> None:
    """Anywhere, or where the last write ended (``None``), in the middle of a page or not."""
    with tempfile.TemporaryDirectory() as directory:
        direct = open_file(Path(directory) / "direct", create=True, direct=True)
        plain = open_file(Path(directory) / "plain", create=True, direct=False)
        assert type(plain) is SystemFile
        position = 0
        for at, pieces in writes:
            position = position if at is None else at
            for file in (direct, plain):
                file.pwritev(pieces, position)
            position += sum(map(len, pieces))
        size = plain.size()
        assert direct.pread(size, 0) == plain.pread(size, 0)
        # Direct writes are whole pages: at most the rest of one is added, and it is zeros.
        assert not any(direct.pread(4096, size))
        direct.close()
        plain.close()


def test_a_log_that_goes_on_where_it_ended_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write is padded to its page, and the next one begins inside that page."""
    if not is_direct(tmp_path):
        pytest.skip("the file system of the temporary directory knows no direct writes")
    file = open_file(tmp_path / "log", create=True, direct=True)
    file.allocate(SIZE)
    file.pwritev((b"h" * 4096,), 0)
    monkeypatch.setattr(os, "pread", lambda *_: pytest.fail("a page was read to be overwritten"))
    position, expected = 4096, b"h" * 4096
    for size in (1, 100, 4095, 8192, 5000, 16384, 3):
        file.pwritev((b"x" * size, bytes(-(position + size) % 4096)), position)
        position, expected = position + size, expected + b"x" * size
    monkeypatch.undo()
    assert file.pread(position, 0) == expected
    file.close()


def begun(file: SystemFile | DirectFile, pieces: list[bytes], position: int) -> asyncio.Future[OSError | None] | None:
    """A write that the kernel carries out, as a future of what failed; None if this one is not for it."""
    ended: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    assert isinstance(file, DirectFile)
    return ended if file.begin_write(pieces, position, ended.set_result) else None


@pytest.fixture
def log(tmp_path: Path) -> Iterator[DirectFile]:
    """A file as a log has it: its space is there, its first page written, its size durable."""
    if not is_direct(tmp_path):
        pytest.skip("the file system of the temporary directory knows no direct writes")
    file = open_file(tmp_path / "log", create=True, direct=True)
    assert isinstance(file, DirectFile)
    file.allocate(SIZE)
    file.pwritev((b"h" * 4096,), 0)
    file.datasync()
    yield file
    file.close()


async def test_the_kernel_writes_what_goes_on_where_the_log_ended(log: DirectFile) -> None:
    if kernel_writes() is None:
        pytest.skip("this system knows no such writes")
    position, expected = 4096, b"h" * 4096
    for size in (1, 4095, 4096, 100, 5000, 3, 10_000):
        ended = begun(log, [b"x" * size, bytes(-(position + size) % 4096)], position)
        assert ended is not None
        assert await ended is None
        position, expected = position + size, expected + b"x" * size
        assert log.pread(position, 0) == expected
    # And a blocking write goes on behind it.
    log.pwritev((b"y" * 10, bytes(-(position + 10) % 4096)), position)
    assert log.pread(position + 10, 0) == expected + b"y" * 10


def test_writes_are_gathered_where_huge_pages_can_be(log: DirectFile) -> None:
    log.pwritev((b"x" * 4096,), 4096)
    address = files._gathered_kept[-1].address
    assert address % (2 * 1024 * 1024) == 0
    mapping = next(line.split() for line in Path("/proc/self/maps").read_text().splitlines() if holds(line, address))
    assert mapping[1] == "rw-p", "shared memory gets none"


def holds(line: str, address: int) -> bool:
    first, end = line.split()[0].split("-")
    return int(first, 16) <= address < int(end, 16)


async def test_what_is_not_plain_is_left_to_a_thread(log: DirectFile) -> None:
    assert begun(log, [b"x" * 100], 4096) is None, "no whole page"
    assert begun(log, [b"x" * 100, bytes(3986)], 4106) is None, "a page that is not remembered"
    assert begun(log, [b"x" * 5 * 4096], 4096) is None, "more than is gathered"
    log.truncate(SIZE)
    assert begun(log, [b"x" * 4096], 4096) is None, "a size that is not durable"


class EndedWrites:
    """Writes that end at once, with what the kernel would say."""

    def __init__(self, result: int) -> None:
        self._result = result

    def begin(self, descriptor: int, address: int, size: int, position: int, on_end: OnEnd) -> None:
        on_end(self._result)


@pytest.mark.parametrize(("result", "number"), [(-errno.ENOSPC, errno.ENOSPC), (4096, errno.EIO), (0, errno.EIO)])
async def test_a_write_that_fails_or_ends_early_says_so(
    log: DirectFile, monkeypatch: pytest.MonkeyPatch, result: int, number: int
) -> None:
    monkeypatch.setattr(files, "kernel_writes", lambda: EndedWrites(result))
    ended = begun(log, [b"x" * 8192], 4096)
    assert ended is not None
    failure = await ended
    assert isinstance(failure, OSError)
    assert failure.errno == number
    assert begun(log, [b"x" * 96, bytes(4000)], 4196) is None, "what the page holds now is not known"


async def test_what_the_kernel_refuses_is_left_to_a_thread(log: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    read_only = os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setattr(log, "_direct", DirectDescriptor(read_only))
    assert begun(log, [b"x" * 4096], 4096) is None
    os.close(read_only)
    monkeypatch.undo()
    monkeypatch.setattr(files, "kernel_writes", lambda: None)
    assert begun(log, [b"x" * 4096], 4096) is None


async def test_many_writes_of_a_loop_end_each_for_its_own_file(tmp_path: Path, log: DirectFile) -> None:
    others = [open_file(tmp_path / str(number), create=True, direct=True) for number in range(5)]
    for other in others:
        other.allocate(SIZE)
        other.datasync()
    ends = [begun(other, [bytes([number]) * 4096 * (number + 1)], 0) for number, other in enumerate(others[:3])]
    assert [end is not None and await end for end in ends] == [None] * 3
    assert [other.pread(SIZE, 0).rstrip(b"\0") for other in others[1:3]] == [b"\1" * 8192, b"\2" * 12_288]
    for other in others:
        other.close()


def test_a_reader_sees_what_was_written_directly_at_once(tmp_path: Path) -> None:
    file = open_file(tmp_path / "log", create=True, direct=True)
    file.allocate(SIZE)
    assert file.pread(4096, 8192) == bytes(4096)
    file.pwritev((b"a" * 4096,), 8192)
    file.pwritev((b"b" * 10,), 9000)
    assert file.pread(4096, 8192) == b"a" * 808 + b"b" * 10 + b"a" * 3278
    file.close()


def test_where_direct_writes_are_unknown_files_are_written_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_DIRECT", 0)
    file = open_file(tmp_path / "log", create=True, direct=True)
    assert type(file) is SystemFile
    file.close()


def test_a_direct_file_that_is_refused_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open

    def refuse_direct(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DSYNC:
            raise OSError(24, "too many open files")
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse_direct)
    with pytest.raises(OSError, match="too many"):
        open_file(tmp_path / "log", create=True, direct=True)
    monkeypatch.undo()
    assert (tmp_path / "log").resolve() not in open_paths()


def open_paths() -> set[Path]:
    """The files of this process. Other threads of it may open and close some meanwhile."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(descriptor.readlink())
    return found
