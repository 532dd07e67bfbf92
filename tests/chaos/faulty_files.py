"""Disks that fail on command: the real files, with errors according to a control file.

The control file is JSON; while it does not exist there is no fault. It is checked before each operation, so that a fault begins
and ends with the file. A failed write may leave a part of its bytes, as on a real disk.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from stratalog_core.ports import BeginsWrites, Buffer, File, OnWritten
from stratalog_core.system import SystemFiles

Operation = Literal["write", "sync", "read"]


class DiskFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A disk's faults: operations that fail with EIO, no space left, or a delay of each operation."""

    failing: tuple[Operation, ...] = ()
    is_full: bool = False
    delay_s: float = 0.0


HEALTHY = DiskFault()
_decoder = msgspec.json.Decoder(DiskFault)


def set_fault(control: Path, fault: DiskFault) -> None:
    """Start ``fault`` in the process that watches ``control``."""
    aside = control.with_suffix(".tmp")
    aside.write_bytes(msgspec.json.encode(fault))
    os.replace(aside, control)


def clear_fault(control: Path) -> None:
    """End the fault, if there is one."""
    control.unlink(missing_ok=True)


class _Control:
    def __init__(self, path: Path) -> None:
        self._path = path

    def now(self) -> DiskFault:
        try:
            return _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return HEALTHY

    def before(self, operation: Operation, *, takes_space: bool = False) -> None:
        """Raise ``OSError`` if the operation must fail; delay it if the disk is slow."""
        fault = self.now()
        if fault.delay_s:
            time.sleep(fault.delay_s)
        if operation in fault.failing:
            raise OSError(errno.EIO, f"injected: {operation} failed")
        if takes_space and fault.is_full:
            raise OSError(errno.ENOSPC, "injected: no space left")


class FaultyFile:
    """A real file behind a control; see :class:`stratalog_core.ports.File`."""

    def __init__(self, file: File, control: _Control) -> None:
        self._file = file
        self._control = control
        self.size, self.truncate, self.close = file.size, file.truncate, file.close

    def pread(self, length: int, position: int) -> bytes:
        self._control.before("read")
        return self._file.pread(length, position)

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        # A full disk still accepts writes within a file's allocated space.
        takes_space = position + sum(map(len, buffers)) > self.size()
        try:
            self._control.before("write", takes_space=takes_space)
        except OSError:
            # After a failed write the file's content is undefined: here a part of the write.
            self._file.pwritev(buffers[: len(buffers) // 2], position)
            raise
        self._file.pwritev(buffers, position)

    def begin_write(self, buffers: Sequence[Buffer], position: int, done: OnWritten) -> bool:
        """Begin a write. Returns False during a fault, so that the blocking write meets it; a later fault fails its end."""

        def ended(failure: OSError | None) -> None:
            if failure is None and {"write", "sync"}.intersection(self._control.now().failing):
                failure = OSError(errno.EIO, "injected: a write that was under way failed")
            done(failure)

        file = self._file
        return self._control.now() == HEALTHY and isinstance(file, BeginsWrites) and file.begin_write(buffers, position, ended)

    def datasync(self) -> None:
        self._control.before("sync")
        self._file.datasync()

    def allocate(self, size: int) -> None:
        self._control.before("write", takes_space=True)
        self._file.allocate(size)


class FaultyFiles(SystemFiles):
    """Real files under ``root`` with the control file ``faults``."""

    def __init__(self, root: Path, *, faults: Path) -> None:
        super().__init__(root)
        self._control = _Control(faults)

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> FaultyFile:  # type: ignore[override]
        if create:
            self._control.before("write", takes_space=True)
        return FaultyFile(super().open(path, create=create, direct=direct), self._control)

    def read(self, path: str) -> bytes:
        self._control.before("read")
        return super().read(path)

    def write_atomic(self, path: str, content: bytes) -> None:
        self._control.before("write", takes_space=True)
        self._control.before("sync")
        super().write_atomic(path, content)

    def sync_directory(self, path: str) -> None:
        self._control.before("sync")
        super().sync_directory(path)

    def free_bytes(self) -> int:
        return 0 if self._control.now().is_full else super().free_bytes()
