"""Simulated disks: what was written and not synced may be lost, torn or kept at a crash, each write by itself.

A :class:`Disk` outlives the crashes of its machine. ``read`` and ``pread`` see every write at once, as through a page cache;
``crash`` decides what of the unsynced writes had reached the platter. Faults are set by the nemesis: failing syncs and
writes, a full disk, flipped bits.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stratalog_core.errors import Conflict
from stratalog_core.ports import Buffer

SECTOR_BYTES = 512
CAPACITY_BYTES = 1 << 40
"""Never used up: a disk is full when a nemesis says so."""


@dataclass(slots=True)
class _Content:
    """``now`` is what reads see; ``durable`` what a crash leaves at least; ``unsynced`` the writes in between."""

    now: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, content: bytes, position: int) -> None:
        _overwrite(self.now, content, position)
        self.unsynced.append((position, content))

    def truncate(self, size: int) -> None:
        # A truncation is made durable at once: recovery code only truncates to drop what it will not read again.
        for bytes_ in (self.now, self.durable):
            if len(bytes_) > size:
                del bytes_[size:]
            else:
                bytes_.extend(bytes(size - len(bytes_)))
        self.unsynced = [(position, content[: size - position]) for position, content in self.unsynced if position < size]

    def sync(self) -> None:
        for position, content in self.unsynced:
            _overwrite(self.durable, content, position)
        self.unsynced.clear()

    def crash(self, randomness: random.Random) -> None:
        for position, content in self.unsynced:
            _overwrite(self.durable, _survivor(content, randomness), position)
        self.now = bytearray(self.durable)
        self.unsynced.clear()


def _survivor(content: bytes, randomness: random.Random) -> bytes:
    fate = randomness.random()
    if fate < 0.4:
        return b""
    if fate < 0.7:
        return content
    sectors = len(content) // SECTOR_BYTES + 1
    return content[: randomness.randrange(sectors) * SECTOR_BYTES + randomness.randrange(SECTOR_BYTES)]


def _overwrite(target: bytearray, content: bytes, position: int) -> None:
    if not content:
        return
    if position > len(target):
        target.extend(bytes(position - len(target)))
    target[position : position + len(content)] = content


@dataclass(slots=True)
class DiskFaults:
    """What goes wrong from now on; cleared by assigning a new one."""

    sync_fails: bool = False
    read_fails: bool = False
    write_fails: bool = False
    full: bool = False


class Disk:
    """One machine's directory tree; implements :class:`stratalog_core.ports.Files` through :meth:`mount`."""

    def __init__(self, name: str, randomness: random.Random) -> None:
        self.name = name
        self.faults = DiskFaults()
        self.content: dict[str, _Content] = {}
        self._durable_names: dict[str, _Content] = {}
        self._randomness = randomness
        self._is_locked = False

    def lock(self) -> Callable[[], None]:
        if self._is_locked:
            raise Conflict(f"{self.name} is in use by another process")
        self._is_locked = True
        return self._unlock

    def _unlock(self) -> None:
        self._is_locked = False

    def crash(self) -> None:
        """Decide what survives; names whose directory was not synced may be lost or kept."""
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
        """Rot: the bit changes on the platter and in every later read."""
        content = self.content[path]
        for copy in (content.now, content.durable):
            if position < len(copy):
                copy[position] ^= 1 << bit

    def durable(self, path: str) -> bytes:
        """What a crash leaves at least of a file; empty if that is nothing."""
        content = self._durable_names.get(path)
        return bytes(content.durable) if content is not None else b""

    def used_bytes(self) -> int:
        return sum(len(content.now) for content in self.content.values())

    def sync_names(self, directory: str) -> None:
        prefix = f"{directory}/" if directory not in ("", ".") else ""
        for name in [name for name in self._durable_names if name.startswith(prefix) and name not in self.content]:
            del self._durable_names[name]
        self._durable_names.update({name: content for name, content in self.content.items() if name.startswith(prefix)})

    def mount(self) -> SimulatedFiles:
        return SimulatedFiles(self)

    def check_write(self, growth: int) -> None:
        if self.faults.write_fails:
            raise OSError(errno.EIO, "simulated write error")
        if self.faults.full and growth:
            raise OSError(errno.ENOSPC, "simulated full disk")

    def check_sync(self) -> None:
        if self.faults.sync_fails:
            raise OSError(errno.EIO, "simulated fsync error")


class SimulatedFile:
    """See :class:`stratalog_core.ports.File`."""

    def __init__(self, disk: Disk, content: _Content) -> None:
        self._disk = disk
        self._content = content

    def size(self) -> int:
        return len(self._content.now)

    def pread(self, length: int, position: int) -> bytes:
        if self._disk.faults.read_fails:
            raise OSError(errno.EIO, "simulated read error")
        return bytes(self._content.now[position : position + length])

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        content = b"".join(buffers)
        self._disk.check_write(max(0, position + len(content) - len(self._content.now)))
        self._content.write(content, position)

    def datasync(self) -> None:
        self._disk.check_sync()
        self._content.sync()

    def allocate(self, size: int) -> None:
        if size > self.size():
            self.truncate(size)

    def truncate(self, size: int) -> None:
        self._disk.check_write(max(0, size - len(self._content.now)))
        self._content.truncate(size)

    def close(self) -> None:
        pass


class SimulatedFiles:
    """See :class:`stratalog_core.ports.Files`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def lock(self) -> Callable[[], None]:
        return self._disk.lock()

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> SimulatedFile:
        if path not in self._disk.content:
            if not create:
                raise FileNotFoundError(errno.ENOENT, "no such simulated file", path)
            self._disk.check_write(0)
            self._disk.content[path] = _Content()
        return SimulatedFile(self._disk, self._disk.content[path])

    def read(self, path: str) -> bytes:
        file = self.open(path)
        return file.pread(file.size(), 0)

    def write_atomic(self, path: str, content: bytes) -> None:
        self._disk.check_write(len(content))
        self._disk.check_sync()
        fresh = _Content()
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
        self._disk.content[target] = self._disk.content.pop(source)

    def remove(self, path: str) -> None:
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
