"""Simulated disks: each page of an unsynced write may be lost, torn or kept at a crash, independently of the others.

A :class:`Disk` outlives the crashes of its machine. ``read`` and ``pread`` see every write at once, as through a page cache;
``crash`` decides which unsynced writes had reached the platter: any of their pages, in any order, and of a page any of its
sectors. After a failed sync the kernel counts the pages as clean: reads still see them, and no later sync writes them, so a
crash undoes them. A crash may also come between two steps of a call that a thread is in (``cut_power_after``). The nemesis
sets faults: failing syncs and writes, a full disk, flipped bits.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stratalog_core.errors import Conflict
from stratalog_core.ports import Buffer, File

SECTOR_BYTES = 512
PAGE_BYTES = 4096
CAPACITY_BYTES = 1 << 40
"""Never used up: a disk is full only if a nemesis says so."""


@dataclass(slots=True, eq=False)
class Write:
    """One write that a crash may undo."""

    position: int
    content: bytes


@dataclass(slots=True)
class Content:
    """``now`` is what reads see; ``durable`` the minimum that a crash leaves; ``unsynced`` the writes in between."""

    now: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[Write] = field(default_factory=list)

    def write(self, content: bytes, position: int) -> Write:
        written = Write(position, content)
        _overwrite(self.now, content, position)
        self.unsynced.append(written)
        return written

    def truncate(self, size: int) -> None:
        # A truncation is durable at once: recovery code truncates only to drop what it will not read again.
        for bytes_ in (self.now, self.durable):
            if len(bytes_) > size:
                del bytes_[size:]
            else:
                bytes_.extend(bytes(size - len(bytes_)))
        self.unsynced = [write for write in self.unsynced if write.position < size]
        for write in self.unsynced:
            write.content = write.content[: size - write.position]

    def sync(self) -> None:
        for write in self.unsynced:
            _overwrite(self.durable, write.content, write.position)
        self.unsynced.clear()

    def sync_failed(self) -> None:
        """Forget what should have been written: it stays readable, and a later sync that succeeds does not make it durable."""
        self.unsynced.clear()

    def sync_write(self, write: Write) -> None:
        """Make only this write durable, as a completed direct write."""
        if write in self.unsynced:
            _overwrite(self.durable, write.content, write.position)
            self.unsynced.remove(write)

    def sync_last(self) -> None:
        self.sync_write(self.unsynced[-1])

    def crash(self, randomness: random.Random) -> None:
        """Keep all, none or some sectors of each page of each unsynced write, in order of the writes."""
        for write in self.unsynced:
            for position, content in _survivors(write, randomness):
                _overwrite(self.durable, content, position)
        self.now = bytearray(self.durable)
        self.unsynced.clear()


def _survivors(write: Write, randomness: random.Random) -> Iterator[tuple[int, bytes]]:
    fate = randomness.random()
    if fate < 0.3:
        return
    if fate < 0.5:
        yield write.position, write.content
        return
    for position, page in _pieces(write.position, write.content, PAGE_BYTES):
        page_fate = randomness.random()
        if page_fate < 0.45:
            yield position, page
        elif page_fate < 0.6:
            yield from (each for each in _pieces(position, page, SECTOR_BYTES) if randomness.random() < 0.5)


def _pieces(position: int, content: bytes, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the part of ``content`` in each page, or sector, of the file, with its position."""
    at = 0
    while at < len(content):
        end = min(at + size - (position + at) % size, len(content))
        yield position + at, content[at:end]
        at = end


def _overwrite(target: bytearray, content: bytes, position: int) -> None:
    if not content:
        return
    if position > len(target):
        target.extend(bytes(position - len(target)))
    target[position : position + len(content)] = content


@dataclass(slots=True)
class DiskFaults:
    """Faults in force; cleared by assigning a new instance."""

    sync_fails: bool = False
    read_fails: bool = False
    write_fails: bool = False
    full: bool = False


class PowerCut(BaseException):
    """The power is gone. A ``BaseException``, so that no code under test handles it."""


class Disk:
    """One machine's directory tree; implements :class:`stratalog_core.ports.Files` through :meth:`mount`."""

    def __init__(self, name: str, randomness: random.Random) -> None:
        self.name = name
        self.faults = DiskFaults()
        self.content: dict[str, Content] = {}
        self._durable_names: dict[str, Content] = {}
        self._randomness = randomness
        self._is_locked = False
        self._steps_left: int | None = None

    def lock(self) -> Callable[[], None]:
        if self._is_locked:
            raise Conflict(f"{self.name} is in use by another process")
        self._is_locked = True
        return self._unlock

    def _unlock(self) -> None:
        self._is_locked = False

    def crash(self) -> None:
        """Decide what survives. Names in a directory that was not synced may be lost or kept."""
        self._unlock()
        names = dict(self._durable_names)
        for name, content in self.content.items():
            if name not in names and self._randomness.random() < 0.5:
                names[name] = content
        for name in list(names):
            if name not in self.content and self._randomness.random() < 0.5:
                del names[name]
        for content in {id(content): content for content in names.values()}.values():
            content.crash(self._randomness)
        self.content = names
        self._durable_names = dict(names)

    def flip_bit(self, path: str, position: int, bit: int) -> None:
        """Flip a bit on the platter: every later read sees it."""
        content = self.content[path]
        for copy in (content.now, content.durable):
            if position < len(copy):
                copy[position] ^= 1 << bit

    def durable(self, path: str) -> bytes:
        """Return the minimum content of a file after a crash; empty if the file may be gone."""
        content = self._durable_names.get(path)
        return bytes(content.durable) if content is not None else b""

    def copy(self) -> dict[str, bytes]:
        """Return the files of a machine that is down."""
        return {path: bytes(content.now) for path, content in self.content.items()}

    def put_back(self, files: Mapping[str, bytes]) -> None:
        """Replace all files by those of a copy, durably."""
        self.content = {path: Content(bytearray(content), bytearray(content)) for path, content in files.items()}
        self._durable_names = dict(self.content)

    def used_bytes(self) -> int:
        return sum(len(content.now) for content in self.content.values())

    def sync_names(self, directory: str) -> None:
        prefix = f"{directory}/" if directory not in ("", ".") else ""
        for name in [name for name in self._durable_names if name.startswith(prefix) and name not in self.content]:
            del self._durable_names[name]
        self._durable_names.update({name: content for name, content in self.content.items() if name.startswith(prefix)})

    def mount(self, open_direct: OpenDirect | None = None) -> SimulatedFiles:
        """Return the directory tree. ``open_direct`` opens a file for use around the page cache (``direct.py``)."""
        return SimulatedFiles(self, open_direct)

    def cut_power_after(self, steps: int, call: Callable[[], object]) -> None:
        """Run ``call`` until it has changed the disk ``steps`` times; the caller crashes the disk next."""
        self._steps_left = steps
        try:
            call()
        except (PowerCut, Exception):
            # Nobody receives the error of a call that the power cut ended.
            pass
        finally:
            self._steps_left = None

    def step(self) -> None:
        """Count a change of the disk. Raises ``PowerCut`` if the power is gone before it."""
        if self._steps_left is not None:
            if not self._steps_left:
                raise PowerCut
            self._steps_left -= 1

    def check_write(self, growth: int) -> None:
        self.step()
        if self.faults.write_fails:
            raise OSError(errno.EIO, "simulated write error")
        if self.faults.full and growth:
            raise OSError(errno.ENOSPC, "simulated full disk")

    def check_sync(self) -> None:
        self.step()
        if self.faults.sync_fails:
            raise OSError(errno.EIO, "simulated fsync error")


class SimulatedFile:
    """See :class:`stratalog_core.ports.File`."""

    def __init__(self, disk: Disk, content: Content) -> None:
        self._disk = disk
        self.content = content

    def size(self) -> int:
        return len(self.content.now)

    def pread(self, length: int, position: int) -> bytes:
        if self._disk.faults.read_fails:
            raise OSError(errno.EIO, "simulated read error")
        return bytes(self.content.now[position : position + length])

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        content = b"".join(buffers)
        self._disk.check_write(max(0, position + len(content) - len(self.content.now)))
        self.content.write(content, position)

    def datasync(self) -> None:
        try:
            self._disk.check_sync()
        except OSError:
            self.content.sync_failed()
            raise
        self.content.sync()

    def allocate(self, size: int) -> None:
        if size > self.size():
            self.truncate(size)

    def truncate(self, size: int) -> None:
        self._disk.check_write(max(0, size - len(self.content.now)))
        self.content.truncate(size)

    def close(self) -> None:
        pass


OpenDirect = Callable[[Disk, SimulatedFile], File]


class SimulatedFiles:
    """See :class:`stratalog_core.ports.Files`."""

    def __init__(self, disk: Disk, open_direct: OpenDirect | None = None) -> None:
        self._disk = disk
        self._open_direct = open_direct

    def lock(self) -> Callable[[], None]:
        return self._disk.lock()

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> File:
        file = self._open(path, create=create)
        return self._open_direct(self._disk, file) if direct and self._open_direct is not None else file

    def _open(self, path: str, *, create: bool = False) -> SimulatedFile:
        if path not in self._disk.content:
            if not create:
                raise FileNotFoundError(errno.ENOENT, "no such simulated file", path)
            self._disk.check_write(0)
            self._disk.content[path] = Content()
        return SimulatedFile(self._disk, self._disk.content[path])

    def read(self, path: str) -> bytes:
        file = self._open(path)
        return file.pread(file.size(), 0)

    def write_atomic(self, path: str, content: bytes) -> None:
        self._disk.check_write(len(content))
        self._disk.check_sync()
        fresh = Content()
        fresh.write(content, 0)
        fresh.sync()
        self._disk.content[path] = fresh
        self._disk.sync_names(path.rpartition("/")[0])

    def exists(self, path: str) -> bool:
        return path in self._disk.content or any(name.startswith(f"{path}/") for name in self._disk.content)

    def list(self, directory: str) -> list[str]:
        prefix = f"{directory}/" if directory not in ("", ".") else ""
        return sorted({name[len(prefix) :].split("/")[0] for name in self._disk.content if name.startswith(prefix)})

    def rename(self, source: str, target: str) -> None:
        self._disk.step()
        self._disk.content[target] = self._disk.content.pop(source)

    def remove(self, path: str) -> None:
        self._disk.step()
        if path not in self._disk.content:
            raise FileNotFoundError(errno.ENOENT, "no such simulated file", path)
        del self._disk.content[path]

    def make_directory(self, path: str) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        self._disk.check_sync()
        self._disk.sync_names(path)

    def free_bytes(self) -> int:
        return 0 if self._disk.faults.full else CAPACITY_BYTES - self._disk.used_bytes()
