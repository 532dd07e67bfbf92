"""Group commit: whatever happens to a disk, every caller that waits for a group is answered."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
from unit.bookies.plain_disk import PlainDisk

from stratalog_bookies.disk.core.log import Write
from stratalog_bookies.disk.group_commit import GroupCommit
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.metrics import Counters
from stratalog_core.errors import StorageFailed
from stratalog_core.ports import OnWritten
from stratalog_core.system import SystemFiles, ThreadBackground


class HeldFiles(LogFiles):
    """Log files whose kernel writes end when the test says so."""

    def __init__(self, store: LogFiles) -> None:
        self.__dict__.update(store.__dict__)
        self.held: list[tuple[Write, OnWritten]] = []

    def begin_write(self, write: Write, done: OnWritten) -> bool:
        self.held.append((write, done))
        return True

    def end(self, failure: OSError | None = None) -> None:
        write, done = self.held.pop(0)
        if failure is None:
            self.write(write)
        done(failure)


class Held:
    """A disk and its group commit over files whose writes are held; records which entries were answered."""

    def __init__(self, path: Path, background: ThreadBackground) -> None:
        self.disk = PlainDisk(SystemFiles(path), file_bytes=64 * 1024)
        self.core = self.disk.core
        self.disk.store = self.files = HeldFiles(self.disk.store)
        self.counters = Counters()
        self.commit = GroupCommit(self.core, self.files, background, self.counters, lambda: None)
        self.answered: list[int] = []
        self._entries = 0

    def add(self, payload_bytes: int = 100) -> None:
        self.disk.add((1, self._entries, b"x" * payload_bytes))
        self.commit.when_durable(self.core.log.sequence, partial(self.answered.append, self._entries))
        self._entries += 1


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[Held]:
    background = ThreadBackground(1, "test")
    made = Held(tmp_path, background)
    yield made
    made.files.close()
    background.close()


async def until(condition: Callable[[], object]) -> None:
    """A group begins in the loop's next turn."""
    for _ in range(10):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("no group was begun")


async def test_what_comes_meanwhile_is_the_next_group(held: Held) -> None:
    held.add()
    await until(lambda: held.files.held)
    held.add()
    held.add()
    held.files.end()
    assert held.answered == [0]
    assert len(held.files.held) == 1, "the next one began before anybody was answered"
    held.files.end()
    await held.commit.close()
    assert held.answered == [0, 1, 2]


async def test_groups_and_their_bytes_and_times_are_counted(held: Held) -> None:
    first = held.core.log.durable_position
    held.add()
    await until(lambda: held.files.held)
    held.add(3_000)
    held.add()
    assert held.commit.waiting == 3
    held.files.end()
    assert (held.counters.log_groups, held.commit.waiting) == (1, 2)
    held.files.end()
    await held.commit.close()
    assert held.counters.log_groups == sum(held.commit.seconds.counts) == sum(held.commit.bytes.counts) == 2
    assert held.counters.log_bytes == held.commit.bytes.sum == held.core.log.durable_position - first
    assert held.counters.log_bytes > 3_200


async def test_a_disk_that_is_retired_before_a_group_begins_leaves_nobody_waiting(held: Held) -> None:
    held.add()
    held.core.fail("its files cannot be kept")
    await held.commit.close()
    assert held.answered == [0]
    assert not held.files.held, "nothing is written to it any more"
    with pytest.raises(StorageFailed, match="cannot be kept"):
        await held.commit.durable(held.core.log.sequence)


async def test_a_disk_that_is_retired_while_a_group_is_written_answers_at_its_end(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    held.add()
    await until(lambda: held.files.held)
    held.add()
    durable = held.core.log.durable_sequence
    held.core.fail("its files cannot be kept")
    with caplog.at_level(logging.ERROR):
        held.files.end()
    await held.commit.close()
    assert held.answered == [0, 1]
    assert held.core.log.durable_sequence == durable, "nothing is durable on a failed disk"
    assert held.core.failure == "its files cannot be kept"
    assert not caplog.records, "it failed for another reason than its writes"


async def test_a_write_that_fails_is_told_to_all_and_nothing_follows(held: Held) -> None:
    held.add()
    await until(lambda: held.files.held)
    held.add()
    held.files.end(OSError(errno.EIO, "broken"))
    await held.commit.close()
    assert held.answered == [0, 1]
    assert "broken" in held.core.failure
    assert not held.files.held


async def test_an_answer_that_cannot_be_given_keeps_no_other_back(held: Held) -> None:
    def refuse() -> None:
        raise ValueError("nobody is there")

    held.commit.when_durable(held.core.log.sequence + 1, refuse)
    held.add()
    await until(lambda: held.files.held)
    held.files.end(OSError(errno.EIO, "broken"))
    await held.commit.close()
    assert held.answered == [0]


async def test_closing_waits_for_what_is_under_way_and_what_follows(held: Held) -> None:
    held.add()
    await until(lambda: held.files.held)
    held.add()
    closing = asyncio.ensure_future(held.commit.close())
    await asyncio.sleep(0)
    held.files.end()
    await asyncio.sleep(0)
    assert not closing.done()
    held.files.end()
    await closing
    assert held.answered == [0, 1]


async def test_a_group_of_the_next_file_follows_the_last_of_the_file_before(held: Held) -> None:
    """The first one's file may be closed as soon as the group is durable."""
    first = held.core.log.generation
    held.add(40_000)
    await until(lambda: held.files.held)
    held.add(40_000)
    assert held.core.log.generation == first + 1
    assert held.core.next_to_close() is None, "its last group is under way"
    held.files.end()
    assert [write.generation for write, _ in held.files.held] == [first + 1]
    held.files.end()
    assert held.core.next_to_close() == first
    held.disk.close_full()
    held.add()
    await until(lambda: held.files.held)
    held.files.end()
    await held.commit.close()
    assert held.answered == [0, 1, 2]
    assert held.disk.read(1) == {0: b"x" * 40_000, 1: b"x" * 40_000, 2: b"x" * 100}


async def test_an_impossible_state_fails_the_disk_before_the_write(held: Held) -> None:
    held.add()
    await until(lambda: held.files.held)
    held.files.end()
    await held.commit.close()
    held.core.log.durable_position += 8
    held.add()
    await held.commit.close()
    assert not held.files.held, "the group after a gap is not written"
    assert "contiguous" in held.core.failure
    assert held.answered == [0, 1]
