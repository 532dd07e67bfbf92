"""The in-memory part of the log: all entries after the last compaction.

Always: indexes are contiguous from ``base_index`` + 1, and terms never fall. It does not know which entries are durable.
"""

from __future__ import annotations

from collections.abc import Sequence

from stratalog_metadata.raft.messages import Entry

_ENTRY_OVERHEAD_BYTES = 32


class LogTail:
    """Entries after (``base_index``, ``base_term``), the last entry that was compacted away (0, 0: none), to ``last_index``."""

    __slots__ = ("_entries", "base_index", "base_term", "last_index", "payload_bytes")

    def __init__(self, base_index: int = 0, base_term: int = 0, entries: Sequence[Entry] = ()) -> None:
        self.base_index = base_index
        self.base_term = base_term
        self.last_index = base_index
        self._entries: list[Entry] = []
        self.payload_bytes = 0
        self.extend(entries)

    @property
    def last_term(self) -> int:
        return self._entries[-1].term if self._entries else self.base_term

    @property
    def last(self) -> tuple[int, int]:
        """(term, index) of the last entry: what elections compare."""
        return self.last_term, self.last_index

    def __len__(self) -> int:
        return len(self._entries)

    def term_at(self, index: int) -> int | None:
        """Term of the entry at ``index``; None if it was compacted away or does not exist."""
        if index == self.base_index:
            return self.base_term
        if self.base_index < index <= self.last_index:
            return self._entries[index - self.base_index - 1].term
        return None

    def matches(self, index: int, term: int) -> bool:
        return self.term_at(index) == term

    def extend(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            assert entry.index == self.last_index + 1, f"entry {entry.index} after {self.last_index}"
            assert entry.term >= self.last_term, f"term {entry.term} after {self.last_term}"
            self._entries.append(entry)
            self.last_index = entry.index
            self.payload_bytes += len(entry.payload)

    def truncate_after(self, index: int) -> None:
        """Remove all entries after ``index``."""
        assert index >= self.base_index
        dropped = self._entries[index - self.base_index :]
        self.payload_bytes -= sum(len(entry.payload) for entry in dropped)
        del self._entries[index - self.base_index :]
        self.last_index = min(self.last_index, index)

    def compact(self, index: int) -> None:
        """Remove all entries up to ``index``."""
        if index <= self.base_index:
            return
        term = self.term_at(index)
        assert term is not None, f"cannot compact to {index}: the log ends at {self.last_index}"
        dropped = self._entries[: index - self.base_index]
        self.payload_bytes -= sum(len(entry.payload) for entry in dropped)
        del self._entries[: index - self.base_index]
        self.base_index, self.base_term = index, term

    def reset(self, index: int, term: int) -> None:
        """Replace everything by a snapshot at (``index``, ``term``)."""
        self.base_index, self.base_term, self.last_index = index, term, index
        self._entries.clear()
        self.payload_bytes = 0

    def between(self, first: int, last: int) -> tuple[Entry, ...]:
        """Entries ``first`` … ``last``, both included."""
        assert first > self.base_index
        return tuple(self._entries[first - self.base_index - 1 : max(last - self.base_index, 0)])

    def batch(self, first: int, bytes_max: int) -> tuple[Entry, ...]:
        """Entries from ``first`` on within ``bytes_max``; at least one if there is one."""
        start = first - self.base_index - 1
        assert start >= 0
        end, total = start, 0
        while end < len(self._entries):
            total += len(self._entries[end].payload) + _ENTRY_OVERHEAD_BYTES
            if total > bytes_max and end > start:
                break
            end += 1
        return tuple(self._entries[start:end])

    def conflict(self, entries: Sequence[Entry]) -> int | None:
        """Index of the first of ``entries`` that differs from the log; None if none does."""
        for entry in entries:
            if entry.index > self.base_index and not self.matches(entry.index, entry.term):
                return entry.index
        return None

    def last_not_after(self, index: int, term: int) -> tuple[int, int]:
        """The last (index, term) up to ``index`` whose term is at most ``term``: where two logs may match."""
        index = min(index, self.last_index)
        while index > self.base_index:
            found = self.term_at(index)
            assert found is not None
            if found <= term:
                return index, found
            index -= 1
        return self.base_index, self.base_term
