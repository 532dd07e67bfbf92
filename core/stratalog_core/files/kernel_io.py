"""Writes and reads that the kernel carries out by itself, for files that are used around the page cache: Linux AIO.

A thread that waits for the disk has to be woken twice, and needs the interpreter each time, while the event loop holds it:
measured 7 switches between threads for a write of 64 KiB, and twice the CPU. Here a write, or the reads of many places, is one
system call, and its end an event of the loop. It is the oldest interface of that kind: io_uring does the same, and containers
mostly forbid it.

To begin a write may block where the file system has to allocate; ``DirectFile`` watches that. Where the system knows no such
calls, there are none. Reads have a context of their own, so that they never keep a write waiting.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import platform
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from stratalog_core.memory.receive_buffers import ReceiveBuffers

_NUMBERS: Final = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Of ``io_setup``, ``io_destroy``, ``io_getevents`` and ``io_submit``: the C library has no names for them."""
IN_FLIGHT_MAX: Final = 64
PAGE_BYTES: Final = 4096
"""What is transferred around the page cache begins and ends at multiples of it, in the file and in memory."""
BACKGROUND_BYTES_MAX: Final = 1024 * 1024
"""So much is one transfer that nobody waits for. On a disk of 0.8 GB/s a durable write of 64 KiB took 0.3 ms alone, 2 ms beside
one such transfer after another, 8 ms beside those of 4 MiB, and 39 ms beside four of these at a time."""
_CONTROL_BLOCK: Final = struct.Struct("=QIiHhIQQqQII")
"""``struct iocb`` of linux/aio_abi.h: data, key, flags, operation, priority, file, memory, bytes, position, 0, flags, event."""
_EVENT: Final = struct.Struct("=QQqq")
_NONE, _ONE, _ALL = map(ctypes.c_long, (0, 1, IN_FLIGHT_MAX))
_READ: Final = 0
_WRITE: Final = 1
_TELL_EVENT: Final = 1

OnEnd = Callable[[int], None]
"""Gets the bytes that were written or read, or a negative error number."""

BeginWrite = Callable[[int, int, int, int, OnEnd], None]
"""See ``KernelWrites.begin``."""

_log = logging.getLogger(__name__)


class ReadsByKernel(Protocol):
    """See ``KernelReads``."""

    @property
    def buffers(self) -> ReceiveBuffers: ...
    def begin_all(self, descriptor: int, transfers: Sequence[Transfer], /) -> int: ...


class Transfer(NamedTuple):
    """``size`` bytes from the file at ``position`` to memory at ``address``. ``on_end`` keeps the memory alive; the loop calls
    it.
    """

    address: int
    size: int
    position: int
    on_end: OnEnd


class KernelTransfers:
    """What one event loop has under way of one kind, ``IN_FLIGHT_MAX`` at most: as many ends as are seen in one look, so that
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
        self._blocks = ctypes.create_string_buffer(_CONTROL_BLOCK.size * IN_FLIGHT_MAX)
        first = ctypes.addressof(self._blocks)
        self._places = (ctypes.c_void_p * IN_FLIGHT_MAX)(*range(first, first + len(self._blocks), _CONTROL_BLOCK.size))
        self._ended = ctypes.create_string_buffer(_EVENT.size * IN_FLIGHT_MAX)
        self._checked(self._setup, _ALL, ctypes.byref(self._context))
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._event, self._look)

    def __del__(self) -> None:
        # Waits for what is under way: until then the kernel uses the memory that was given to it.
        if self._context.value:
            self._call(self._destroy, self._context)
        if self._event >= 0:
            os.close(self._event)

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
                _log.exception("the end of a write or read was not taken")

    def _checked(self, *arguments: Any) -> int:
        result = int(self._call(*arguments))
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return result


class KernelWrites(KernelTransfers):
    """One write for each call: a group commit has no more."""

    def begin(self, descriptor: int, address: int, size: int, position: int, on_end: OnEnd) -> None:
        """Write ``size`` bytes at ``address``; ``on_end`` keeps them alive and is called from the loop. Raises ``OSError``."""
        if len(self._under_way) >= IN_FLIGHT_MAX:
            raise BlockingIOError(errno.EAGAIN, f"{IN_FLIGHT_MAX} writes are under way")
        self._next_number = number = self._next_number + 1
        _CONTROL_BLOCK.pack_into(
            self._blocks, 0, number, 0, 0, _WRITE, 0, descriptor, address, size, position, 0, _TELL_EVENT, self._event
        )  # fmt: skip
        self._under_way[number] = on_end
        try:
            self._checked(self._submit, self._context, _ONE, self._places)
        except OSError:
            del self._under_way[number]
            raise


class KernelReads(KernelTransfers):
    """Reads of many places of a file at once, and memory for them that is used again when nobody sees it any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.buffers = ReceiveBuffers()

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
                self._blocks, index * _CONTROL_BLOCK.size,
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


Transfers = TypeVar("Transfers", bound=KernelTransfers)
OfLoops: TypeAlias = WeakKeyDictionary[asyncio.AbstractEventLoop, Transfers | None]
_writes: OfLoops[KernelWrites] = WeakKeyDictionary()
_reads: OfLoops[KernelReads] = WeakKeyDictionary()


def kernel_writes() -> KernelWrites | None:
    """Those of the running loop; None if the system has none, or has no more of them to give."""
    return _of_running_loop(_writes, KernelWrites)


def kernel_reads() -> KernelReads | None:
    """Those of the running loop; None if the system has none, or has no more of them to give."""
    return _of_running_loop(_reads, KernelReads)


def _of_running_loop(of_loops: OfLoops[Transfers], kind: type[Transfers]) -> Transfers | None:
    loop = asyncio.get_running_loop()
    try:
        return of_loops[loop]
    except KeyError:
        made = of_loops[loop] = _made(kind, loop)
        return made


def _made(kind: type[Transfers], loop: asyncio.AbstractEventLoop) -> Transfers | None:
    if platform.system() != "Linux" or platform.machine() not in _NUMBERS:
        return None
    try:
        return kind(loop)
    except (OSError, NotImplementedError):
        return None
