"""The LRU cache stays within its bound and keeps the latest entry, and the disk cache leaves no file that it does not know."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.files.open_files import SystemFile
from stratalog_core.ports import Buffer
from stratalog_core.system import SystemFiles, ThreadBackground
from stratalog_tiering.cold.block_cache import DiskCache, LruCache


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), max_size=60))
def test_the_cache_never_exceeds_its_bound_and_keeps_the_latest(puts: list[tuple[int, int]]) -> None:
    evicted: list[int] = []
    cache: LruCache[int, int] = LruCache(20, lambda weight: weight, lambda key, _: evicted.append(key))
    for key, weight in puts:
        cache.put(key, weight)
        assert cache.weight <= 20
        assert cache.get(key) == weight


def stored(directory: Path) -> int:
    return len(list((directory / "blocks").iterdir()))


async def test_a_block_that_the_disk_did_not_take_leaves_no_file(
    tmp_path: Path, background: ThreadBackground, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(SystemFiles(tmp_path), background, 10)

    def full(file: SystemFile, buffers: Sequence[Buffer], position: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(SystemFile, "pwritev", full)
        for number in range(20):
            await cache.write((f"segment-{number}", 0), memoryview(b"content"))
    assert stored(tmp_path) == 0


async def test_a_block_that_is_read_before_it_is_written_leaves_no_file_behind(
    tmp_path: Path, background: ThreadBackground, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, key, may_write = DiskCache(SystemFiles(tmp_path), background, 10), ("segment", 0), threading.Event()
    whole = SystemFiles.open

    def slow(files: SystemFiles, path: str, *, create: bool = False) -> object:
        if create:
            may_write.wait(60)
        return whole(files, path, create=create)

    monkeypatch.setattr(SystemFiles, "open", slow)
    writing = asyncio.ensure_future(cache.write(key, memoryview(b"content")))
    await asyncio.sleep(0)
    assert await cache.read(key) is None
    may_write.set()
    await writing
    await cache.write(("another", 0), memoryview(b"content"))
    assert stored(tmp_path) == 1
