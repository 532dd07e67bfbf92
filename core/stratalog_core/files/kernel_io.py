"""Asynchronous writes and reads by the kernel (Linux AIO) for files that are used around the page cache.

A thread that waits for the disk is woken twice and needs the interpreter each time, while the event loop holds it: a write of
64 KiB took 7 thread switches and twice the CPU. Here a write, or the reads of many extents, is one system call, and its
completion is an event of the loop. io_uring does the same, but most containers forbid it.

Submitting a write may block if the file system has to allocate blocks; ``DirectFile`` measures that. On systems without these
calls there are no kernel transfers. Reads have a context of their own, so that writes never wait for them.
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
"""Numbers of ``io_setup``, ``io_destroy``, ``io_getevents`` and ``io_submit``, which the C library does not wrap."""
IN_FLIGHT_MAX: Final = 64
PAGE_BYTES: Final = 4096
"""Transfers around the page cache begin and end at multiples of this, in the file and in memory."""
BACKGROUND_BYTES_MAX: Final = 1024 * 1024
"""Size of one background transfer. On a disk of 0.8 GB/s a durable write of 64 KiB took 0.3 ms alone, 2 ms during consecutive
transfers of this size, 8 ms during transfers of 4 MiB, and 39 ms during four of those at a time."""
_CONTROL_BLOCK: Final = struct.Struct("=QIiHhIQQqQII")
"""``struct iocb`` of linux/aio_abi.h: data, key, flags, operation, priority, file, memory, bytes, position, 0, flags, event."""
_EVENT: Final = struct.Struct("=QQqq")
_NONE, _ONE, _ALL = map(ctypes.c_long, (0, 1, IN_FLIGHT_MAX))
_READ: Final = 0
_WRITE: Final = 1
_TELL_EVENT: Final = 1

OnEnd = Callable[[int], None]
"""Called with the number of bytes transferred, or with a negative error number."""

BeginWrite = Callable[[int, int, int, int, OnEnd], None]
"""See ``KernelWrites.begin``."""

_log = logging.getLogger(__name__)


class ReadsByKernel(Protocol):
    """See ``KernelReads``."""

    @property
    def buffers(self) -> ReceiveBuffers: ...
    def begin_all(self, descriptor: int, transfers: Sequence[Transfer], /) -> int: ...


class Transfer(NamedTuple):
    """Read ``size`` bytes at ``position`` into memory at ``address``. The loop calls ``on_end``, which keeps the memory
    alive.
    """

    address: int
    size: int
    position: int
    on_end: OnEnd


class KernelTransfers:
    """Transfers of one kind in one event loop, at most ``IN_FLIGHT_MAX``. One call fetches that many completions, so that none
    is left without an event.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raises ``OSError``."""
        self._context = ctypes.c_ulong(0)
        self._event = -1
        # Do not release the interpreter's lock during these calls: they do not block, and getting it back might.
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
        # Waits for transfers in progress: until then the kernel uses their memory.
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
            # Raised only if there is no completion, because the previous call has fetched it already.
            return
        for index in range(count):
            number, _, result, _ = _EVENT.unpack_from(self._ended, index * _EVENT.size)
            try:
                self._under_way.pop(number)(result)
            except Exception:
                # The other callbacks must run nevertheless: nothing else would call them.
                _log.exception("the completion of a write or read was not handled")

    def _checked(self, *arguments: Any) -> int:
        result = int(self._call(*arguments))
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return result


class KernelWrites(KernelTransfers):
    """One write per call: a group commit needs no more."""

    def begin(self, descriptor: int, address: int, size: int, position: int, on_end: OnEnd) -> None:
        """Write ``size`` bytes at ``address``; ``on_end`` keeps them alive and is called from the loop. Raises ``OSError``."""
        if len(self._under_way) >= IN_FLIGHT_MAX:
            raise BlockingIOError(errno.EAGAIN, f"{IN_FLIGHT_MAX} writes are in progress, which is the maximum")
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
    """Reads of many extents of a file at once, and reusable memory for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.buffers = ReceiveBuffers()

    def begin_all(self, descriptor: int, transfers: Sequence[Transfer]) -> int:
        """Start the transfers in order, in one call; return how many were started. Raises ``OSError`` if none was."""
        wanted = min(len(transfers), IN_FLIGHT_MAX - len(self._under_way))
        if not wanted:
            raise BlockingIOError(errno.EAGAIN, f"{IN_FLIGHT_MAX} reads are in progress, which is the maximum")
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
    """Return the running loop's kernel writes; None if the system has none, or no more contexts."""
    return _of_running_loop(_writes, KernelWrites)


def kernel_reads() -> KernelReads | None:
    """Return the running loop's kernel reads; None if the system has none, or no more contexts."""
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
