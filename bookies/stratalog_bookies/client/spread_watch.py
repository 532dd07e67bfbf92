"""Reports when new ensembles stop spanning hosts and racks, and when they do again. Pure but for the log.

A cluster on one host and in one rack has nothing to span, and nothing is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from stratalog_bookies.client.core.placement import Candidate, Spread, spread_of

_log = logging.getLogger(__name__)


class SpreadWatch:
    """Remembers the last report for each ensemble size."""

    def __init__(self) -> None:
        self._short: dict[int, Spread] = {}

    def chosen(self, ensemble: Sequence[str], candidates: Iterable[Candidate]) -> None:
        """A ledger was placed on ``ensemble``."""
        known = list(candidates)
        size, spread = len(ensemble), spread_of(each for each in known if each.bookie_id in ensemble)
        there = spread_of(known)
        is_short = (there.hosts > 1 and spread.hosts < size) or (there.racks > 1 and spread.racks < size)
        before = self._short.get(size)
        if is_short and spread != before:
            self._short[size] = spread
            _log.warning(
                "new ensembles of %d bookies share failure domains (hosts: %d, racks: %d) until there are bookies on more hosts"
                " and racks; the auditor then moves copies apart", size, spread.hosts, spread.racks,
            )  # fmt: skip
        elif before is not None and not is_short:
            del self._short[size]
            _log.info("new ensembles of %d bookies no longer share failure domains", size)
