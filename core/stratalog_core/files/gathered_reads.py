"""Reads several extents of a file concurrently, around the page cache, into one piece of memory.

Direct reads are whole, aligned pages: each extent is read together with the rest of its first and last page, and its view
leaves that rest out. The memory is reused when no view of it is left.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from stratalog_core.files.kernel_io import PAGE_BYTES, Transfer
from stratalog_core.memory.receive_buffers import ReceiveBuffers
from stratalog_core.ports import Extent, OnRead

_ROUNDED_TO: Final = 256 * 1024
"""Sizes are rounded up to this, so that reads of similar size reuse the same memory."""


class GatheredReads:
    """``begin`` starts transfers and returns how many; ``done`` is called when those have ended.

    This object keeps no reference to the transfers, which refer to it: a reference cycle would hold the memory until the next
    garbage collection.
    """

    __slots__ = ("_done", "_failure", "_left", "_views")

    def __init__(self, done: OnRead) -> None:
        self._done = done
        self._failure: OSError | None = None
        self._left = 0
        self._views: list[memoryview] = []

    def begin(self, extents: Sequence[Extent], buffers: ReceiveBuffers, begin: Callable[[Sequence[Transfer]], int]) -> None:
        """Start to read. Raises ``OSError`` if no read could be started."""
        pages = [pages_of(extent) for extent in extents]
        size = sum([end - start for start, end in pages]) + PAGE_BYTES
        taken = buffers.take(-(-size // _ROUNDED_TO) * _ROUNDED_TO)
        address = ctypes.addressof(ctypes.c_char.from_buffer(taken))
        transfers: list[Transfer] = []
        at = -address % PAGE_BYTES
        for (start, end), (position, length) in zip(pages, extents, strict=True):
            wanted_end = position - start + length
            self._views.append(taken[at + position - start : at + wanted_end])
            transfers.append(Transfer(address + at, end - start, start, partial(self._ended, wanted_end)))
            at += end - start
        self._left = begin(transfers)
        if self._left < len(transfers):
            self._failure = BlockingIOError(errno.EAGAIN, f"only {self._left} of {len(transfers)} reads found room")

    def _ended(self, wanted: int, result: int) -> None:
        self._left -= 1
        if result < 0:
            self._failure = OSError(-result, "a direct read failed")
        elif result < wanted:
            self._failure = OSError(errno.EIO, f"a direct read ended after {result} bytes, {wanted} were wanted")
        if not self._left:
            self._done(self._failure or self._views)


def pages_of(extent: Extent) -> tuple[int, int]:
    """Return the start and the end of the pages that contain the extent."""
    position, length = extent
    return position // PAGE_BYTES * PAGE_BYTES, -(-(position + length) // PAGE_BYTES) * PAGE_BYTES
