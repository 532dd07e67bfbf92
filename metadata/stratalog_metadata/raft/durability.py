"""Which of a node's promises are durable, and which are being written.

Always: ``stable`` is the last index up to which this node's log is durable; it says nothing about commitment. Writes become
durable in the order in which they were handed out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from stratalog_metadata.raft.messages import Entry
from stratalog_metadata.raft.ready import HardState, Ready
from stratalog_metadata.raft.tail import LogTail

WRITES_MAX: Final = 256
"""Writes in progress up to which heartbeats are answered at once. An answer may let the leader send one more append."""


@dataclass(frozen=True, slots=True)
class _Write:
    """A ``Ready`` that is being written, and what its durability means."""

    number: int
    snapshot_index: int
    last_index: int
    last_term: int
    vote_term: int
    has_hard_state: bool


class Durability:
    """``unsaved_from`` is the first index that has not been handed out for writing."""

    __slots__ = ("_saved", "_writes", "stable", "unsaved_from")

    def __init__(self, hard_state: HardState, last_index: int) -> None:
        self.stable = last_index
        self.unsaved_from = last_index + 1
        self._saved = hard_state
        self._writes: deque[_Write] = deque()

    def changed(self, term: int, voted_for: int) -> HardState | None:
        """The hard state to write, if it differs from the last one that was handed out."""
        if self._saved.term == term and self._saved.voted_for == voted_for:
            return None
        return HardState(term=term, voted_for=voted_for)

    def unsaved(self, log: LogTail) -> tuple[Entry, ...]:
        """The entries to hand out next."""
        return log.between(self.unsaved_from, log.last_index) if self.unsaved_from <= log.last_index else ()

    def promises(self, term: int) -> bool:
        """Whether the term is durable, so that an answer that promises nothing else may leave at once.

        It need not wait for entries: if all disks hang for a while, the leader stays, and its sessions with it.
        """
        is_written = not any(write.has_hard_state for write in self._writes)
        return self._saved.term == term and is_written and len(self._writes) <= WRITES_MAX

    def replaced_from(self, index: int) -> None:
        """Record that the log's entries from ``index`` on were replaced."""
        self.stable = min(self.stable, index - 1)
        self.unsaved_from = min(self.unsaved_from, index)

    def restored(self, index: int) -> None:
        """Record that a snapshot, not durable yet, has replaced the whole log."""
        self.stable = 0
        self.unsaved_from = index + 1

    def handed_out(self, ready: Ready, vote_term: int, last_index: int) -> None:
        """Record that ``ready`` is being written; it contains the node's vote for itself in ``vote_term`` (0: no vote)."""
        last = ready.entries[-1] if ready.entries else None
        snapshot_index = ready.snapshot.index if ready.snapshot is not None else 0
        last_index_written, last_term = (last.index, last.term) if last else (0, 0)
        has_hard_state = ready.hard_state is not None
        self._writes.append(_Write(ready.number, snapshot_index, last_index_written, last_term, vote_term, has_hard_state))
        self._saved = ready.hard_state or self._saved
        self.unsaved_from = last_index + 1

    def settle(self, number: int, log: LogTail) -> list[int]:
        """Record that everything up to ``Ready`` ``number`` is durable. Returns the terms of this node's own votes among
        it.
        """
        vote_terms = []
        while self._writes and self._writes[0].number <= number:
            done = self._writes.popleft()
            if done.snapshot_index and log.base_index >= done.snapshot_index:
                self.stable = max(self.stable, done.snapshot_index)
            if done.last_index and log.matches(done.last_index, done.last_term):
                self.stable = max(self.stable, done.last_index)
            if done.vote_term:
                vote_terms.append(done.vote_term)
        return vote_terms

    def validate_state(self, last_index: int) -> None:
        assert self.stable <= last_index
        assert self.stable < self.unsaved_from <= last_index + 1
        assert all(earlier.number < later.number for earlier, later in pairwise(self._writes))
