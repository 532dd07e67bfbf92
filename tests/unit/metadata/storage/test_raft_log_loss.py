"""A log whose newest part is missing or outdated is refused; one that was interrupted at any step never is."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from simulation.world.disk import Disk, SimulatedFiles
from support.embedded_quorum import embedded_quorum
from unit.metadata.storage.test_raft_log import SEGMENT, VOTE_TERM, entries_of, entry, reopened, write, written

from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer, File, Files
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemFiles
from stratalog_metadata.raft import Entry, HardState, LogTail
from stratalog_metadata.records import DynamicConfig
from stratalog_metadata.state.commands import Command, Put
from stratalog_metadata.storage import raft_log_format as log_format
from stratalog_metadata.storage.raft_log import DurableLog, LogWrite
from stratalog_metadata.storage.raft_log_format import LogMark

TIMEOUT_S = 60
ROLLING = 60
"""Bytes of a segment: each batch begins one."""


def one_by_one(last: int) -> list[list[LogWrite]]:
    return [[write(entry(index), previous_term=1 if index > 1 else 0)] for index in range(1, last + 1)]


def three_segments(root: Path) -> None:
    written(root, one_by_one(3), ROLLING).close()


# --- losses ----------------------------------------------------------------------------------------------------------


def test_a_lost_newest_segment_is_refused(tmp_path: Path) -> None:
    three_segments(tmp_path)
    (tmp_path / "raft" / "log-0000000003").unlink()
    with pytest.raises(Corrupt, match=r"reached segment 3, and there are \[1, 2\].*older copy.*stratalog metadata remove"):
        reopened(tmp_path)


def test_the_loss_of_all_segments_is_refused(tmp_path: Path) -> None:
    three_segments(tmp_path)
    for path in (tmp_path / "raft").glob("log-*"):
        path.unlink()
    with pytest.raises(Corrupt, match=r"reached segment 3, and there are \[\]"):
        reopened(tmp_path)


@pytest.mark.parametrize("content", [b"", b"SLRAFTLG", bytes(100)])
def test_a_newest_segment_that_was_emptied_is_refused(tmp_path: Path, content: bytes) -> None:
    three_segments(tmp_path)
    (tmp_path / "raft" / "log-0000000003").write_bytes(content)
    with pytest.raises(Corrupt, match="reached segment 3"):
        reopened(tmp_path)


def test_an_older_copy_of_the_newest_segment_is_refused_after_a_stop(tmp_path: Path) -> None:
    """A node records the end of its log at an orderly stop and with each vote."""
    log = written(tmp_path, [[write(entry(1))]])
    shutil.copy(tmp_path / SEGMENT, tmp_path / "copy")
    log.persist([write(entry(2), previous_term=1)])
    log.mark()
    log.close()
    shutil.copy(tmp_path / "copy", tmp_path / SEGMENT)
    with pytest.raises(Corrupt, match="of segment 1, and it ends at"):
        reopened(tmp_path)


def test_an_older_copy_of_the_vote_is_refused_after_the_log_has_grown(tmp_path: Path) -> None:
    log = written(tmp_path, [], ROLLING)
    shutil.copy(tmp_path / "raft" / "vote", tmp_path / "copy")
    log.persist([write(entry(1))])
    log.persist([write(entry(2), previous_term=1)])
    log.close()
    shutil.copy(tmp_path / "copy", tmp_path / "raft" / "vote")
    with pytest.raises(Corrupt, match="knows the log up to segment 0 only"):
        reopened(tmp_path)


def test_a_vote_of_version_1_is_migrated(tmp_path: Path) -> None:
    three_segments(tmp_path)
    vote = tmp_path / "raft" / "vote"
    vote.write_bytes(log_format._sealed(log_format._VOTE_1.pack(log_format.VOTE_MAGIC, 1, VOTE_TERM, 2)))
    assert reopened(tmp_path).last_index == 3
    segment_bytes = (tmp_path / "raft" / "log-0000000003").stat().st_size
    marked = HardState(term=VOTE_TERM, voted_for=2), LogMark(segment=3, end=segment_bytes)
    assert log_format.unpack_vote(vote.read_bytes()) == marked
    (tmp_path / "raft" / "log-0000000003").unlink()
    with pytest.raises(Corrupt, match="reached segment 3"):
        reopened(tmp_path)


def test_a_log_that_was_created_and_never_written_is_known(tmp_path: Path) -> None:
    DurableLog.create(SystemFiles(tmp_path), "raft")
    (tmp_path / SEGMENT).unlink()
    with pytest.raises(Corrupt, match="reached segment 1"):
        reopened(tmp_path)


# --- cuts ------------------------------------------------------------------------------------------------------------


class PowerCut(Exception):
    pass


class CountedFile:
    def __init__(self, file: File, files: CountedFiles) -> None:
        self._file = file
        self._files = files
        self.size, self.pread, self.close = file.size, file.pread, file.close
        self.allocate, self.truncate = file.allocate, file.truncate

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        self._files.step(lambda: self._file.pwritev(buffers, position))

    def datasync(self) -> None:
        self._files.step(self._file.datasync)


class CountedFiles:
    """``steps_left`` more changes happen; the next one does not, or (``late``) it does and nobody is told."""

    def __init__(self, files: SimulatedFiles, steps_left: int, *, late: bool) -> None:
        self._files = files
        self.steps_left = steps_left
        self.late = late
        self.read, self.list, self.exists, self.make_directory = files.read, files.list, files.exists, files.make_directory
        self.free_bytes, self.rename, self.lock = files.free_bytes, files.rename, files.lock

    def step(self, change: Callable[[], None]) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            if self.late:
                change()
            raise PowerCut
        change()

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> File:
        return CountedFile(self._files.open(path, create=create, direct=direct), self)

    def write_atomic(self, path: str, content: bytes) -> None:
        self.step(lambda: self._files.write_atomic(path, content))

    def remove(self, path: str) -> None:
        self.step(lambda: self._files.remove(path))

    def sync_directory(self, path: str) -> None:
        self.step(lambda: self._files.sync_directory(path))


class Life:
    """A log is created, written, rolled, voted on, compacted, reset and stopped. ``promised``: what it was told is durable."""

    def __init__(self) -> None:
        self.promised = LogTail()
        self.term = 0

    def live(self, files: Files) -> None:
        DurableLog.create(files, "raft")
        log, _, _ = DurableLog.open(files, "raft", ROLLING, must_exist=True)
        self._vote(log, 1)
        for index in (1, 2, 3):
            self._append(log, [entry(index)], previous_term=min(index - 1, 1))
        log.compact(2)
        self._vote(log, 2)
        self._append(log, [entry(3, 2), entry(4, 2)], previous_term=1)
        log.persist([LogWrite(reset_to=(9, 2))])
        self.promised = LogTail(9, 2)
        self._append(log, [entry(10, 2)], previous_term=2)
        log.mark()
        log.close()

    def _vote(self, log: DurableLog, term: int) -> None:
        log.persist([LogWrite(hard_state=HardState(term=term))])
        self.term = term

    def _append(self, log: DurableLog, entries: list[Entry], previous_term: int) -> None:
        log.persist([LogWrite(entries=tuple(entries), previous_term=previous_term)])
        self.promised.truncate_after(entries[0].index - 1)
        self.promised.extend(entries)

    def check(self, files: Files) -> LogTail:
        log, hard_state, tail = DurableLog.open(files, "raft", ROLLING)
        log.close()
        assert hard_state.term >= self.term
        for kept in entries_of(self.promised):
            # The interrupted write may be there, too: a reset, or entries of term 2 that replace others.
            assert kept.index <= tail.base_index or tail.term_at(kept.index) in (kept.term, 2), kept
        assert tail.last_index >= self.promised.last_index or tail.last_term > self.promised.last_term
        return tail


def cuts(seed: int) -> Iterator[tuple[Life, Disk]]:
    """A life that was cut off at its first step, its second, and so on to its end."""
    for late in (False, True):
        for steps in range(1_000):
            disk, life = Disk("disk", random.Random(seed)), Life()
            try:
                life.live(CountedFiles(disk.mount(), steps, late=late))
            except PowerCut:
                yield life, disk
            else:
                assert steps > 20
                break


@pytest.mark.parametrize("seed", range(10))
def test_a_power_cut_at_any_step_never_refuses_a_healthy_node(seed: int) -> None:
    for life, disk in cuts(seed):
        for _ in range(3):
            disk.crash()
            life.check(disk.mount())


@pytest.mark.parametrize("seed", range(10))
def test_entries_in_the_page_cache_of_a_killed_process_are_synced_before_use(seed: int) -> None:
    for life, disk in cuts(seed):
        seen = life.check(disk.mount())
        disk.crash()
        assert entries_of(life.check(disk.mount())) == entries_of(seen)


@pytest.mark.parametrize("seed", range(10))
def test_a_power_cut_during_recovery_loses_nothing(seed: int) -> None:
    for number, (life, disk) in enumerate(cuts(seed)):
        disk.crash()
        try:
            life.check(CountedFiles(disk.mount(), number % 5, late=number % 2 == 0))
        except PowerCut:
            disk.crash()
        life.check(disk.mount())


# --- the end of a log that nothing follows ---------------------------------------------------------------------------


async def test_a_running_node_marks_the_end_of_its_log_when_nothing_more_is_written(tmp_path: Path) -> None:
    transport = TcpTransport()
    async with embedded_quorum(tmp_path, transport) as quorum:
        await quorum.client.propose(Command(updates=(Put(record=DynamicConfig(resource="a", configs={})),)))
        raft = tmp_path / "1" / "raft"

        def marked_bytes() -> int:
            _, mark = log_format.unpack_vote((raft / "vote").read_bytes())
            assert mark is not None
            return mark.end

        async with asyncio.timeout(TIMEOUT_S):
            while marked_bytes() < (raft / "log-0000000001").stat().st_size:  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.01)
        # As after kill -9: the node has not stopped in order, and the end of its log is gone.
        shutil.copytree(raft, tmp_path / "copy" / "raft")
    segment = tmp_path / "copy" / SEGMENT
    segment.write_bytes(segment.read_bytes()[:-1])
    with pytest.raises(Corrupt, match="its end is lost"):
        reopened(tmp_path / "copy")
    await transport.close()
