"""Reads that the kernel carries out by itself, many places of a file with one system call: see ``kernel_writes.py``.

They have a context of their own, so that they never keep a write waiting, and memory that is used again when nobody sees it any
more.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import platform
from collections.abc import Sequence
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from stratalog_core.kernel_writes import _CONTROL_BLOCK, _NUMBERS, _TELL_EVENT, IN_FLIGHT_MAX, KernelWrites, OnEnd
from stratalog_core.receive_buffers import ReceiveBuffers

_READ: Final = 0


class Transfer(NamedTuple):
    """``size`` bytes from the file at ``position`` to memory at ``address``. ``on_end`` keeps the memory alive; the loop calls
    it.
    """

    address: int
    size: int
    position: int
    on_end: OnEnd


class KernelReads(KernelWrites):
    """The reads that one event loop has under way, ``IN_FLIGHT_MAX`` at most; their ends are told as those of writes are."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.buffers = ReceiveBuffers()
        self._read_blocks = ctypes.create_string_buffer(_CONTROL_BLOCK.size * IN_FLIGHT_MAX)
        first = ctypes.addressof(self._read_blocks)
        self._places = (ctypes.c_void_p * IN_FLIGHT_MAX)(*range(first, first + len(self._read_blocks), _CONTROL_BLOCK.size))

    def begin_all(self, descriptor: int, transfers: Sequence[Transfer]) -> int:
        """How many of them were begun, from the first on, in one call. Raises ``OSError`` if none was."""
        wanted = min(len(transfers), IN_FLIGHT_MAX - len(self._under_way))
        if not wanted:
            raise BlockingIOError(errno.EAGAIN, f"{IN_FLIGHT_MAX} reads are under way")
        first = self._next_number + 1
        for index in range(wanted):
            address, size, position, on_end = transfers[index]
            self._next_number = number = first + index
            _CONTROL_BLOCK.pack_into(
                self._read_blocks, index * _CONTROL_BLOCK.size,
                number, 0, 0, _READ, 0, descriptor, address, size, position, 0, _TELL_EVENT, self._event,
            )  # fmt: skip
            self._under_way[number] = on_end
        begun = 0
        try:
            begun = self._checked(self._submit, self._context, ctypes.c_long(wanted), self._places)
        finally:
            for number in range(first + begun, first + wanted):
                del self._under_way[number]
        return begun


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, KernelReads | None] = WeakKeyDictionary()


def kernel_reads() -> KernelReads | None:
    """Those of the running loop; None if the system has none, or has no more of them to give."""
    loop = asyncio.get_running_loop()
    try:
        return _of_loops[loop]
    except KeyError:
        pass
    made = None
    if platform.system() == "Linux" and platform.machine() in _NUMBERS:
        try:
            made = KernelReads(loop)
        except (OSError, NotImplementedError):
            made = None
    _of_loops[loop] = made
    return made
