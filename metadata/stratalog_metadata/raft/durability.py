"""What of a node's promises is on its disk, and what is still being written.

Always: ``stable`` is the last index up to which this node's log is durable; it says nothing about commitment. Writes become
durable in the order in which they were handed out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from stratalog_metadata.raft.messages import Entry
from stratalog_metadata.raft.ready import HardState, Ready
from stratalog_metadata.raft.tail import LogTail


@dataclass(frozen=True, slots=True)
class _Write:
    """A Ready that is being written: what its durability will mean."""

    number: int
    snapshot_index: int
    last_index: int
    last_term: int
    vote_term: int


class Durability:
    """``unsaved_from`` is the first index that has not been handed out to be written."""

    __slots__ = ("_saved", "_writes", "stable", "unsaved_from")

    def __init__(self, hard_state: HardState, last_index: int) -> None:
        self.stable = last_index
        self.unsaved_from = last_index + 1
        self._saved = hard_state
        self._writes: deque[_Write] = deque()

    def changed(self, term: int, voted_for: int) -> HardState | None:
        """The hard state to write, if it is another than was last handed out."""
        if self._saved.term == term and self._saved.voted_for == voted_for:
            return None
        return HardState(term=term, voted_for=voted_for)

    def unsaved(self, log: LogTail) -> tuple[Entry, ...]:
        """What is to be handed out next."""
        return log.between(self.unsaved_from, log.last_index) if self.unsaved_from <= log.last_index else ()

    def promises(self, term: int) -> bool:
        """Whether the term is durable: an answer that promises nothing else may leave at once."""
        return self._saved.term == term and not self._writes

    def replaced_from(self, index: int) -> None:
        """The log's entries from ``index`` on are new ones."""
        self.stable = min(self.stable, index - 1)
        self.unsaved_from = min(self.unsaved_from, index)

    def restored(self, index: int) -> None:
        """A snapshot that is not durable yet has replaced the whole log."""
        self.stable = 0
        self.unsaved_from = index + 1

    def handed_out(self, ready: Ready, vote_term: int, last_index: int) -> None:
        """``ready`` is being written; it carries the node's vote for itself in ``vote_term`` (0: no vote)."""
        last = ready.entries[-1] if ready.entries else None
        snapshot_index = ready.snapshot.index if ready.snapshot is not None else 0
        self._writes.append(
            _Write(ready.number, snapshot_index, last.index if last else 0, last.term if last else 0, vote_term)
        )
        self._saved = ready.hard_state or self._saved
        self.unsaved_from = last_index + 1

    def settle(self, number: int, log: LogTail) -> list[int]:
        """Everything up to Ready ``number`` is durable; returns the terms of own votes among it."""
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
