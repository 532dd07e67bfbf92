"""Reads around the page cache, from the disk itself, into the caller's memory.

A read through the page cache of bytes that were just written returns the cache's copy: it does not verify the disk, and
has to find and copy a page per 4 KiB. A direct read avoids both. It reads whole, aligned pages: the range together with the
rest of its first and last page, which the returned view leaves out.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

from stratalog_core.files.gathered_reads import pages_of
from stratalog_core.files.kernel_io import BACKGROUND_BYTES_MAX, PAGE_BYTES
from stratalog_core.ports import Extent

_DIRECT: Final = getattr(os, "O_DIRECT", 0)


def memory_bytes(start: int, length: int) -> int:
    """Return the bytes of memory that ``read_uncached`` needs for a range: its pages, and one more for alignment."""
    first, end = pages_of(Extent(start, length))
    return end - first + PAGE_BYTES


def read_uncached(path: Path, start: int, length: int, memory: memoryview) -> memoryview:
    """Read ``length`` bytes from ``start`` on into ``memory``; return a view of them, shorter only at the file's end. Blocks.

    Uses the page cache if the file system does not support direct reads. Raises ``OSError``.
    """
    first, end = pages_of(Extent(start, length))
    at = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PAGE_BYTES
    pages = memory[at : at + end - first]
    descriptor = _open(path)
    try:
        filled = _fill(descriptor, pages, first)
    finally:
        os.close(descriptor)
    return pages[start - first : min(filled, start - first + length)]


def _fill(descriptor: int, pages: memoryview, position: int) -> int:
    """Fill the pages and return the number of bytes read. A read that is not a whole number of pages has reached the end of
    the file.
    """
    filled = 0
    while filled < len(pages):
        read = os.preadv(descriptor, [pages[filled : filled + BACKGROUND_BYTES_MAX]], position + filled)
        filled += read
        if not read or read % PAGE_BYTES:
            break
    return filled


def _open(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | _DIRECT)
    except OSError as refused:
        if refused.errno != errno.EINVAL:
            raise
        return os.open(path, flags)
