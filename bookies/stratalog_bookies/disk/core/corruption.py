"""What is known to be damaged on one disk and not mended yet. Pure and bounded.

Damage is reported from here (INFO, SCRUB, ``stratalog doctor``) until it is gone, and is never taken for absence. What does not
fit the bound is forgotten: the next read or scrub finds it again.
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
    """An entry whose copy in log file ``generation`` cannot be read. ``reason`` is why it could not be mended."""

    ledger_id: int
    entry_id: int
    generation: int
    tries: int = 0
    due_s: float = 0.0
    reason: str = ""

    def put_off(self, now: float, reason: str) -> None:
        """Try again later: the replica that has it may be away."""
        self.due_s = now + min(_FIRST_RETRY_S * 2.0 ** min(self.tries, 16), _RETRY_S_MAX)
        self.tries += 1
        self.reason = reason


class KnownCorruption:
    """Entries that wait for a good copy, and log files whose frames are broken."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], CorruptEntry] = {}
        self.files: dict[int, str] = {}
        self.found = 0
        self.repaired = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def untried(self) -> int:
        """Entries that nobody has tried to mend yet."""
        return sum([not each.tries for each in self._entries.values()])

    def add(self, ledger_id: int, entry_id: int, generation: int) -> bool:
        """Whether this is news."""
        key = (ledger_id, entry_id)
        known = self._entries.get(key)
        if (known is not None and known.generation == generation) or len(self._entries) >= ENTRIES_MAX:
            return False
        self._entries[key] = CorruptEntry(ledger_id, entry_id, generation)
        self.found += 1
        return True

    def due(self, now: float) -> list[CorruptEntry]:
        return [each for each in self._entries.values() if each.due_s <= now]

    def retry_all(self) -> None:
        """An operator asks: do not wait for the next time."""
        for each in self._entries.values():
            each.tries, each.due_s = 0, 0.0

    def remove(self, entry: CorruptEntry) -> None:
        """Mended, or not needed any more."""
        if self._entries.get((entry.ledger_id, entry.entry_id)) is entry:
            del self._entries[entry.ledger_id, entry.entry_id]

    def examples(self, count: int) -> Iterator[str]:
        """A few of the entries, for people."""
        for each in list(self._entries.values())[:count]:
            yield f"entry {each.entry_id} of ledger {each.ledger_id}: {each.reason or 'not tried yet'}"
