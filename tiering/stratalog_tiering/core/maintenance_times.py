"""When a partition's upkeep is due. Pure; times are passed in.

Retention and merging are looked at when something that they depend on has changed, and when the first segment or removed object
expires; not oftener than at an interval, and otherwise never, so an unchanged partition costs no request. Orphans are looked
for at an interval. The first looks of a session are spread over the intervals.

An upkeep that fails is tried again soon and does not keep the other one from its turn. Until it has succeeded its error stands,
whatever else goes well.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Final

from stratalog_tiering.config import TieringSettings

RETRY_S: Final = 60.0
"""A failed upkeep is tried again after this, or after its interval if that is shorter."""


class Upkeep(Enum):
    RETENTION = "retention"
    """Retention, deletion of what was removed a grace period ago, merging."""
    SWEEP = "sweep"


class UpkeepTimes:
    """``now`` is on the monotonic clock, in seconds; what expires does so in wall time.

    ``depends_on`` is what retention depends on, None while a partition has no cold history.
    """

    def __init__(self, settings: TieringSettings, now: float, *, spread: float, spread_s: float, recheck: bool) -> None:
        """The first looks are at the fraction ``spread`` of the intervals, or of ``spread_s`` if that is longer.

        With ``recheck`` everything is due at once and counts as failed: an earlier session has left an error, and nobody knows
        of which upkeep.
        """
        self._intervals_s = {
            Upkeep.RETENTION: settings.retention_interval_ms / 1000,
            Upkeep.SWEEP: settings.sweep_interval_ms / 1000,
        }
        first_s = {upkeep: 0.0 if recheck else spread * max(each, spread_s) for upkeep, each in self._intervals_s.items()}
        self._at = {upkeep: now + wait_s for upkeep, wait_s in first_s.items()}
        self._failed = set(Upkeep) if recheck else set[Upkeep]()
        self._seen: Hashable = None
        self._expires_at_ms: int | None = None

    def due(self, depends_on: Hashable, now: float, wall_ms: int) -> Upkeep | None:
        """What to do now; the longest due first."""
        times = {upkeep: self._due_s(upkeep, depends_on, now, wall_ms) for upkeep in Upkeep}
        due = [upkeep for upkeep in Upkeep if times[upkeep] <= 0]
        return min(due, key=lambda upkeep: self._at[upkeep], default=None)

    def next_s(self, depends_on: Hashable, now: float, wall_ms: int) -> float:
        """Seconds until something is due, if nothing changes."""
        return max(0.0, min(self._due_s(upkeep, depends_on, now, wall_ms) for upkeep in Upkeep))

    def _due_s(self, upkeep: Upkeep, depends_on: Hashable, now: float, wall_ms: int) -> float:
        wait_s = self._at[upkeep] - now
        if upkeep is Upkeep.SWEEP:
            return wait_s
        if depends_on is None:
            return float("inf")
        if depends_on != self._seen or upkeep in self._failed:
            return wait_s
        return float("inf") if self._expires_at_ms is None else max(wait_s, (self._expires_at_ms - wall_ms) / 1000)

    def swept(self, now: float) -> None:
        self._done(Upkeep.SWEEP, now + self._intervals_s[Upkeep.SWEEP])

    def changed(self, now: float) -> None:
        """Retention committed something: look again at once, there may be more."""
        self._seen = None
        self._done(Upkeep.RETENTION, now)

    def looked_at(self, depends_on: Hashable, expires_at_ms: int | None, now: float) -> None:
        """There is nothing for retention to do before ``expires_at_ms`` (wall time; None: before something changes)."""
        self._seen, self._expires_at_ms = depends_on, expires_at_ms
        self._done(Upkeep.RETENTION, now + self._intervals_s[Upkeep.RETENTION])

    def failed(self, upkeep: Upkeep, now: float) -> None:
        self._failed.add(upkeep)
        self._at[upkeep] = now + min(RETRY_S, self._intervals_s[upkeep])

    def _done(self, upkeep: Upkeep, again_at: float) -> None:
        self._failed.discard(upkeep)
        self._at[upkeep] = again_at

    def has_failed(self, depends_on: Hashable) -> bool:
        """Whether an upkeep has failed and not succeeded since."""
        return bool(self._failed if depends_on is not None else self._failed - {Upkeep.RETENTION})
