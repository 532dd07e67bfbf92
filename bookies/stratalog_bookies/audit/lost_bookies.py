"""Which bookies count as lost for good: without a session for longer than the delay, by our own monotonic clock. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from stratalog_metadata.records import Bookie


class LostBookies:
    """Remembers when each bookie was first seen without a session. A restart of the watcher only makes it wait anew."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._down_since: dict[str, float] = {}

    def observe(self, bookies: Iterable[Bookie], named: Iterable[str], now: float) -> None:
        """``named`` are bookies that ledgers name; one that is not even registered is down, too."""
        live = {each.bookie_id for each in bookies if each.session_id}
        down = {each.bookie_id for each in bookies if not each.session_id} | (set(named) - live)
        self._down_since = {name: self._down_since.get(name, now) for name in sorted(down)}

    def down(self) -> frozenset[str]:
        """All that are down, for however long."""
        return frozenset(self._down_since)

    def lost(self, now: float) -> frozenset[str]:
        return frozenset(name for name, since in self._down_since.items() if now - since >= self._delay_s)
