"""A scrub that cannot check everything says what it left out and why."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from unit.bookies.bookie_cluster import Cluster, run_cluster
from unit.bookies.repair.test_corruption import disk_of, scrub, start

from stratalog_bookies.disk.disk import Disk


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with run_cluster(tmp_path) as made:
        for number in range(3):
            await start(made, f"b{number}")
        yield made


@pytest.fixture
async def disk(cluster: Cluster) -> Disk:
    for _ in range(3):
        await cluster.sealed()
    return disk_of(cluster, "b1")


async def test_a_scrub_that_stops_early_says_at_what_point(
    cluster: Cluster, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(name: str, content: bytes) -> bool:
        raise OSError(errno.EIO, "no such device")

    with monkeypatch.context() as patched:
        patched.setattr(disk.store, "repair_file", failing)
        status = await scrub(cluster, "b1")
        total = status.total_bytes
        assert status.unchecked == f"it stopped at the cookie, after 0 of {total} bytes: [Errno 5] no such device"
    assert (await scrub(cluster, "b1")).unchecked == ""


async def test_a_file_that_lacks_a_descriptor_is_named(cluster: Cluster, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(generation: int) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(disk.store, "check_header", exhausted)
        status = await scrub(cluster, "b1")
    (generation, *_) = sorted(disk.core.contents.files)
    assert status.unchecked.startswith(f"log file {generation:016x} was not checked")
    assert "too many open files" in status.unchecked
    assert status.checked_bytes < status.total_bytes
    status = await scrub(cluster, "b1")
    assert (status.unchecked, status.checked_bytes) == ("", status.total_bytes)
