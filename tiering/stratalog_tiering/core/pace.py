"""When to begin with each of many that come at once. Pure; time is passed in."""

from __future__ import annotations


class Pace:
    """The first ``burst`` are begun with at once, those beyond it at ``per_s`` a second, and none later than ``longest_s``.

    After a broker's death thousands of ledgers are sealed within seconds. Offloading them can wait; the brokers that take
    over, the metadata quorum and the bookies cannot, and often run on the same cores. Where so many come all the time, they are
    late by ``longest_s`` and no more.
    """

    def __init__(self, burst: int, per_s: float, longest_s: float) -> None:
        self._interval_s = 1 / per_s
        self._ahead_s = burst / per_s
        self._longest_s = longest_s
        self._last = float("-inf")

    def next_at(self, now: float) -> float:
        """When to begin with the next: from ``now`` to ``now + longest_s``."""
        self._last = min(max(self._last, now - self._ahead_s) + self._interval_s, now + self._longest_s)
        return max(self._last, now)
