"""Which entries of a closed ledger one position of a fragment holds.

Entry *i* of a fragment with E bookies is on the Qw positions from *i* mod E on, so position *p* holds it if (*p* - *i*) mod E <
Qw: all entries if Qw = E, else stripes. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stratalog_bookies.client.core.fragments import fragment_end
from stratalog_metadata.records import Ledger

WINDOW_ENTRIES = 4096
"""Entry ids checked at a time: bounds memory and the size of one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The entries from ``first`` to ``last`` that ``position`` of the ensemble holds; none if ``last`` is below ``first``."""

    first: int
    last: int
    position: int
    ensemble_size: int
    write_quorum: int

    def holds(self, entry_id: int) -> bool:
        return (self.position - entry_id) % self.ensemble_size < self.write_quorum

    def windows(self) -> Iterator[tuple[int, int]]:
        """The range in windows: first and last entry of each."""
        for first in range(self.first, self.last + 1, WINDOW_ENTRIES):
            yield first, min(first + WINDOW_ENTRIES - 1, self.last)

    def within(self, first: int, last: int) -> list[int]:
        """Entry ids of the share from ``first`` to ``last``."""
        return [entry_id for entry_id in range(max(first, self.first), min(last, self.last) + 1) if self.holds(entry_id)]


def share_of(ledger: Ledger, fragment: int, position: int) -> Share:
    """The share of ``position`` of fragment number ``fragment`` of a closed ledger."""
    return Share(
        first=ledger.fragments[fragment].first_entry, last=fragment_end(ledger, fragment), position=position,
        ensemble_size=len(ledger.fragments[fragment].bookies), write_quorum=ledger.write_quorum,
    )  # fmt: skip


def runs(entry_ids: Sequence[int], gap: int) -> list[list[int]]:
    """Split ascending ids where the next is more than ``gap`` higher: runs worth reading in one request."""
    found: list[list[int]] = []
    for entry_id in entry_ids:
        if found and entry_id - found[-1][-1] <= gap:
            found[-1].append(entry_id)
        else:
            found.append([entry_id])
    return found
