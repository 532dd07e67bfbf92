"""Which bookies and disks count as lost: down for longer than the delay by the local monotonic clock. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from stratalog_metadata.records import Bookie


@dataclass(frozen=True, slots=True)
class FailedStorage:
    """Bookies that are down, and bookies with a failed disk: ``(name, disk, disks)``."""

    bookies: frozenset[str]
    disks: frozenset[tuple[str, int, int]] = frozenset()

    def of(self, ledger_id: int) -> AbstractSet[str]:
        """Bookies that have lost what they held of a ledger."""
        if not self.disks:
            return self.bookies
        return self.bookies | {name for name, disk, disks in self.disks if ledger_id % disks == disk}


class LostBookies:
    """Remembers since when each bookie has no session and each disk has failed. After a restart the delays begin again."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._down_since: dict[str, float] = {}
        self._disk_down_since: dict[tuple[str, int, int], float] = {}

    def observe(self, bookies: Iterable[Bookie], named: Iterable[str], now: float) -> None:
        """Update from the registry. ``named`` are the bookies that ledgers name; one that is not registered is down."""
        known = list(bookies)
        live = {each.bookie_id for each in known if each.session_id}
        down = {each.bookie_id for each in known if not each.session_id} | (set(named) - live)
        failed = [(each.bookie_id, disk, each.disks) for each in known for disk in each.failed_disks if each.session_id]
        self._down_since = {name: self._down_since.get(name, now) for name in sorted(down)}
        self._disk_down_since = {key: self._disk_down_since.get(key, now) for key in failed}

    def down(self) -> FailedStorage:
        """All bookies and disks that are down, for however long."""
        return FailedStorage(frozenset(self._down_since), frozenset(self._disk_down_since))

    def lost(self, now: float) -> FailedStorage:
        """Those that have been down for the whole delay."""
        return FailedStorage(
            frozenset(name for name, since in self._down_since.items() if now - since >= self._delay_s),
            frozenset(key for key, since in self._disk_down_since.items() if now - since >= self._delay_s),
        )
