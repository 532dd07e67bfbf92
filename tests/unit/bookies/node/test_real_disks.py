"""A bookie process over a disk whose sync fails once, and over a small file system that really fills up."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from chaos.faulty_files import DiskFault, clear_fault, set_fault
from unit.bookies.node.test_server import Place, Talk, bookie_process, place, until

from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import Status

OK = Status.OK
_ = place


async def test_a_sync_that_fails_once_never_leads_to_an_acknowledgement(tmp_path: Path) -> None:
    control = tmp_path / "faults"
    (tmp_path / "faulty").touch()
    acknowledged: dict[int, bytes] = {}
    async with bookie_process(tmp_path) as bookie:
        for entry in range(20):
            if entry == 10:
                set_fault(control, DiskFault(failing=("sync",)))
            statuses = await bookie.add((1, entry, bytes([entry]) * 1000))
            clear_fault(control)
            assert statuses == [OK if entry < 10 else Status.STORAGE_FAILED], "the disk is retired, not tried again"
            if statuses == [OK]:
                acknowledged[entry] = bytes([entry]) * 1000
        assert await bookie.entries(1) == acknowledged, "what was durable is still read"
        assert {tail.status for tail in await bookie.tails(messages.FENCE, 1)} == {Status.STORAGE_FAILED}
        info = await bookie.info()
        assert (info.disks[0].state, info.read_only) == ("failed", True)
    async with bookie_process(tmp_path) as bookie:
        found = await bookie.entries(1)
        assert found.items() >= acknowledged.items()
        assert await bookie.add((1, 20, b"after the restart")) == [OK]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], capture_output=True, check=False
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@asynccontextmanager
async def _on(place: Place, disk: Path) -> AsyncIterator[Talk]:
    async with place.bookie(
        data_dirs=(str(disk),), log_file_bytes=128 * 1024, spare_files=0, free_bytes_min=256 * 1024
    ) as bookie:  # fmt: skip
        yield bookie


async def _fill(bookie: Talk, short_lived: int, first: int) -> int:
    """Add to a long-lived and a short-lived ledger until the disk is full; returns the next entry id."""
    entry = first
    while await bookie.add((short_lived, entry, bytes(20_000))) == [OK]:
        assert await bookie.add((1, entry, b"long-lived")) in ([OK], [Status.READ_ONLY])
        entry += 1
        assert entry < first + 1000, "two mebibytes are full by now"
    return entry


async def test_a_disk_that_really_fills_up_serves_reads_and_frees_itself(place: Place, small_disk: Path) -> None:
    async with _on(place, small_disk) as bookie:
        entry = await _fill(bookie, 2, 0)
        await until(lambda: place.record().read_only)
        long_lived = await bookie.entries(1)
        assert len(long_lived) >= entry - 1
        assert len(await bookie.entries(2)) == entry
        await place.forget(2)
        await until(lambda: not place.record().read_only)
        again = await _fill(bookie, 3, 5000)
        assert again - 5000 > entry // 2, "the space of what was short-lived is there again"
        found = await bookie.entries(1)
        assert found.items() >= long_lived.items()
        assert await bookie.counter("compacted_bytes") > 0
        info = await bookie.info()
        assert info.disks[0].state == "read_only"
        assert info.disks[0].unmovable_files == 0
    async with _on(place, small_disk) as bookie:
        assert (await bookie.entries(1)).items() >= long_lived.items()
