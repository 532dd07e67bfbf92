"""The LRU cache stays within its bound and keeps the latest entry, memory keeps blocks for the readers that need them soon, and
the disk cache leaves no file that it does not know.
"""

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
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_tiering.cold.block_cache import WAITING_S, BlockKey, BlockMemory, CachedBlock, DiskCache, LruCache


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), max_size=60))
def test_the_cache_never_exceeds_its_bound_and_keeps_the_latest(puts: list[tuple[int, int]]) -> None:
    evicted: list[int] = []
    cache: LruCache[int, int] = LruCache(20, lambda weight: weight, lambda key, _: evicted.append(key))
    for key, weight in puts:
        cache.put(key, weight)
        assert cache.weight <= 20
        assert cache.get(key) == weight


class ManualClock(SystemClock):
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@given(st.lists(st.tuples(st.sampled_from(["put", "get", "finish", "sleep"]), st.integers(0, 7)), max_size=80))
def test_blocks_that_wait_for_a_reader_are_evicted_last(steps: list[tuple[str, int]]) -> None:
    block = CachedBlock(memoryview(b""), 0)
    clock, evicted = ManualClock(), list[BlockKey]()
    memory = BlockMemory(4 * block.memory_bytes, clock, lambda key, _: evicted.append(key))
    finished, waiting = list[BlockKey](), dict[BlockKey, float]()
    """What memory must hold; the least recently used first."""
    for step, number in steps:
        key = ("segment", number)
        if step == "sleep":
            clock.now_s += WAITING_S / 2
        elif step == "finish":
            memory.finish(key)
            if waiting.pop(key, None) is not None:
                finished.append(key)
        elif step == "put" or key in waiting:
            if step == "put":
                memory.put(key, block)
                finished = [known for known in finished if known != key]
            else:
                assert memory.get(key) is block
            waiting.pop(key, None)
            if len(waiting) + len(finished) == 4:
                oldest = next(iter(waiting), None)
                is_late = oldest is not None and waiting[oldest] < clock.now_s - WAITING_S
                expected = finished.pop(0) if finished and not is_late else oldest
                waiting.pop(expected, None)  # type: ignore[arg-type]
                assert evicted.pop() == expected
            waiting[key] = clock.now_s
        elif key in finished:
            assert memory.get(key) is block
            finished.append(finished.pop(finished.index(key)))
        else:
            assert memory.get(key) is None
        assert not evicted
        assert memory.bytes_held == (len(waiting) + len(finished)) * block.memory_bytes
        assert all((("segment", other) in memory) is (("segment", other) in [*waiting, *finished]) for other in range(8))


def test_a_block_that_is_larger_than_memory_is_not_kept() -> None:
    small, large = CachedBlock(memoryview(b""), 0), CachedBlock(memoryview(bytes(0)), 0)
    evicted = list[BlockKey]()
    memory = BlockMemory(small.memory_bytes, ManualClock(), lambda key, _: evicted.append(key))
    memory.put(("segment", 0), small)
    large.content = memoryview(bytes(1000))
    memory.put(("segment", 1), large)
    assert evicted == [("segment", 1)]
    assert memory.get(("segment", 0)) is small
    assert memory.bytes_held == small.memory_bytes


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
