"""Real files that remember what was written and not synced, so that a killed process can be made one that lost power.

Before each write what it replaces goes to a file beside the directory (``<root>.unsynced/``), and leaves it when the write is
durable. ``kill -9`` leaves the page cache behind; ``lose_power`` then undoes what was not durable, each page by itself. Names
(creations, renames, removals) are not undone: the simulator does that.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from stratalog_core.files.kernel_io import PAGE_BYTES
from stratalog_core.files.open_files import DirectFile
from stratalog_core.ports import BeginsWrites, Buffer, File, OnWritten
from stratalog_core.system import SystemFiles

_RECORD: Final = struct.Struct(">QQI")
"""Position and length of the write, and how much of that range the file had before; what it had follows."""
KEPT_CHANCE: Final = 0.4


class UnsyncedFile:
    """See :class:`stratalog_core.ports.File`; one write of a file at a time."""

    def __init__(self, file: File, undo: Path) -> None:
        self._file = file
        self._undo = os.open(undo, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND, 0o644)
        self.size, self.pread, self.allocate, self.truncate = file.size, file.pread, file.allocate, file.truncate

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        self._note(buffers, position)
        self._file.pwritev(buffers, position)
        if isinstance(self._file, DirectFile):
            self._durable()

    def begin_write(self, buffers: Sequence[Buffer], position: int, done: OnWritten) -> bool:
        if not isinstance(self._file, BeginsWrites):
            return False
        self._note(buffers, position)
        if self._file.begin_write(buffers, position, partial(self._ended, done)):
            return True
        self._durable()
        return False

    def _ended(self, done: OnWritten, failure: OSError | None) -> None:
        self._durable()
        done(failure)

    def datasync(self) -> None:
        self._file.datasync()
        self._durable()

    def close(self) -> None:
        os.close(self._undo)
        self._file.close()

    def _note(self, buffers: Sequence[Buffer], position: int) -> None:
        length = sum(map(len, buffers))
        before = self._file.pread(length, position)
        os.write(self._undo, _RECORD.pack(position, length, len(before)) + before)

    def _durable(self) -> None:
        os.ftruncate(self._undo, 0)


class UnsyncedFiles(SystemFiles):
    """Real files below ``root``."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._undo = _undo_directory(root)
        self._undo.mkdir(exist_ok=True)

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> UnsyncedFile:  # type: ignore[override]
        return UnsyncedFile(super().open(path, create=create, direct=direct), self._undo / quote(path, safe=""))


def lose_power(root: Path, randomness: random.Random) -> int:
    """Undo what a killed process had not made durable below ``root``; how many pages were undone."""
    undone = 0
    for undo in sorted(_undo_directory(root).iterdir()):
        path = root / unquote(undo.name)
        content = undo.read_bytes()
        if content and path.exists():
            undone += _undo_writes(path, content, randomness)
        undo.unlink()
    return undone


def _undo_directory(root: Path) -> Path:
    return root.with_name(f"{root.name}.unsynced")


def _undo_writes(path: Path, records: bytes, randomness: random.Random) -> int:
    """The latest first, so that what is left of each page is something that it has held."""
    found = []
    at = 0
    while at + _RECORD.size <= len(records):
        position, length, kept = _RECORD.unpack_from(records, at)
        at += _RECORD.size
        found.append((position, length, records[at : at + kept]))
        at += kept
    undone = 0
    with path.open("r+b") as file:
        for position, length, before in reversed(found):
            undone += _undo_write(file.fileno(), position, length, before, randomness)
    return undone


def _undo_write(descriptor: int, position: int, length: int, before: bytes, randomness: random.Random) -> int:
    undone, end = 0, position
    start = position
    while start < position + length:
        stop = min(start + PAGE_BYTES - start % PAGE_BYTES, position + length)
        if randomness.random() < KEPT_CHANCE:
            end = stop
        else:
            old = before[start - position : stop - position]
            os.pwrite(descriptor, old.ljust(min(stop, os.fstat(descriptor).st_size) - start, b"\0"), start)
            undone += 1
        start = stop
    # The file had ended within the write: it ends after the last page that reached the disk.
    if len(before) < length and os.fstat(descriptor).st_size == position + length:
        os.ftruncate(descriptor, max(end, position + len(before)))
    return undone
