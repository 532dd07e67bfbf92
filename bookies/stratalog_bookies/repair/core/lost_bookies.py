"""Which bookies and disks count as lost for good: gone for longer than the delay, by our own monotonic clock. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from stratalog_metadata.records import Bookie


@dataclass(frozen=True, slots=True)
class Gone:
    """Whole bookies, and bookies with a disk that is gone: ``(name, disk, disks)``."""

    bookies: frozenset[str]
    disks: frozenset[tuple[str, int, int]] = frozenset()

    def of(self, ledger_id: int) -> AbstractSet[str]:
        """Bookies that have lost what they held of a ledger."""
        if not self.disks:
            return self.bookies
        return self.bookies | {name for name, disk, disks in self.disks if ledger_id % disks == disk}


class LostBookies:
    """Remembers when each bookie was first seen without a session, and each disk as failed.

    A restart of the watcher only makes it wait anew.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._down_since: dict[str, float] = {}
        self._disk_down_since: dict[tuple[str, int, int], float] = {}

    def observe(self, bookies: Iterable[Bookie], named: Iterable[str], now: float) -> None:
        """``named`` are bookies that ledgers name; one that is not even registered is down, too."""
        known = list(bookies)
        live = {each.bookie_id for each in known if each.session_id}
        down = {each.bookie_id for each in known if not each.session_id} | (set(named) - live)
        failed = [(each.bookie_id, disk, each.disks) for each in known for disk in each.failed_disks if each.session_id]
        self._down_since = {name: self._down_since.get(name, now) for name in sorted(down)}
        self._disk_down_since = {key: self._disk_down_since.get(key, now) for key in failed}

    def down(self) -> Gone:
        """All that are down, for however long."""
        return Gone(frozenset(self._down_since), frozenset(self._disk_down_since))

    def lost(self, now: float) -> Gone:
        """Those that have been down for the delay."""
        return Gone(
            frozenset(name for name, since in self._down_since.items() if now - since >= self._delay_s),
            frozenset(key for key, since in self._disk_down_since.items() if now - since >= self._delay_s),
        )
