"""Which bookies hold which entries, according to a ledger's record.

The fragments of a ledger rise strictly in ``first_entry``; the first begins at 0. Every entry before the last fragment was
confirmed when that fragment was committed, so recovery never reads further back. No I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import msgspec

from stratalog_core import quorum
from stratalog_metadata.records import Fragment, Ledger


def fragment_of(ledger: Ledger, entry_id: int) -> Fragment:
    """The fragment of ``entry_id``."""
    position = bisect_right(ledger.fragments, entry_id, key=lambda fragment: fragment.first_entry)
    return ledger.fragments[max(position - 1, 0)]


def write_bookies(ledger: Ledger, entry_id: int) -> tuple[str, ...]:
    """Bookies that store ``entry_id``, in the order of its write set."""
    bookies = fragment_of(ledger, entry_id).bookies
    return tuple(bookies[position] for position in quorum.write_set(entry_id, len(bookies), ledger.write_quorum))


def write_masks(ensemble_size: int, write_quorum: int) -> list[int]:
    """Ensemble positions of each write set as bits, by entry id modulo the ensemble size."""
    sets = [quorum.write_set(first, ensemble_size, write_quorum) for first in range(ensemble_size)]
    return [sum(1 << position for position in positions) for positions in sets]


def is_striped(ledger: Ledger) -> bool:
    """Whether each bookie of a fragment holds only part of its entries."""
    return ledger.write_quorum < ledger.ensemble_size


def fragment_end(ledger: Ledger, index: int) -> int:
    """Last entry of a closed ledger's fragment; below its first entry if it is empty."""
    following = index + 1
    return ledger.fragments[following].first_entry - 1 if following < len(ledger.fragments) else ledger.last_entry


def with_moved(ledger: Ledger, index: int, position: int, bookie: str) -> Ledger:
    """The record of a closed ledger after ``bookie`` has received everything that ``position`` of fragment ``index`` holds."""
    fragment = ledger.fragments[index]
    assert bookie not in fragment.bookies, "an ensemble names each bookie once"
    bookies = (*fragment.bookies[:position], bookie, *fragment.bookies[position + 1 :])
    moved = Fragment(first_entry=fragment.first_entry, bookies=bookies)
    fragments = (*ledger.fragments[:index], moved, *ledger.fragments[index + 1 :])
    return msgspec.structs.replace(ledger, fragments=fragments)


def with_replacements(ledger: Ledger, first_entry: int, replacements: Mapping[int, str]) -> Ledger:
    """The record after an ensemble change: ``replacements`` (position → bookie) take over from ``first_entry`` on.

    If the last fragment begins at ``first_entry`` it is replaced, otherwise one is added. Everything before ``first_entry``
    must be confirmed, and confirmed entries from there on must be so by bookies that stay.
    """
    last = ledger.fragments[-1]
    assert last.first_entry <= first_entry, "an ensemble change never begins before the last fragment"
    bookies = tuple(replacements.get(position, bookie) for position, bookie in enumerate(last.bookies))
    assert len(set(bookies)) == len(bookies), "an ensemble names each bookie once"
    kept = ledger.fragments[:-1] if last.first_entry == first_entry else ledger.fragments
    changed = Fragment(first_entry=first_entry, bookies=bookies)
    return msgspec.structs.replace(ledger, fragments=(*kept, changed))
