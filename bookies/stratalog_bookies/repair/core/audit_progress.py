"""The copies that the auditor has verified and need not check again. Bounded by the number of closed ledgers.

A complete copy stays complete: a bookie loses entries only together with a disk, and then all of them. Placements are checked
again when a bookie arrives, leaves or changes, and after a move. It does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from stratalog_bookies.client.core.placement import Candidate
from stratalog_metadata.records import Ledger, LedgerState

_Copy = tuple[int, int, str]
"""First entry of the fragment, position, bookie."""
_Places = tuple[tuple[str, str, str, bool], ...]
"""Bookie, host, rack, and whether it takes copies now."""


class Progress:
    """The progress of one auditor. Not persistent: a new auditor checks everything once."""

    def __init__(self) -> None:
        self._complete: dict[int, set[_Copy]] = {}
        self._placed: set[int] = set()
        self._places: _Places = ()

    def begin(self, ledgers: Iterable[Ledger], candidates: Sequence[Candidate]) -> None:
        """Start an audit: drop ledgers that no longer exist, and all placements if the candidate bookies changed."""
        known = {ledger.ledger_id for ledger in ledgers if ledger.state is LedgerState.CLOSED}
        self._complete = {ledger_id: copies for ledger_id, copies in self._complete.items() if ledger_id in known}
        places = _places(candidates)
        self._placed = self._placed & known if places == self._places else set()
        self._places = places

    def unsettled(self, ledgers: Iterable[Ledger]) -> list[Ledger]:
        """Closed ledgers whose placement or completeness must be checked."""
        return [ledger for ledger in ledgers if ledger.state is LedgerState.CLOSED and not self._is_settled(ledger)]

    def _is_settled(self, ledger: Ledger) -> bool:
        complete = self._complete.get(ledger.ledger_id, set())
        return ledger.ledger_id in self._placed and all(copy in complete for _, _, copy in _copies(ledger))

    def placed(self, ledger: Ledger, candidates: Sequence[Candidate]) -> None:
        """Record that the ledger's copies are placed as well as these bookies allow.

        If they are not those with which the audit began, because one failed for a moment, the next audit checks again.
        """
        if _places(candidates) == self._places:
            self._placed.add(ledger.ledger_id)

    def completed(self, ledger: Ledger, fragment: int, position: int) -> None:
        """Record that a copy is complete."""
        found = ledger.fragments[fragment]
        copy = (found.first_entry, position, found.bookies[position])
        self._complete.setdefault(ledger.ledger_id, set()).add(copy)

    def moved(self, ledger: Ledger, fragment: int, position: int) -> None:
        """Record that a complete copy has a new bookie: the fragment's placement must be checked again."""
        self._placed.discard(ledger.ledger_id)
        self.completed(ledger, fragment, position)

    def unchecked(self, ledger: Ledger, down: AbstractSet[str]) -> list[tuple[int, int]]:
        """Fragment and position of each copy that is not verified and whose bookie is up."""
        complete = self._complete.get(ledger.ledger_id, set())
        return [
            (fragment, position) for fragment, position, copy in _copies(ledger) if copy not in complete and copy[2] not in down
        ]


def _places(candidates: Sequence[Candidate]) -> _Places:
    return tuple((each.bookie_id, each.host, each.rack, each.live and each.takes_ledgers) for each in candidates)


def _copies(ledger: Ledger) -> list[tuple[int, int, _Copy]]:
    return [
        (number, position, (fragment.first_entry, position, name))
        for number, fragment in enumerate(ledger.fragments)
        for position, name in enumerate(fragment.bookies)
    ]
