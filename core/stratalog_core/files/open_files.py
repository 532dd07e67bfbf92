"""Files that are written through the page cache (``SystemFile``) or around it (``DirectFile``).

A write through the page cache copies into pages that the kernel has to find, keep and write back later. A log is written
once, in order, and rarely read, so it gains nothing from that: writing around the cache (``O_DIRECT`` and ``O_DSYNC``) halves
the cost of a bookie's bytes (``docs/lab/performance.md``). Large reads around the cache cost a third. Small reads go through
it, because neighbouring entries are likely to be read next. The kernel evicts pages that are written directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from stratalog_core.files.gathered_reads import GatheredReads
from stratalog_core.files.kernel_io import (
    BACKGROUND_BYTES_MAX,
    PAGE_BYTES,
    BeginWrite,
    ReadsByKernel,
    kernel_reads,
    kernel_writes,
)
from stratalog_core.ports import Buffer, Extent, File, OnRead, OnWritten

_IOV_MAX: Final = 1024
_GATHERED_BYTES: Final = 4 * 1024 * 1024
_HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_SUBMIT_S_MAX: Final = 0.05
"""If submitting a write takes longer (the file system allocates blocks), later writes are made by threads, not by the loop."""


class SystemFile:
    """A file by descriptor; see :class:`stratalog_core.ports.File`."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def pread(self, length: int, position: int) -> bytes:
        content = os.pread(self._descriptor, length, position)
        if len(content) == length or not content:
            return content
        # A signal or a page boundary may shorten a read; only an empty read means the end of the file.
        pieces, done = [content], len(content)
        while done < length and (content := os.pread(self._descriptor, length - done, position + done)):
            pieces.append(content)
            done += len(content)
        return b"".join(pieces)

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        for first in range(0, len(buffers), _IOV_MAX):
            position = self._write_all(list(buffers[first : first + _IOV_MAX]), position)

    def _write_all(self, buffers: list[Buffer], position: int) -> int:
        while buffers:
            written = os.pwritev(self._descriptor, buffers, position)
            position += written
            while buffers and written >= len(buffers[0]):
                written -= len(buffers.pop(0))
            if buffers and written:
                buffers[0] = memoryview(buffers[0])[written:]
        return position

    def datasync(self) -> None:
        os.fdatasync(self._descriptor)

    def allocate(self, size: int) -> None:
        os.posix_fallocate(self._descriptor, 0, size)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Direct(Protocol):
    """An open file for transfers of whole pages around the page cache. The simulator has its own implementation."""

    @property
    def number(self) -> int:
        """The descriptor that ``writes`` and ``reads`` take."""
        ...

    def write(self, pages: memoryview, position: int) -> int:
        """Write and return the number of bytes written. Raises ``OSError``."""
        ...

    def writes(self) -> BeginWrite | None:
        """A function that starts an asynchronous write by the kernel; None if the system has none."""
        ...

    def reads(self) -> ReadsByKernel | None:
        """Asynchronous reads by the kernel; None if the system has none."""
        ...

    def monotonic(self) -> float: ...
    def close(self) -> None: ...


class DirectDescriptor:
    """See :class:`Direct`."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def write(self, pages: memoryview, position: int) -> int:
        return os.pwrite(self.number, pages, position)

    def writes(self) -> BeginWrite | None:
        writes = kernel_writes()
        return None if writes is None else writes.begin

    def reads(self) -> ReadsByKernel | None:
        return kernel_reads()

    def monotonic(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        if self.number >= 0:
            os.close(self.number)
            self.number = -1


class DirectFile:
    """A file written around the page cache by one writer at a time. Writes of ``pwritev`` are durable when it returns.

    Direct writes are whole, aligned pages. So a write is copied into an aligned buffer, after the existing bytes of its first
    page, and padded with the existing bytes of its last page. The last page is remembered, so that appending to a log reads
    nothing.
    """

    __slots__ = ("_direct", "_file", "_may_submit", "_page_at", "_page_content", "_synced", "_writes_are_durable")

    def __init__(self, file: File, direct: Direct, *, writes_are_durable: bool = True) -> None:
        """``file`` is the same file through the page cache."""
        self._file = file
        self._direct = direct
        self._writes_are_durable = writes_are_durable
        self._synced = False
        self._may_submit = True
        self._page_at = -1
        self._page_content = b""

    def size(self) -> int:
        return self._file.size()

    def pread(self, length: int, position: int) -> bytes:
        return self._file.pread(length, position)

    def begin_write(self, buffers: Sequence[Buffer], position: int, done: OnWritten) -> bool:
        """See :class:`stratalog_core.ports.BeginsWrites`. Serves only the simple case: whole pages after the last ones, in
        one write.
        """
        size, before = sum(map(len, buffers)), position % PAGE_BYTES
        start, filled = position - before, before + size
        known = not before or self._page_at == start
        if not (known and self._synced and self._may_submit) or filled % PAGE_BYTES or not 0 < filled <= _GATHERED_BYTES:
            return False
        begin = self._direct.writes()
        if begin is None:
            return False
        gathered = _take_gathered()
        view = gathered.view
        view[:before] = self._page_content[:before]
        for buffer in buffers:
            end = before + len(buffer)
            view[before:end] = buffer
            before = end
        last_page = bytes(view[filled - PAGE_BYTES : filled])
        begun_s = self._direct.monotonic()
        on_end = partial(self._ended, gathered, start, filled, last_page, done)
        try:
            begin(self._direct.number, gathered.address, filled, start, on_end)
        except OSError:
            # A blocking write either meets the same error, or succeeds because it does not need the resource that was short.
            _gathered_kept.append(gathered)
            return False
        self._page_at = -1
        self._may_submit = self._direct.monotonic() - begun_s < _SUBMIT_S_MAX
        return True

    def _ended(self, gathered: _Gathered, start: int, filled: int, last_page: bytes, done: OnWritten, result: int) -> None:
        _gathered_kept.append(gathered)
        if result != filled:
            done(OSError(-result if result < 0 else errno.EIO, f"a direct write of {filled} bytes ended with {result}"))
            return
        self._page_at, self._page_content = start + filled - PAGE_BYTES, last_page
        done(None)

    def begin_reads(self, extents: Sequence[Extent], done: OnRead) -> bool:
        """See :class:`stratalog_core.ports.BeginsReads`."""
        reads = self._direct.reads()
        if reads is None or not self._may_submit:
            return False
        begun_s = self._direct.monotonic()
        try:
            GatheredReads(done).begin(extents, reads.buffers, partial(reads.begin_all, self._direct.number))
        except OSError:
            return False
        self._may_submit = self._direct.monotonic() - begun_s < _SUBMIT_S_MAX
        return True

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        gathered = _take_gathered()
        try:
            self._write_gathered(gathered.view, buffers, position)
        finally:
            _gathered_kept.append(gathered)

    def _write_gathered(self, view: memoryview, buffers: Sequence[Buffer], position: int) -> None:
        filled = position % PAGE_BYTES
        start = position - filled
        if filled:
            view[:PAGE_BYTES] = self._page_content if self._page_at == start else self._page(start)
        self._page_at = -1
        start, filled = self._gather(view, buffers, start, filled)
        beyond = filled % PAGE_BYTES
        if beyond:
            last = start + filled - beyond
            view[filled : filled - beyond + PAGE_BYTES] = self._page(last)[beyond:]
            filled += PAGE_BYTES - beyond
        if filled:
            self._write_pages(view, start, filled)

    def _gather(self, view: memoryview, buffers: Sequence[Buffer], start: int, filled: int) -> tuple[int, int]:
        """Copy into the aligned buffer and write it whenever it is full. Return its start in the file and its fill level."""
        size = len(view)
        for buffer in buffers:
            end = filled + len(buffer)
            if end < size:
                view[filled:end] = buffer
                filled = end
                continue
            rest = memoryview(buffer)
            while len(rest):
                taken = min(len(rest), size - filled)
                view[filled : filled + taken] = rest[:taken]
                rest = rest[taken:]
                filled += taken
                if filled == size:
                    self._write_pages(view, start, filled)
                    start, filled = start + filled, 0
        return start, filled

    def _page(self, start: int) -> bytes:
        return self.pread(PAGE_BYTES, start).ljust(PAGE_BYTES, b"\0")

    def _write_pages(self, view: memoryview, start: int, size: int) -> None:
        done, piece = 0, size if self._writes_are_durable else BACKGROUND_BYTES_MAX
        while done < size:
            written = self._direct.write(view[done : min(done + piece, size)], start + done)
            if written <= 0 or written % PAGE_BYTES:
                raise OSError(errno.EIO, f"a direct write of {size - done} bytes ended after {written}")
            done += written
        self._page_at = start + size - PAGE_BYTES
        self._page_content = bytes(view[size - PAGE_BYTES : size])

    def datasync(self) -> None:
        """Sync what is not durable yet. If writes are durable, that is the size, once."""
        if not self._synced:
            self._file.datasync()
            self._synced = self._writes_are_durable

    def allocate(self, size: int) -> None:
        self._synced = False
        self._file.allocate(size)

    def truncate(self, size: int) -> None:
        self._synced, self._page_at = False, -1
        self._file.truncate(size)

    def close(self) -> None:
        self._direct.close()
        self._file.close()


class _Gathered:
    """Aligned memory for one write."""

    __slots__ = ("address", "view")

    def __init__(self) -> None:
        # Private: Python maps shared memory by default, which gets no huge pages.
        memory = mmap.mmap(-1, _GATHERED_BYTES + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # The kernel may be built without huge pages.
            memory.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start = -address % _HUGE_PAGE_BYTES
        self.address = address + start
        self.view = memoryview(memory)[start : start + _GATHERED_BYTES]


_gathered_kept: deque[_Gathered] = deque(maxlen=2)
"""Buffers that no write is using, kept because a new one costs a thousand page faults."""


def _take_gathered() -> _Gathered:
    try:
        return _gathered_kept.pop()
    except IndexError:
        return _Gathered()


def open_file(path: Path, *, create: bool, direct: bool, synchronous: bool = True) -> SystemFile | DirectFile:
    """Open for reading and writing. ``direct`` has no effect where the file system does not support direct writes.

    A direct file whose writes are not ``synchronous`` is durable after ``datasync``, and not before. Raises ``OSError``.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    descriptor = os.open(path, flags | (os.O_CREAT if create else 0), 0o644)
    if not direct or not _DIRECT:
        return SystemFile(descriptor)
    try:
        direct_flags = flags | _DIRECT | (os.O_DSYNC if synchronous else 0)
        direct_file = DirectDescriptor(os.open(path, direct_flags))
    except OSError as refused:
        if refused.errno == errno.EINVAL:
            return SystemFile(descriptor)
        os.close(descriptor)
        raise
    return DirectFile(SystemFile(descriptor), direct_file, writes_are_durable=synchronous)
