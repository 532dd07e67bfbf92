"""Reads around the page cache: the very bytes that the file holds, wherever a range begins and ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratalog_core.files import uncached_reads
from stratalog_core.files.open_files import DirectFile, open_file
from stratalog_core.files.uncached_reads import memory_bytes, read_uncached
from stratalog_core.ports import Buffer

FILE_BYTES = 5 * 4096 + 777
CONTENT = bytes((position * 7 + position // 4096) % 251 for position in range(FILE_BYTES))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "object"
    path.write_bytes(CONTENT)
    return path


def read(path: Path, start: int, length: int, misaligned_by: int = 0) -> bytes:
    memory = memoryview(bytearray(memory_bytes(start, length) + misaligned_by))[misaligned_by:]
    return bytes(read_uncached(path, start, length, memory))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(start=st.integers(0, FILE_BYTES + 9000), length=st.integers(1, 3 * 4096), misaligned_by=st.integers(0, 4095))
def test_a_range_is_what_the_file_holds_of_it(path: Path, start: int, length: int, misaligned_by: int) -> None:
    assert read(path, start, length, misaligned_by) == CONTENT[start : start + length]


def test_a_file_system_without_direct_reads_is_read_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncached_reads, "_DIRECT", 0)
    assert read(path, 100, 9000) == CONTENT[100:9100]


def test_what_is_not_there_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none", 0, 1)


@pytest.mark.parametrize("sizes", [[4096], [10, 5000, 70_000], [4096, 4096, 1]])
def test_what_was_written_directly_is_durable_after_a_sync_each_time(
    tmp_path: Path, sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_file(tmp_path / "new", create=True, direct=True, synchronous=False)
    if not isinstance(file, DirectFile):
        file.close()
        pytest.skip("the file system of the temporary directory knows no direct writes")
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    position, content = 0, b""
    for number, size in enumerate(sizes, 1):
        parts: list[Buffer] = [bytes([number]) * size]
        file.pwritev(parts, position)
        file.datasync()
        assert len(synced) == number
        position, content = position + size, content + bytes([number]) * size
    file.close()
    assert read(tmp_path / "new", 0, position) == content
