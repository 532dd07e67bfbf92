"""The store in a directory: its own properties besides the contract of all stores."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import pytest_asyncio

from stratalog_core.errors import Corrupt, Invalid, NoSuchObject, StorageFailed
from stratalog_core.files.open_files import DirectFile, open_file
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.store import ObjectStore, UploadedPart, open_store

PART = 5 * 1024 * 1024
PAGE = 4096

Open = Callable[[], ObjectStore]


@pytest.fixture
def open_directory(tmp_path: Path, background: ThreadBackground) -> Open:
    seeds = iter(range(100))

    def opened() -> ObjectStore:
        url = str(tmp_path / "bucket")
        return open_store(url, background=background, clock=SystemClock(), random=random.Random(next(seeds)))

    return opened


@pytest_asyncio.fixture
async def directory(open_directory: Open) -> ObjectStore:
    return open_directory()


class Written:
    """Bytes that were written, by whichever call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        self.copies = 0
        for name in ("pwrite", "pwritev"):
            monkeypatch.setattr(os, name, self._counting(getattr(os, name)))
        for name in ("sendfile", "copy_file_range"):
            monkeypatch.setattr(os, name, self._refuse)

    def _counting(self, call: Callable[..., int]) -> Callable[..., int]:
        def counted(*arguments: object) -> int:
            written = call(*arguments)
            self.bytes += written
            return written

        return counted

    def _refuse(self, *arguments: object) -> int:
        raise AssertionError("parts are not copied once more")


@pytest.mark.parametrize("last", [1, PAGE, 300_001])
@pytest.mark.parametrize("part_bytes", [PART, PART + 1])
async def test_each_byte_of_an_upload_is_written_once(
    directory: ObjectStore, part_bytes: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Written(monkeypatch)
    content = random.Random(last).randbytes(2 * part_bytes + last)
    upload = await directory.create_upload("a/b", part_bytes)
    views = [memoryview(content)[first : first + part_bytes] for first in range(0, len(content), part_bytes)]
    # The last one comes first: parts may come in any order.
    parts = [await directory.put_part(upload, n, [views[n - 1][:99], views[n - 1][99:]]) for n in (3, 1, 2)]
    await directory.complete_upload(upload, parts)
    assert len(content) <= written.bytes <= len(content) + PAGE
    assert (await directory.head("a/b")).size_bytes == len(content)
    assert await directory.get("a/b") == content
    for start, length in ((part_bytes - 10, 20), (1, len(content) - 1), (PAGE - 1, 400_000)):
        assert await directory.get_range("a/b", start, length, uncached=True) == content[start : start + length]


class Transfers:
    """Direct transfers of a disk: how many at a time, how large."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at_once = self.at_once_max = self.bytes_max = self.bytes = 0
        self._lock = threading.Lock()
        for name in ("pwrite", "preadv"):
            monkeypatch.setattr(os, name, self._watching(getattr(os, name)))

    def _watching(self, call: Callable[..., int]) -> Callable[..., int]:
        def watched(*arguments: object) -> int:
            with self._lock:
                self.at_once += 1
                self.at_once_max = max(self.at_once_max, self.at_once)
            done = call(*arguments)
            with self._lock:
                self.at_once -= 1
                self.bytes, self.bytes_max = self.bytes + done, max(self.bytes_max, done)
            return done

        return watched


async def test_large_transfers_are_sequential_and_in_small_pieces(
    directory: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same disk may have a log that acknowledgements wait for."""
    with contextlib.closing(open_file(tmp_path / "file", create=True, direct=True)) as file:
        if not isinstance(file, DirectFile):
            pytest.skip("the file system of the temporary directory knows no direct writes")
    content = random.Random(5).randbytes(PART)
    await directory.put("there", [content])
    upload = await directory.create_upload("a/b", PART)
    transfers = Transfers(monkeypatch)
    reads = (directory.get_range("there", 0, PART, uncached=True) for _ in range(4))
    parts = (directory.put_part(upload, number, [content]) for number in range(1, 5))
    await asyncio.gather(*reads, *parts)
    assert transfers.bytes >= 8 * PART
    assert (transfers.at_once_max, transfers.bytes_max) == (1, 1024 * 1024)


async def test_a_part_uploaded_again_with_fewer_bytes_ends_the_object_there(directory: ObjectStore) -> None:
    upload = await directory.create_upload("a", PART)
    first = await directory.put_part(upload, 1, [b"1" * PART])
    await directory.put_part(upload, 2, [b"2" * 50_000])
    second = await directory.put_part(upload, 2, [b"3" * 10])
    await directory.complete_upload(upload, [first, second])
    assert await directory.get("a") == b"1" * PART + b"3" * 10


async def test_only_all_parts_of_full_size_make_an_object(directory: ObjectStore) -> None:
    upload = await directory.create_upload("a", PART)
    first = await directory.put_part(upload, 1, [b"1" * PART])
    third = await directory.put_part(upload, 3, [b"3"])
    short = UploadedPart(number=2, etag="2-1", size_bytes=1)
    for parts in ([first, third], [first, short, third], [third], [first, first]):
        with pytest.raises(Invalid):
            await directory.complete_upload(upload, parts)
    short = await directory.put_part(upload, 2, [b"2"])
    with pytest.raises(Invalid, match="but the last"):
        await directory.complete_upload(upload, [first, short, third])
    with pytest.raises(Invalid, match="maximum size"):
        await directory.put_part(upload, 2, [b"2" * (PART + 1)])
    with pytest.raises(NoSuchObject):
        await directory.head("a")


async def test_an_upload_of_an_earlier_process_can_only_be_aborted(open_directory: Open) -> None:
    begun = await open_directory().create_upload("a", PART)
    later = open_directory()
    (found,) = [upload async for upload in later.list_uploads()]
    assert (found.upload_id, found.part_bytes) == (begun.upload_id, 0)
    with pytest.raises(NoSuchObject):
        await later.put_part(found, 1, [b"x"])
    await later.abort_upload(found)
    assert [upload async for upload in later.list_uploads()] == []


@pytest.mark.parametrize("size", [0, 1, 256 * 1024 - 1, 256 * 1024, 1_000_001])
async def test_objects_of_any_size_are_what_was_put(directory: ObjectStore, tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    await directory.put("a", [content[: size // 3], memoryview(content)[size // 3 :]])
    assert await directory.get("a") == content
    assert list((tmp_path / "bucket" / ".aside").iterdir()) == []


async def test_what_an_interrupted_end_of_an_upload_left_is_removed(open_directory: Open, tmp_path: Path) -> None:
    """Without the file that names its key, an upload is not listed, so no sweep aborts it."""
    first = open_directory()
    for age_s in (0, 2 * 24 * 3600):
        upload = await first.create_upload("a/b", PART)
        await first.put_part(upload, 1, [b"content"])
        directory = tmp_path / "bucket" / ".uploads" / upload.upload_id
        (directory / "key").unlink()
        then = directory.stat().st_mtime - age_s
        os.utime(directory, (then, then))
    kept = await first.create_upload("a/b", PART)
    os.utime(tmp_path / "bucket" / ".uploads" / kept.upload_id, (0, 0))
    open_directory()
    assert len(list((tmp_path / "bucket" / ".uploads").iterdir())) == 2
    assert [upload.upload_id async for upload in first.list_uploads()] == [kept.upload_id]


@pytest.mark.parametrize(("number", "error"), [(errno.EIO, Corrupt), (errno.EBADMSG, Corrupt), (errno.EACCES, StorageFailed)])
async def test_bytes_that_the_disk_cannot_return_are_damage_of_the_object(
    directory: ObjectStore, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    """Else a scrub would end at a bad sector each time, and neither repair it nor look at what follows."""
    await directory.put("a/b", [bytes(PART)])

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    for name in ("pread", "preadv"):
        monkeypatch.setattr(os, name, fail)
    for uncached in (False, True):
        with pytest.raises(error) as raised:
            await directory.get_range("a/b", 0, PART, uncached=uncached)
        assert type(raised.value) is error
