"""The durable Raft log: append-only segment files and the vote file, over the ``Files`` port.

Byte layout: docs/reference/formats/metadata-log.md. Always: what ``persist`` was given is durable when it returns; a record is
never changed in place (a conflicting suffix is overruled by later records with the same indexes); a batch is written only
after the one before it is durable. So a damaged record with a later batch after it was once durable: that is corruption
and is refused. In the last batch, what a cut-off write leaves behind (sectors that were never written) is a torn tail, was
never acknowledged, and is removed; other damage is refused. ``mark`` covers what looks like a torn tail and is not.

The vote file says which segment is the newest (``LogMark``): a segment is begun, durably; then the vote file names it; only
then records are written to it. So a log whose end is gone, or comes from an older copy, is told from a healthy one.

Every method blocks; calls must not overlap. After an ``OSError`` the log must not be used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from stratalog_core.errors import Corrupt
from stratalog_core.ports import File, Files
from stratalog_metadata.raft.messages import Entry
from stratalog_metadata.raft.ready import HardState
from stratalog_metadata.raft.tail import LogTail
from stratalog_metadata.storage import raft_log_format as log_format
from stratalog_metadata.storage.identity import REPLACE
from stratalog_metadata.storage.raft_log_format import LogMark
from stratalog_metadata.storage.raft_log_recovery import LogReplay

SEGMENT_BYTES_MAX: Final = 16 * 1024 * 1024
VOTE_FILE: Final = "vote"
_PREFIX: Final = "log-"


@dataclass(slots=True)
class _Segment:
    """``highest`` is the largest index that it ever held: once it is compacted away, the segment is removed."""

    number: int
    highest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogWrite:
    """The part of a ``Ready`` to make durable. ``reset_to`` (index, term): a snapshot replaces everything before."""

    hard_state: HardState | None = None
    reset_to: tuple[int, int] | None = None
    entries: tuple[Entry, ...] = ()
    previous_term: int = 0


class DurableLog:
    """Open it with :meth:`open`."""

    def __init__(self, files: Files, directory: str, segment_bytes_max: int) -> None:
        self._files = files
        self._directory = directory
        self._segment_bytes_max = segment_bytes_max
        self._segments: list[_Segment] = []
        self._file: File | None = None
        self._position = 0
        self._marked = 0
        self._last = (0, 0)
        self._hard_state = HardState()

    @classmethod
    def open(
        cls, files: Files, directory: str, segment_bytes_max: int = SEGMENT_BYTES_MAX, *, must_exist: bool = False
    ) -> tuple[DurableLog, HardState, LogTail]:
        """Recover the log; ``must_exist``: it was created before (:meth:`create`).

        Raises ``Corrupt`` if something that was durable is damaged or missing.
        """
        files.make_directory(directory)
        log = cls(files, directory, segment_bytes_max)
        if must_exist and not (files.exists(f"{directory}/{VOTE_FILE}") and log._segment_numbers()):
            raise Corrupt(
                f"{directory}: vote or log is missing: what this node has promised is lost, and it must not begin anew."
                f" Restore the directory, or replace the node: {REPLACE}"
            )
        hard_state, mark = log._read_vote()
        tail = log._recover(mark)
        log._check_vote(hard_state, tail)
        log._settle(hard_state, mark)
        return log, hard_state, tail

    @classmethod
    def create(cls, files: Files, directory: str) -> None:
        """Write an empty vote and an empty log if there are none, so that their absence later shows a loss."""
        log, hard_state, _ = cls.open(files, directory)
        if hard_state == HardState():
            log.persist([LogWrite(hard_state=hard_state)])
        if not log._segments:
            log._begin_segment((0, 0), reset=False)
        log.close()

    def persist(self, writes: Sequence[LogWrite]) -> None:
        """Write everything in order and make it durable; all entries share one sync."""
        states = [write.hard_state for write in writes if write.hard_state is not None]
        if states:
            self._check_promises(states)
            # First, so that the log never has an entry of a term that the vote file does not know.
            self._hard_state = states[-1]
            self.mark()
        for write in writes:
            if write.reset_to is not None:
                self._reset(*write.reset_to)
        last_reset = max((number for number, write in enumerate(writes) if write.reset_to is not None), default=0)
        self._append([write for write in writes[last_reset:] if write.entries])

    def _check_promises(self, states: Sequence[HardState]) -> None:
        """Assert that the term never falls and that a vote in a term never changes (Raft paper, figure 2)."""
        # A snapshot's last state is written before the batch that contains it: compare that one only with what is stored.
        for before, state in (*pairwise(states), (self._hard_state, states[-1])):
            assert state.term >= before.term, f"term {state.term} after {before.term}"
            assert state.term > before.term or before.voted_for in (0, state.voted_for), f"two votes in term {state.term}"

    def mark(self) -> None:
        """Write the mark durably: the newest segment and where it ends, besides term and vote."""
        newest = LogMark(segment=self._segments[-1].number, end=self._position) if self._segments else LogMark()
        self._files.write_atomic(f"{self._directory}/{VOTE_FILE}", log_format.pack_vote(self._hard_state, newest))
        self._marked = self._position

    @property
    def is_marked(self) -> bool:
        """Whether the mark covers everything that was persisted."""
        return self._marked == self._position

    def compact(self, index: int) -> None:
        """Remove the segments whose entries are all at or below ``index``, except the one being written."""
        while len(self._segments) > 1 and self._segments[0].highest <= index:
            self._remove_oldest()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # --- writing -----------------------------------------------------------------------------------------------------

    def _append(self, writes: Sequence[LogWrite]) -> None:
        if not writes:
            return
        if self._file is None or self._position >= self._segment_bytes_max:
            self._begin_segment(self._last, reset=False)
        assert self._file is not None
        records = [record for write in writes for record in _records(write, self._position)]
        self._file.pwritev(records, self._position)
        self._file.datasync()
        self._position += sum(map(len, records))
        last = writes[-1].entries[-1]
        self._last = (last.index, last.term)
        self._segments[-1].highest = max(self._segments[-1].highest, *(write.entries[-1].index for write in writes))

    def _begin_segment(self, base: tuple[int, int], *, reset: bool) -> None:
        number = self._segments[-1].number + 1 if self._segments else 1
        self.close()
        self._file = self._files.open(self._path(number), create=True)
        header = log_format.pack_segment(*base, reset=reset)
        self._file.pwritev([header], 0)
        self._file.datasync()
        self._files.sync_directory(self._directory)
        self._position = len(header)
        self._segments.append(_Segment(number, base[0]))
        # Before the first record: from now on a loss of the segment is detected.
        self.mark()

    def _reset(self, index: int, term: int) -> None:
        self._begin_segment((index, term), reset=True)
        self._last = (index, term)
        self._remove_all_but_newest()

    def _remove_all_but_newest(self) -> None:
        while len(self._segments) > 1:
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        # Sync after each: a crash that undid an older removal and kept a newer one would leave a gap.
        self._files.remove(self._path(self._segments.pop(0).number))
        self._files.sync_directory(self._directory)

    def _path(self, number: int) -> str:
        return f"{self._directory}/{_PREFIX}{number:010d}"

    # --- recovery ----------------------------------------------------------------------------------------------------

    def _recover(self, mark: LogMark | None) -> LogTail:
        replay = LogReplay()
        numbers = self._segment_numbers()
        if mark is not None and mark.segment > max(numbers, default=0):
            raise self._end_lost(f"segment {mark.segment}, and there are {numbers}")
        for number in numbers:
            path = self._path(number)
            content = self._files.read(path)
            segment = replay.replay(path, content, newest=number == numbers[-1])
            if segment is None:
                if mark is not None and number <= mark.segment:
                    raise self._end_lost(f"segment {number}, and it is empty or its header is damaged")
                self._files.remove(path)
                self._files.sync_directory(self._directory)
                break
            self._check_end(mark, number, segment.end)
            self._segments.append(_Segment(number, segment.highest))
            if segment.reset:
                self._remove_all_but_newest()
            if number == numbers[-1]:
                self._continue(path, content, segment.end)
        self._last = (replay.tail.last_index, replay.tail.last_term)
        return replay.tail

    def _check_end(self, mark: LogMark | None, number: int, end: int) -> None:
        """Whether a segment that ends at ``end`` agrees with the mark. Raises ``Corrupt``."""
        if mark is None:
            return
        if number == mark.segment and end < mark.end:
            raise self._end_lost(f"byte {mark.end} of segment {number}, and it ends at {end}")
        if number > mark.segment and end > log_format.SEGMENT_HEADER_BYTES:
            raise Corrupt(
                f"{self._directory}/{VOTE_FILE} knows the log up to segment {mark.segment} only, but segment {number} has"
                f" records: it is an older copy, and this node might vote twice. Replace the node: {REPLACE}"
            )

    def _end_lost(self, what: str) -> Corrupt:
        return Corrupt(
            f"{self._directory}: the raft log reached {what}: its end is lost or comes from an older copy, and with it what"
            f" this node has acknowledged. Restore the directory as it was last, or replace the node: {REPLACE}"
        )

    def _continue(self, path: str, content: bytes, end: int) -> None:
        """Continue at the end of the newest segment, after cutting off a torn tail durably.

        Write what was read again: a process that was killed before its sync leaves it in the page cache only, and after a
        sync that failed the kernel counts pages as clean that never reached the disk, so that a sync alone does nothing.
        """
        self._file = self._files.open(path)
        self._position = end
        if end < len(content):
            self._file.truncate(end)
        self._file.pwritev([content[:end]], 0)
        self._file.datasync()

    def _settle(self, hard_state: HardState, mark: LogMark | None) -> None:
        """Make file names and mark durable before anything is promised on what was found."""
        self._hard_state = hard_state
        self._files.sync_directory(self._directory)
        if self._segments and mark != LogMark(segment=self._segments[-1].number, end=self._position):
            self.mark()
        self._marked = self._position

    def _segment_numbers(self) -> list[int]:
        names = self._files.list(self._directory)
        numbers = sorted(int(name.removeprefix(_PREFIX)) for name in names if name.startswith(_PREFIX))
        if numbers and numbers != list(range(numbers[0], numbers[-1] + 1)):
            raise Corrupt(f"{self._directory}: a raft log segment is missing; there are {numbers}")
        return numbers

    def _read_vote(self) -> tuple[HardState, LogMark | None]:
        path = f"{self._directory}/{VOTE_FILE}"
        return log_format.unpack_vote(self._files.read(path)) if self._files.exists(path) else (HardState(), None)

    def _check_vote(self, hard_state: HardState, tail: LogTail) -> None:
        path = f"{self._directory}/{VOTE_FILE}"
        if tail.last_index and not self._files.exists(path):
            raise Corrupt(f"{path} is missing although the log has entries: this node might vote twice")
        if hard_state.term < tail.last_term:
            raise Corrupt(f"{path} says term {hard_state.term}, but the log has entries of term {tail.last_term}")


def _records(write: LogWrite, batch_position: int) -> list[bytes]:
    previous_term = write.previous_term
    records = []
    for entry in write.entries:
        records.append(log_format.pack_record(entry, previous_term, batch_position))
        previous_term = entry.term
    return records
