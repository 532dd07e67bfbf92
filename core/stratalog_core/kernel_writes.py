"""Writes that the kernel carries out by itself, for files that are written around the page cache: Linux AIO.

A thread that waits for the disk has to be woken twice, and needs the interpreter each time, while the event loop holds it:
measured 7 switches between threads for a write of 64 KiB, and twice the CPU. Here a write is one system call, and its end an
event of the loop. It is the oldest interface of that kind: io_uring does the same, and containers mostly forbid it.

``begin`` may block where the file system has to allocate; ``DirectFile`` watches that. Where the system knows no such
writes, there are none.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import platform
import struct
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

_NUMBERS: Final = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Of ``io_setup``, ``io_destroy``, ``io_getevents`` and ``io_submit``: the C library has no names for them."""
IN_FLIGHT_MAX: Final = 64
_CONTROL_BLOCK: Final = struct.Struct("=QIiHhIQQqQII")
"""``struct iocb`` of linux/aio_abi.h: data, key, flags, operation, priority, file, memory, bytes, position, 0, flags, event."""
_EVENT: Final = struct.Struct("=QQqq")
_NONE, _ONE, _ALL = map(ctypes.c_long, (0, 1, IN_FLIGHT_MAX))
_WRITE: Final = 1
_TELL_EVENT: Final = 1

OnEnd = Callable[[int], None]
"""Gets the bytes that were written, or a negative error number."""

_log = logging.getLogger(__name__)


class KernelWrites:
    """The writes that one event loop has under way, ``IN_FLIGHT_MAX`` at most: as many ends as are seen in one look, so that
    none is left behind whose event has been read already.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raises ``OSError``."""
        self._context = ctypes.c_ulong(0)
        self._event = -1
        # The interpreter is kept during these calls: they do not wait, and to get it back would be waiting.
        self._call = ctypes.PyDLL(None, use_errno=True).syscall
        self._setup, self._destroy, self._events, self._submit = map(ctypes.c_long, _NUMBERS[platform.machine()])
        self._under_way: dict[int, OnEnd] = {}
        self._next_number = 0
        self._block = ctypes.create_string_buffer(_CONTROL_BLOCK.size)
        self._blocks = (ctypes.c_void_p * 1)(ctypes.addressof(self._block))
        self._ended = ctypes.create_string_buffer(_EVENT.size * IN_FLIGHT_MAX)
        self._checked(self._setup, _ALL, ctypes.byref(self._context))
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._event, self._look)

    def __del__(self) -> None:
        # Waits for what is under way: until then the kernel reads the memory that was given to it.
        if self._context.value:
            self._call(self._destroy, self._context)
        if self._event >= 0:
            os.close(self._event)

    def begin(self, descriptor: int, address: int, size: int, position: int, on_end: OnEnd) -> None:
        """Write ``size`` bytes at ``address``; ``on_end`` keeps them alive and is called from the loop. Raises ``OSError``."""
        if len(self._under_way) >= IN_FLIGHT_MAX:
            raise BlockingIOError(errno.EAGAIN, f"{IN_FLIGHT_MAX} writes are under way")
        self._next_number = number = self._next_number + 1
        _CONTROL_BLOCK.pack_into(
            self._block, 0, number, 0, 0, _WRITE, 0, descriptor, address, size, position, 0, _TELL_EVENT, self._event
        )  # fmt: skip
        self._under_way[number] = on_end
        try:
            self._checked(self._submit, self._context, _ONE, self._blocks)
        except OSError:
            del self._under_way[number]
            raise

    def _look(self) -> None:
        try:  # noqa: SIM105 (a context manager costs more than the call)
            os.eventfd_read(self._event)
        except BlockingIOError:
            pass
        try:
            count = self._checked(self._events, self._context, _NONE, _ALL, self._ended, _NONE)
        except InterruptedError:
            # Said only where there is none, which happens: the look before has seen its end already.
            return
        for index in range(count):
            number, _, result, _ = _EVENT.unpack_from(self._ended, index * _EVENT.size)
            try:
                self._under_way.pop(number)(result)
            except Exception:
                # The others are told all the same: nobody else will tell them.
                _log.exception("the end of a write was not taken")

    def _checked(self, *arguments: Any) -> int:
        result = int(self._call(*arguments))
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return result


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, KernelWrites | None] = WeakKeyDictionary()


def kernel_writes() -> KernelWrites | None:
    """Those of the running loop; None if the system has none, or has no more of them to give."""
    loop = asyncio.get_running_loop()
    try:
        return _of_loops[loop]
    except KeyError:
        pass
    made = None
    if platform.system() == "Linux" and platform.machine() in _NUMBERS:
        try:
            made = KernelWrites(loop)
        except (OSError, NotImplementedError):
            made = None
    _of_loops[loop] = made
    return made
