"""Simulated transfers around the page cache, used through production's ``DirectFile``.

If a machine loses power during a write, any of its pages may have reached the platter; a write that has ended is durable.
"""

from __future__ import annotations

import ctypes
import errno
import random
from collections.abc import Callable, Sequence
from functools import partial
from math import log

from simulation.world.disk import Disk, SimulatedFile
from simulation.world.loop import SimulatedLoop
from stratalog_core.files.kernel_io import BeginWrite, OnEnd, ReadsByKernel, Transfer
from stratalog_core.files.open_files import DirectFile
from stratalog_core.memory.receive_buffers import ReceiveBuffers

TRANSFER_S = 0.0005
"""Mean time of one transfer."""


class SimulatedTransfers:
    """The asynchronous transfers of one incarnation of a process. Completions for a dead process are dropped.

    None that begins before ``hangs_until`` ends before it.
    """

    def __init__(self, loop: SimulatedLoop, randomness: random.Random, hangs_until: Callable[[], float] = lambda: 0.0) -> None:
        self.loop = loop
        self._hangs_until = hangs_until
        self.buffers = ReceiveBuffers()
        self._randomness = randomness

    def open_direct(self, disk: Disk, file: SimulatedFile) -> DirectFile:
        """Return ``file`` opened for use around the page cache."""
        return DirectFile(file, SimulatedDirect(disk, file, self))

    def later_s(self) -> float:
        return max(self._hangs_until() - self.loop.time(), 0.0) - log(1.0 - self._randomness.random()) * TRANSFER_S


class SimulatedDirect:
    """See :class:`stratalog_core.files.open_files.Direct`."""

    def __init__(self, disk: Disk, file: SimulatedFile, transfers: SimulatedTransfers) -> None:
        self.number = -1
        self.buffers = transfers.buffers
        self._disk = disk
        self._file = file
        self._transfers = transfers

    def write(self, pages: memoryview, position: int) -> int:
        self._file.pwritev((pages,), position)
        self._disk.check_sync()
        self._file.content.sync_last()
        return len(pages)

    def writes(self) -> BeginWrite | None:
        return self._begin_write

    def reads(self) -> ReadsByKernel | None:
        return self

    def monotonic(self) -> float:
        return self._transfers.loop.time()

    def close(self) -> None:
        pass

    def _begin_write(self, number: int, address: int, size: int, position: int, on_end: OnEnd) -> None:
        content = self._file.content
        written = content.write(ctypes.string_at(address, size), position)

        def ended() -> None:
            if self._disk.faults.write_fails or self._disk.faults.sync_fails:
                on_end(-errno.EIO)
                return
            content.sync_write(written)
            on_end(size)

        self._transfers.loop.call_later(self._transfers.later_s(), ended)

    def begin_all(self, number: int, transfers: Sequence[Transfer], /) -> int:
        for transfer in transfers:
            self._transfers.loop.call_later(self._transfers.later_s(), partial(self._read, transfer))
        return len(transfers)

    def _read(self, transfer: Transfer) -> None:
        if self._disk.faults.read_fails:
            transfer.on_end(-errno.EIO)
            return
        found = bytes(self._file.content.now[transfer.position : transfer.position + transfer.size])
        ctypes.memmove(transfer.address, found, len(found))
        transfer.on_end(len(found))
