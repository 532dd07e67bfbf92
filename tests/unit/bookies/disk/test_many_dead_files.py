"""A disk that frees or prewrites many log files prepares the next one in between: adds do not wait for all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event, Semaphore

from unit.bookies.disk.one_disk import FILE_BYTES, opened
from unit.bookies.disk.test_transient_errors import COOKIE, TIMEOUT_S, Rationed, add, until

from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.core.cookie import disk_key
from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.protocol.messages import Status
from stratalog_core.system import SystemFiles

HELD_S = 5.0
"""Time in which an add is answered that does not wait for files to be freed."""


class SlowlyRemoved(Rationed):
    """A disk whose files are removed one by one, when the test allows it, once ``is_slow`` is set."""

    def __init__(self, path: Path) -> None:
        files = SystemFiles(path)
        recovery.create(LogFiles(files, disk_key(COOKIE, 0), FILE_BYTES))
        super().__init__(files)
        self.is_slow = False
        self.allowed = Semaphore(0)
        self.began = Event()
        self.removed = 0

    def remove(self, path: str) -> None:
        if self.is_slow:
            self.began.set()
            assert self.allowed.acquire(timeout=TIMEOUT_S)
        self._files.remove(path)
        self.removed += self.is_slow


async def _fill(disk: Disk, ledger_id: int, entries: int) -> None:
    for entry in range(entries):
        assert await add(disk, ledger_id, entry, bytes(20_000)) is Status.OK


async def test_adds_wait_for_one_of_many_dead_files(tmp_path: Path) -> None:
    files = SlowlyRemoved(tmp_path)
    async with opened(files, tmp_path) as disk:
        await _fill(disk, 1, 30)
        await until(lambda: len([each for each in disk.core.contents.files.values() if each.closed]) >= 9)
        files.is_slow = True
        await disk.delete([1])
        await asyncio.to_thread(files.began.wait, TIMEOUT_S)
        adds: list[asyncio.Task[Status]] = []
        while not disk._held:
            adds.append(asyncio.create_task(add(disk, 2, len(adds), bytes(20_000))))
            await asyncio.sleep(0)
        files.allowed.release()
        _, waiting = await asyncio.wait(adds, timeout=HELD_S)
        removed = files.removed
        files.allowed.release(1000)
        assert (len(waiting), removed) == (0, 1)
        assert {task.result() for task in adds} == {Status.OK}
        await until(lambda: not disk.core.contents.dead_files() and not disk.files._dropped)


def test_prewriting_ends_when_the_next_file_is_wanted(tmp_path: Path) -> None:
    files = SystemFiles(tmp_path)
    store = LogFiles(files, disk_key(COOKIE, 0), 4 << 20)
    answers = [False, True]
    store.fill_spare(lambda: answers.pop(0))
    assert (answers, store.spare_files) == ([], 1)
    (spare,) = files.list("log")
    assert files.open(f"log/{spare}").size() == 4 << 20
