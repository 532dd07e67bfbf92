"""Objects as files below a directory, with an object store's semantics: the embedded default.

An object appears under its key whole and durable, or not at all: it is written aside, synced, and linked into place. The
link is also what makes ``if_absent`` exact, for it fails where the name exists. Directories are synced after each
change. Uploads in progress live in ``.uploads/``, files aside in ``.aside/``; both are no legal key prefixes.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from stratalog_core.errors import Conflict, Corrupt, Invalid, NoSuchObject, StorageFailed
from stratalog_core.ports import Background, Buffer, Clock, Random
from stratalog_core.system import sync_directory
from stratalog_tiering.store.base import ObjectInfo, Upload, UploadedPart, check_key, check_range

_ASIDE: Final = ".aside"
_UPLOADS: Final = ".uploads"
_KEY_FILE: Final = "key"
_LEFTOVER_AGE_MS: Final = 24 * 3_600_000
_LIST_CHUNK: Final = 500
_MISSING: Final = (FileNotFoundError, NotADirectoryError)
_Result = TypeVar("_Result")


class FilesystemStore:
    """See :class:`stratalog_tiering.store.base.ObjectStore`. All disk work runs in ``background``."""

    def __init__(self, root: Path, background: Background, clock: Clock, random: Random) -> None:
        self._root = root
        self._background = background
        self._clock = clock
        self._random = random
        for directory in (root / _ASIDE, root / _UPLOADS):
            directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    async def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = True) -> ObjectInfo:
        path, aside = self._path(key), self._aside()

        def write() -> ObjectInfo:
            with open(aside, "wb") as stream:
                stream.writelines(parts)
                _sync(stream.fileno(), stream.flush)
            return self._place(aside, key, path, if_absent)

        return await self._run(write, key)

    async def get(self, key: str) -> bytes:
        return await self._run(self._path(key).read_bytes, key)

    async def get_range(self, key: str, start: int, length: int) -> memoryview:
        check_range(start, length)
        path = self._path(key)
        content = await self._run(lambda: _read_range(path, start, length), key)
        if len(content) != length:
            raise Corrupt(f"object {key} ends at byte {start + len(content)}, not {start + length}", key=key)
        return memoryview(content)

    async def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        return await self._run(lambda: _info(key, path.stat()), key)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        entries = self._walk(prefix)
        while chunk := await self._run(lambda: list(islice(entries, _LIST_CHUNK)), prefix):
            for info in chunk:
                yield info

    async def delete(self, keys: Sequence[str]) -> None:
        paths = [self._path(key) for key in keys]

        def remove() -> None:
            for path in paths:
                self._remove(path)

        await self._run(remove, keys[0] if keys else "")

    async def create_upload(self, key: str) -> Upload:
        self._path(key)
        upload = Upload(key=key, upload_id=f"{self._random.getrandbits(128):032x}", initiated_ms=self._clock.wall_ms())

        def create() -> Upload:
            directory = self._upload_directory(upload)
            directory.mkdir()
            (directory / _KEY_FILE).write_text(key)
            return upload

        return await self._run(create, key)

    async def put_part(self, upload: Upload, number: int, parts: Sequence[Buffer]) -> UploadedPart:
        target = self._upload_directory(upload) / f"{number:05d}"

        def write() -> UploadedPart:
            with open(target, "wb") as stream:
                stream.writelines(parts)
            size = target.stat().st_size
            return UploadedPart(number=number, etag=f"{number}-{size}", size_bytes=size)

        return await self._run(write, upload.key)

    async def complete_upload(self, upload: Upload, parts: Sequence[UploadedPart], *, if_absent: bool = True) -> ObjectInfo:
        path, aside, directory = self._path(upload.key), self._aside(), self._upload_directory(upload)

        def complete() -> ObjectInfo:
            with open(aside, "wb") as stream:
                for part in sorted(parts, key=lambda part: part.number):
                    _append_file(directory / f"{part.number:05d}", stream.fileno(), part.size_bytes)
                _sync(stream.fileno(), stream.flush)
            info = self._place(aside, upload.key, path, if_absent)
            shutil.rmtree(directory)
            return info

        return await self._run(complete, upload.key)

    async def abort_upload(self, upload: Upload) -> None:
        directory = self._upload_directory(upload)
        await self._run(lambda: shutil.rmtree(directory, ignore_errors=True), upload.key)

    async def list_uploads(self) -> AsyncIterator[Upload]:
        for upload in await self._run(lambda: list(self._open_uploads()), _UPLOADS):
            yield upload

    async def close(self) -> None:
        """Nothing is held open; ``background`` belongs to whoever made it."""

    def _remove_leftovers(self) -> None:
        """Files aside that a process left when it was killed: those that nobody can be writing any more."""
        before_ms = self._clock.wall_ms() - _LEFTOVER_AGE_MS
        for path in (self._root / _ASIDE).iterdir():
            try:
                if path.stat().st_mtime_ns // 1_000_000 < before_ms:
                    path.unlink()
            except _MISSING:
                continue

    def _open_uploads(self) -> Iterator[Upload]:
        for directory in sorted((self._root / _UPLOADS).iterdir()):
            try:
                key = (directory / _KEY_FILE).read_text()
                initiated_ms = directory.stat().st_ctime_ns // 1_000_000
            except _MISSING:
                continue
            yield Upload(key=key, upload_id=directory.name, initiated_ms=initiated_ms)

    async def _run(self, call: Callable[[], _Result], key: str) -> _Result:
        try:
            return await self._background.run(call)
        except (*_MISSING, IsADirectoryError) as absent:
            raise NoSuchObject(f"object {key} does not exist in {self.url}", key=key) from absent
        except FileExistsError as exists:
            raise Conflict(f"object {key} exists already in {self.url}", key=key) from exists
        except OSError as failure:
            full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
            raise StorageFailed(f"{self.url}: {failure.strerror} ({key})", read_only=full) from failure

    def _path(self, key: str) -> Path:
        if key.startswith((_ASIDE, _UPLOADS)):
            raise Invalid(f"object key {key!r} begins with a reserved name")
        return self._root / check_key(key)

    def _aside(self) -> Path:
        return self._root / _ASIDE / f"{self._random.getrandbits(128):032x}"

    def _upload_directory(self, upload: Upload) -> Path:
        return self._root / _UPLOADS / check_key(upload.upload_id)

    def _place(self, aside: Path, key: str, path: Path, if_absent: bool) -> ObjectInfo:
        try:
            self._make_directories(path.parent)
            if if_absent:
                os.link(aside, path)
            else:
                os.replace(aside, path)
            sync_directory(path.parent)
            return _info(key, path.stat())
        finally:
            aside.unlink(missing_ok=True)

    def _make_directories(self, directory: Path) -> None:
        if not directory.is_dir():
            self._make_directories(directory.parent)
            directory.mkdir(exist_ok=True)
            sync_directory(directory.parent)

    def _remove(self, path: Path) -> None:
        try:
            path.unlink()
            sync_directory(path.parent)
        except _MISSING:
            return

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        parent = self._root / prefix.rpartition("/")[0]
        return (info for info in _files_below(self._root, parent) if info.key.startswith(prefix))


def _files_below(root: Path, directory: Path) -> Iterator[ObjectInfo]:
    """Files in the order of their keys: a directory sorts as its name with ``/``, as it does inside a key."""
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name + "/" if entry.is_dir() else entry.name for entry in entries)
    except _MISSING:
        return
    for name in names:
        path = directory / name
        if name.startswith((_ASIDE, _UPLOADS)):
            continue
        if name.endswith("/"):
            yield from _files_below(root, path)
            continue
        try:
            yield _info(path.relative_to(root).as_posix(), path.stat())
        except _MISSING:
            continue


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(
        key=key,
        size_bytes=status.st_size,
        etag=f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}",
        last_modified_ms=status.st_mtime_ns // 1_000_000,
    )


def _read_range(path: Path, start: int, length: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, length, start)
    finally:
        os.close(descriptor)


def _append_file(source: Path, target: int, size: int) -> None:
    """Copy inside the kernel, so that completing an upload costs no pass through this process."""
    with open(source, "rb") as stream:
        if os.fstat(stream.fileno()).st_size != size:
            raise StorageFailed(f"part {source.name} has not the {size} bytes that were written")
        position = 0
        while position < size:
            position += os.sendfile(target, stream.fileno(), position, size - position)


def _sync(descriptor: int, flush: Callable[[], None]) -> None:
    flush()
    os.fsync(descriptor)
