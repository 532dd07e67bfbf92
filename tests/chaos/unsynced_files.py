"""Real files that remember unsynced writes, so that a killed process can be turned into one that lost power.

Before each write the bytes that it replaces go to a file beside the directory (``<root>.unsynced/``), and leave it when the
write is durable. ``kill -9`` leaves the page cache behind; ``lose_power`` then undoes the writes that were not durable, each
page independently. Names (creations, renames, removals) are not undone: the simulator does that.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from stratalog_core.files.kernel_io import PAGE_BYTES
from stratalog_core.files.open_files import DirectFile
from stratalog_core.ports import BeginsWrites, Buffer, File, OnWritten
from stratalog_core.system import SystemFiles

_RECORD: Final = struct.Struct(">QQI")
"""Position and length of the write, and how much of that range existed before; the old bytes follow."""
KEPT_CHANCE: Final = 0.4


class UnsyncedFile:
    """See :class:`stratalog_core.ports.File`. Only one write of a file at a time."""

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
    """Real files under ``root``."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._undo = _undo_directory(root)
        self._undo.mkdir(exist_ok=True)

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> UnsyncedFile:  # type: ignore[override]
        return UnsyncedFile(super().open(path, create=create, direct=direct), self._undo_of(path))

    def rename(self, source: str, target: str) -> None:
        """Rename the file and its undo file, so that unsynced writes are found under the new name."""
        super().rename(source, target)
        with suppress(FileNotFoundError):
            self._undo_of(source).replace(self._undo_of(target))

    def remove(self, path: str) -> None:
        """Remove the file and its undo file, which must not be applied to another file of this name."""
        super().remove(path)
        self._undo_of(path).unlink(missing_ok=True)

    def _undo_of(self, path: str) -> Path:
        return self._undo / quote(path, safe="")


def has_unsynced(root: Path) -> bool:
    """Return whether a power cut under ``root`` would take something now."""
    return any(undo.stat().st_size and _path(root, undo).exists() for undo in _undo_directory(root).iterdir())


def lose_power(root: Path, randomness: random.Random) -> int:
    """Undo the writes that killed processes had not made durable under ``root``; return the number of undone pages.

    Each page is lost independently. If anything was unsynced, at least one page is lost.
    """
    writes = list(_unsynced_writes(root))
    kept = iter(_draw_kept(sum(len(_pages(write)) for write in writes), randomness))
    undone = sum(_undo_write(write, kept) for write in writes)
    for undo in _undo_directory(root).iterdir():
        undo.unlink()
    return undone


def _undo_directory(root: Path) -> Path:
    return root.with_name(f"{root.name}.unsynced")


def _path(root: Path, undo: Path) -> Path:
    return root / unquote(undo.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """A write that was not durable."""

    path: Path
    position: int
    length: int
    before: bytes
    """The file's old bytes in the range, possibly fewer than ``length``."""


def _unsynced_writes(root: Path) -> Iterator[_Write]:
    """Yield the writes file by file, the latest first, so that each page ends with bytes that it once held."""
    for undo in sorted(_undo_directory(root).iterdir()):
        path = _path(root, undo)
        if path.exists():
            yield from reversed(_writes(path, undo.read_bytes()))


def _writes(path: Path, records: bytes) -> list[_Write]:
    found = []
    at = 0
    while at + _RECORD.size <= len(records):
        position, length, kept = _RECORD.unpack_from(records, at)
        at += _RECORD.size
        found.append(_Write(path=path, position=position, length=length, before=records[at : at + kept]))
        at += kept
    return found


def _draw_kept(pages: int, randomness: random.Random) -> list[bool]:
    """Draw for each page whether it reached the disk; at least one did not."""
    while True:
        kept = [randomness.random() < KEPT_CHANCE for _ in range(pages)]
        if not (kept and all(kept)):
            return kept


def _pages(write: _Write) -> list[tuple[int, int]]:
    """Split the range of a write into its pages."""
    end = write.position + write.length
    starts = [write.position, *range(write.position - write.position % PAGE_BYTES + PAGE_BYTES, end, PAGE_BYTES)]
    return list(pairwise([*starts, end]))


def _undo_write(write: _Write, kept: Iterator[bool]) -> int:
    undone, end = 0, write.position
    with write.path.open("r+b") as file:
        descriptor = file.fileno()
        for start, stop in _pages(write):
            if next(kept):
                end = stop
                continue
            old = write.before[start - write.position : stop - write.position]
            os.pwrite(descriptor, old.ljust(min(stop, os.fstat(descriptor).st_size) - start, b"\0"), start)
            undone += 1
        # The file had ended within the write: it now ends after the last page that reached the disk.
        if len(write.before) < write.length and os.fstat(descriptor).st_size == write.position + write.length:
            os.ftruncate(descriptor, max(end, write.position + len(write.before)))
    return undone
