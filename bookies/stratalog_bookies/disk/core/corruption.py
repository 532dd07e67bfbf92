"""The known, unrepaired corruption of one disk.

INFO, SCRUB and ``stratalog doctor`` report from here until it is repaired. Corruption is never treated as absence. The lists
are bounded; what does not fit is found again by the next read or scrub. It does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

ENTRIES_MAX: Final = 10_000
_FIRST_RETRY_S: Final = 1.0
_RETRY_S_MAX: Final = 60.0


@dataclass(slots=True, eq=False)
class CorruptEntry:
    """An entry whose copy in log file ``generation`` cannot be read. ``reason`` is why the last repair failed."""

    ledger_id: int
    entry_id: int
    generation: int
    tries: int = 0
    due_s: float = 0.0
    reason: str = ""

    def postpone(self, now: float, reason: str) -> None:
        """Schedule the next attempt: the replica with a good copy may be down."""
        self.due_s = now + min(_FIRST_RETRY_S * 2.0 ** min(self.tries, 16), _RETRY_S_MAX)
        self.tries += 1
        self.reason = reason


class KnownCorruption:
    """Corrupt entries that wait for a good copy, and log files with corrupt frames."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], CorruptEntry] = {}
        self.files: dict[int, str] = {}
        self.found = 0
        self.repaired = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def untried(self) -> int:
        """Number of entries whose repair has not been attempted."""
        return sum([not each.tries for each in self._entries.values()])

    def add(self, ledger_id: int, entry_id: int, generation: int) -> bool:
        """Record a corrupt entry. Returns whether it was unknown."""
        key = (ledger_id, entry_id)
        known = self._entries.get(key)
        if (known is not None and known.generation == generation) or len(self._entries) >= ENTRIES_MAX:
            return False
        self._entries[key] = CorruptEntry(ledger_id, entry_id, generation)
        self.found += 1
        return True

    def holds(self, generation: int) -> bool:
        """Whether an entry in log file ``generation`` waits for a good copy."""
        return any(each.generation == generation for each in self._entries.values())

    def generation_of(self, ledger_id: int, entry_id: int) -> int:
        """Log file of the entry's corrupt copy; 0 if none is known."""
        known = self._entries.get((ledger_id, entry_id))
        return 0 if known is None else known.generation

    def due(self, now: float) -> list[CorruptEntry]:
        return [each for each in self._entries.values() if each.due_s <= now]

    def retry_all(self) -> None:
        """Make every entry due now, at an operator's request."""
        for each in self._entries.values():
            each.tries, each.due_s = 0, 0.0

    def remove(self, entry: CorruptEntry) -> None:
        """Remove an entry that is repaired or no longer needed."""
        if self._entries.get((entry.ledger_id, entry.entry_id)) is entry:
            del self._entries[entry.ledger_id, entry.entry_id]

    def examples(self, count: int) -> Iterator[str]:
        """Descriptions of up to ``count`` entries."""
        for each in list(self._entries.values())[:count]:
            yield f"entry {each.entry_id} of ledger {each.ledger_id}: {each.reason or 'repair not attempted yet'}"
