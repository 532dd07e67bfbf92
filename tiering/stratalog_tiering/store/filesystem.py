"""Objects as files below a directory, with an object store's semantics: the embedded default.

An object appears under its key whole and durable, or not at all: it is written aside, synced, and linked into place. The link
also makes ``if_absent`` exact, because it fails if the name exists. Directories are synced after each change. Multipart
uploads are in ``.uploads/``, files being written in ``.aside/``; neither is a legal key prefix.

Large objects bypass the page cache: they are read back from disk soon after, and rarely later. The parts of an upload are
written to their positions in one file, which becomes the object. The received parts are known only to the process that
received them, so an upload of an earlier process can only be aborted.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from stratalog_core.errors import Conflict, Corrupt, Invalid, NoSuchObject, StorageFailed
from stratalog_core.files.kernel_io import PAGE_BYTES
from stratalog_core.files.open_files import open_file
from stratalog_core.files.uncached_reads import memory_bytes, read_uncached
from stratalog_core.memory.receive_buffers import ReceiveBuffers
from stratalog_core.object_lock import ObjectLock
from stratalog_core.ports import Background, Buffer, Clock, Random
from stratalog_core.system import sync_directory
from stratalog_tiering.store.base import (
    KeyRing,
    ObjectInfo,
    StoreFeatures,
    Upload,
    UploadedPart,
    check_key,
    check_length,
    check_range,
)
from stratalog_tiering.store.key_ring import NoKeys

_ASIDE: Final = ".aside"
_UPLOADS: Final = ".uploads"
_KEY_FILE: Final = "key"
_DATA_FILE: Final = "data"
_LARGE_BYTES_MIN: Final = 256 * 1024
"""Objects and uncached ranges of at least this size bypass the page cache."""
_LEFTOVER_AGE_MS: Final = 24 * 3_600_000
_LIST_CHUNK: Final = 500
_MISSING: Final = (FileNotFoundError, NotADirectoryError)
_UNREADABLE: Final = frozenset((errno.EIO, errno.EBADMSG))
"""The disk cannot return these bytes: the object is damaged, and another copy may be sound."""
_Result = TypeVar("_Result")


class FilesystemStore:
    """See :class:`stratalog_tiering.store.base.ObjectStore`. All disk work runs in ``background``."""

    def __init__(self, root: Path, background: Background, clock: Clock, random: Random, keys: KeyRing | None = None) -> None:
        self._root = root
        self._keys = keys or NoKeys()
        self._background = background
        self._clock = clock
        self._random = random
        self._memory = ReceiveBuffers()
        self._disk_turn = asyncio.Semaphore(1)
        """Serialises large reads and writes, because the disk may hold a bookie's log whose syncs must not wait for them."""
        self._received: dict[str, dict[int, int]] = {}
        for directory in (root / _ASIDE, root / _UPLOADS):
            directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    @property
    def keys(self) -> KeyRing:
        return self._keys

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        storage_class: str = "",
        lock: ObjectLock | None = None,
    ) -> None:
        self._refuse(storage_class, lock)
        path, aside, size = self._path(key), self._aside(), sum(map(len, parts))

        def write() -> None:
            try:
                if size < _LARGE_BYTES_MIN:
                    _write_small(aside, parts)
                else:
                    _write_at(aside, parts, 0, direct=True)
                    _finish(aside, size)
                self._place(aside, path, if_absent)
            finally:
                aside.unlink(missing_ok=True)

        if size < _LARGE_BYTES_MIN:
            await self._run(write, key)
            return
        async with self._disk_turn:
            await self._run(write, key)

    async def get(self, key: str) -> bytes:
        return await self._read(self._path(key).read_bytes, key)

    async def get_range(
        self, key: str, start: int, length: int, *, uncached: bool = False, or_less: bool = False
    ) -> memoryview:
        check_range(start, length)
        path = self._path(key)
        if uncached and length >= _LARGE_BYTES_MIN:
            memory = self._memory.take(memory_bytes(start, length))
            async with self._disk_turn:
                content = await self._read(lambda: read_uncached(path, start, length, memory), key)
        else:
            content = memoryview(await self._read(lambda: _read_range(path, start, length), key))
        if not or_less:
            check_length(len(content), key, start, length)
        return content

    async def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        return await self._run(lambda: _info(key, path.stat()), key)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        entries = self._walk(prefix)
        while chunk := await self._run(lambda: list(islice(entries, _LIST_CHUNK)), prefix):
            for info in chunk:
                yield info

    async def list_keys(self, prefix: str) -> AsyncIterator[str]:
        async for info in self.list(prefix):
            yield info.key

    async def delete(self, keys: Sequence[str]) -> None:
        paths = [self._path(key) for key in keys]

        def remove() -> None:
            for path in paths:
                self._remove(path)

        await self._run(remove, keys[0] if keys else "")

    def _refuse(self, storage_class: str, lock: ObjectLock | None) -> None:
        if storage_class:
            raise Invalid(f"{self.url} has no storage classes such as {storage_class!r}: unset stratalog.tier.storage.class")
        if lock is not None:
            raise Invalid(
                f"{self.url} is a directory, which cannot lock objects: use a bucket with Object Lock, or set"
                " stratalog.tier.lock.mode=none"
            )

    async def create_upload(
        self,
        key: str,
        part_bytes: int,
        storage_class: str = "",
        lock: ObjectLock | None = None,
        *,
        if_absent: bool = True,
    ) -> Upload:
        self._refuse(storage_class, lock)
        self._path(key)
        upload_id = f"{self._random.getrandbits(128):032x}"
        upload = Upload(
            key=key, upload_id=upload_id, initiated_ms=self._clock.wall_ms(), part_bytes=part_bytes, if_absent=if_absent
        )

        def create() -> Upload:
            directory = self._upload_directory(upload)
            directory.mkdir()
            (directory / _KEY_FILE).write_text(key)
            return upload

        await self._run(create, key)
        self._received[upload_id] = {}
        return upload

    async def put_part(self, upload: Upload, number: int, parts: Sequence[Buffer]) -> UploadedPart:
        size, received = sum(map(len, parts)), self._received_of(upload)
        if number < 1 or size > upload.part_bytes:
            raise Invalid(
                f"part {number} of {upload.key} has {size} bytes; numbers start at 1, and the maximum size is"
                f" {upload.part_bytes}"
            )
        data = self._upload_directory(upload) / _DATA_FILE
        # Direct writes of parts that share a page would overwrite each other's bytes.
        direct = not upload.part_bytes % PAGE_BYTES
        received.pop(number, None)
        async with self._disk_turn:
            await self._run(lambda: _write_at(data, parts, (number - 1) * upload.part_bytes, direct=direct), upload.key)
        received[number] = size
        return UploadedPart(number=number, etag=f"{number}-{size}", size_bytes=size)

    async def complete_upload(self, upload: Upload, parts: Sequence[UploadedPart]) -> str:
        path, directory = self._path(upload.key), self._upload_directory(upload)
        size = _whole_size(upload, parts, self._received_of(upload))

        def complete() -> None:
            _finish(directory / _DATA_FILE, size)
            self._place(directory / _DATA_FILE, path, upload.if_absent)
            shutil.rmtree(directory)

        await self._run(complete, upload.key)
        self._received.pop(upload.upload_id, None)
        return ""

    async def abort_upload(self, upload: Upload) -> None:
        self._received.pop(upload.upload_id, None)
        directory = self._upload_directory(upload)
        await self._run(lambda: shutil.rmtree(directory, ignore_errors=True), upload.key)

    async def list_uploads(self) -> AsyncIterator[Upload]:
        for upload in await self._run(lambda: list(self._open_uploads()), _UPLOADS):
            yield upload

    async def features(self, key: str) -> StoreFeatures:
        return StoreFeatures(
            conditional_replace=False, checksums_at_rest=False, versioning=False, object_lock=False, final_deletion=True
        )  # fmt: skip

    async def close(self) -> None:
        """Does nothing: no file is held open, and ``background`` belongs to the caller."""

    def _remove_leftovers(self) -> None:
        """Delete what a killed process left in ``.aside``, and uploads without a key; what may still be written is younger.

        The end of an upload removes its files one by one. Without a key, no sweep sees what is left of it.
        """
        before_ms = self._clock.wall_ms() - _LEFTOVER_AGE_MS
        uploads = [path for path in (self._root / _UPLOADS).iterdir() if not (path / _KEY_FILE).exists()]
        for path in (*(self._root / _ASIDE).iterdir(), *uploads):
            try:
                if path.stat().st_mtime_ns // 1_000_000 < before_ms:
                    shutil.rmtree(path, ignore_errors=True) if path in uploads else path.unlink()
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

    async def _read(self, call: Callable[[], _Result], key: str) -> _Result:
        try:
            return await self._run(call, key)
        except StorageFailed as failure:
            if isinstance(failure.__cause__, OSError) and failure.__cause__.errno in _UNREADABLE:
                raise Corrupt(f"object {key} cannot be read back: {failure.message}", key=key) from failure
            raise

    async def _run(self, call: Callable[[], _Result], key: str) -> _Result:
        try:
            return await self._background.run(call)
        except (*_MISSING, IsADirectoryError) as absent:
            raise NoSuchObject(f"object {key} does not exist in {self.url}", key=key) from absent
        except FileExistsError as exists:
            raise Conflict(f"object {key} already exists in {self.url}", key=key) from exists
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

    def _received_of(self, upload: Upload) -> dict[int, int]:
        """Sizes of the received parts, by number."""
        try:
            return self._received[upload.upload_id]
        except KeyError:
            raise NoSuchObject(f"upload {upload.upload_id} of {upload.key} was not started by this process") from None

    def _place(self, written: Path, path: Path, if_absent: bool) -> None:
        self._make_directories(path.parent)
        if if_absent:
            os.link(written, path)
        else:
            os.replace(written, path)
        sync_directory(path.parent)

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
    """Files in key order: a directory sorts as its name followed by ``/``."""
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


def _write_small(path: Path, parts: Sequence[Buffer]) -> None:
    with open(path, "wb") as stream:
        stream.writelines(parts)
        stream.flush()
        os.fsync(stream.fileno())


def _write_at(path: Path, parts: Sequence[Buffer], position: int, *, direct: bool) -> None:
    """Write ``parts`` at ``position``. Durable only after ``_finish``; a direct write ends with a whole page."""
    file = open_file(path, create=True, direct=direct, synchronous=False)
    try:
        file.pwritev(parts, position)
    finally:
        file.close()


def _finish(path: Path, size: int) -> None:
    """Truncate the file to ``size`` and make it durable."""
    file = open_file(path, create=False, direct=False)
    try:
        if file.size() < size:
            raise StorageFailed(f"{path.name} has {file.size()} bytes; {size} were written")
        file.truncate(size)
        file.datasync()
    finally:
        file.close()


def _whole_size(upload: Upload, parts: Sequence[UploadedPart], received: Mapping[int, int]) -> int:
    """The object's size. Raises ``Invalid`` unless the receipts are those of all received parts."""
    sizes = {part.number: part.size_bytes for part in parts}
    last = len(parts)
    if sizes != {number: received.get(number) for number in range(1, last + 1)}:
        raise Invalid(
            f"upload {upload.upload_id} of {upload.key} received {len(received)} parts,"
            f" which differ from the {last} that it is to be completed from"
        )
    if any(sizes[number] != upload.part_bytes for number in range(1, last)):
        raise Invalid(f"every part of {upload.key} but the last must have {upload.part_bytes} bytes")
    return sum(sizes.values())
