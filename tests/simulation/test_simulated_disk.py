"""A power cut leaves pages and sectors in any order on a simulated disk, but no state that a real disk cannot have."""

from __future__ import annotations

import asyncio
import random
from contextlib import closing

import pytest

from simulation.world.background import SimulatedBackground
from simulation.world.direct import SimulatedTransfers
from simulation.world.disk import PAGE_BYTES, SECTOR_BYTES, Disk, SimulatedFiles
from simulation.world.loop import SimulatedLoop
from stratalog_core.files.open_files import DirectFile

PAGES = 6
SEEDS = 300


def _crashed(seed: int, *, start: int = 0) -> tuple[bytes, bytes, bytes]:
    """Return the content before, the content that two unsynced writes of whole pages intended, and that after the crash."""
    disk = Disk("disk", random.Random(seed))
    files = disk.mount()
    file = files.open("log", create=True)
    before = b"o" * (PAGES * PAGE_BYTES)
    file.pwritev((before,), 0)
    file.datasync()
    files.sync_directory("")
    first, second = b"a" * (3 * PAGE_BYTES - start), b"b" * (3 * PAGE_BYTES)
    file.pwritev((first,), start)
    file.pwritev((second,), 3 * PAGE_BYTES)
    after = file.pread(1 << 20, 0)
    disk.crash()
    return before, after, disk.mount().read("log")


@pytest.mark.parametrize("start", [0, 100])
def test_each_sector_is_as_before_or_as_written(start: int) -> None:
    for seed in range(SEEDS):
        before, after, left = _crashed(seed, start=start)
        assert len(left) == len(after)
        for at in range(0, len(left), SECTOR_BYTES):
            sector = left[at : at + SECTOR_BYTES]
            assert sector in (before[at : at + SECTOR_BYTES], after[at : at + SECTOR_BYTES])


def test_pages_survive_in_any_order() -> None:
    """Not only a prefix survives: every page survives without every other one, and of a page also some sectors alone."""
    alone = set()
    torn = False
    for seed in range(SEEDS):
        before, after, left = _crashed(seed)
        starts = range(0, len(left), PAGE_BYTES)
        written = [left[at : at + PAGE_BYTES] == after[at : at + PAGE_BYTES] for at in starts]
        kept = [left[at : at + PAGE_BYTES] == before[at : at + PAGE_BYTES] for at in starts]
        alone |= {(here, there) for here in range(PAGES) for there in range(PAGES) if written[here] and kept[there]}
        torn = torn or not all(a or b for a, b in zip(written, kept, strict=True))
    assert alone == {(here, there) for here in range(PAGES) for there in range(PAGES) if here != there}
    assert torn


def _direct(disk: Disk, loop: SimulatedLoop) -> tuple[SimulatedFiles, DirectFile]:
    files = disk.mount(SimulatedTransfers(loop, random.Random(1)).open_direct)
    file = files.open("log", create=True, direct=True)
    assert isinstance(file, DirectFile)
    file.allocate(PAGES * PAGE_BYTES)
    file.datasync()
    files.sync_directory("")
    return files, file


async def _begin_a_direct_write(disk: Disk, loop: SimulatedLoop, content: bytes, wait_s: float) -> list[object]:
    """Crash ``wait_s`` seconds after the write began; return the completions until then."""
    _, file = _direct(disk, loop)
    ended: list[object] = []
    assert file.begin_write((content,), 0, ended.append)
    await asyncio.sleep(wait_s)
    disk.crash()
    return ended


def test_a_direct_write_is_durable_when_it_ends_and_torn_before() -> None:
    whole = b"d" * (3 * PAGE_BYTES)
    found = set()
    for seed in range(SEEDS):
        disk = Disk("disk", random.Random(seed))
        with closing(SimulatedLoop()) as loop:
            ended = loop.run_until_complete(_begin_a_direct_write(disk, loop, whole, seed % 2))
        left = disk.mount().read("log")[: len(whole)]
        assert ended == ([None] if seed % 2 else [])
        if ended:
            assert left == whole
        else:
            found.add(left)
    assert whole in found
    assert bytes(len(whole)) in found
    assert len(found) > 10


def test_what_a_failed_sync_left_is_readable_and_no_later_sync_makes_it_durable() -> None:
    disk = Disk("disk", random.Random(1))
    files = disk.mount()
    file = files.open("log", create=True)
    files.sync_directory("")
    file.pwritev((b"lost",), 0)
    disk.faults.sync_fails = True
    with pytest.raises(OSError, match="fsync"):
        file.datasync()
    disk.faults.sync_fails = False
    file.datasync()
    assert files.read("log") == b"lost"
    assert disk.durable("log") == b""
    file.pwritev((b"lost",), 0)
    file.datasync()
    assert disk.durable("log") == b"lost"


async def _cut_in_a_call(disk: Disk, loop: SimulatedLoop, seed: int) -> None:
    files = disk.mount()
    file = files.open("log", create=True)
    files.sync_directory("")
    background = SimulatedBackground(loop, random.Random(seed))

    def call() -> None:
        file.pwritev((b"x" * PAGE_BYTES,), 0)
        file.datasync()
        files.write_atomic("state", b"done")

    background.run(call)
    background.crash(disk)
    disk.crash()


def test_the_power_goes_in_the_middle_of_a_call() -> None:
    """Of a log's write and sync, the first may have happened alone."""
    found = set()
    for seed in range(SEEDS):
        disk = Disk("disk", random.Random(seed))
        with closing(SimulatedLoop()) as loop:
            loop.run_until_complete(_cut_in_a_call(disk, loop, seed))
        files = disk.mount()
        content, has_state = files.read("log"), files.exists("state")
        assert not has_state or content == b"x" * PAGE_BYTES, "in order"
        found.add((len(content), has_state))
    assert {(0, False), (PAGE_BYTES, False), (PAGE_BYTES, True)} <= found
