"""When a partition's maintenance is due.

Retention and merging are due when something that they depend on has changed, and when the first segment or removed object
expires: at most once per interval, and otherwise never, so an unchanged partition costs no request. Orphans are swept at an
interval. The first run of each task in a session is spread over the interval.

A failed task is retried soon and does not delay the other one. The partition's reported error stays until every failed task
has succeeded. No I/O; times are passed in.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Final

from stratalog_tiering.config import TieringSettings

RETRY_S: Final = 60.0
"""Pause before a failed task is retried, or its interval if that is shorter."""


class MaintenanceTask(Enum):
    RETENTION = "retention"
    """Retention, deletion of objects that were removed a grace period ago, merging."""
    SWEEP = "sweep"
    """Deletion of orphaned objects."""


class MaintenanceTimes:
    """Due times of one partition. ``now`` is monotonic, in seconds; expiry times are wall time, in ms.

    ``depends_on`` is everything that retention depends on, None while the partition has nothing that retention could remove.
    """

    def __init__(self, settings: TieringSettings, now: float, *, spread: float, spread_s: float, recheck: bool) -> None:
        """The first runs are at the fraction ``spread`` of the intervals, or of ``spread_s`` if that is longer.

        With ``recheck`` every task is due at once and counts as failed, because an earlier session has reported an error
        without naming its task.
        """
        self._intervals_s = {
            MaintenanceTask.RETENTION: settings.retention_interval_ms / 1000,
            MaintenanceTask.SWEEP: settings.sweep_interval_ms / 1000,
        }
        first_s = {task: 0.0 if recheck else spread * max(each, spread_s) for task, each in self._intervals_s.items()}
        self._at = {task: now + wait_s for task, wait_s in first_s.items()}
        self._failed = set(MaintenanceTask) if recheck else set[MaintenanceTask]()
        self._seen: Hashable = None
        self._expires_at_ms: int | None = None

    def due(self, depends_on: Hashable, now: float, wall_ms: int) -> MaintenanceTask | None:
        """The task to run now, the one that has been due longest; None if there is none."""
        times = {task: self._due_s(task, depends_on, now, wall_ms) for task in MaintenanceTask}
        due = [task for task in MaintenanceTask if times[task] <= 0]
        return min(due, key=lambda task: self._at[task], default=None)

    def next_s(self, depends_on: Hashable, now: float, wall_ms: int) -> float:
        """Seconds until a task is due, if nothing changes."""
        return max(0.0, min(self._due_s(task, depends_on, now, wall_ms) for task in MaintenanceTask))

    def _due_s(self, task: MaintenanceTask, depends_on: Hashable, now: float, wall_ms: int) -> float:
        wait_s = self._at[task] - now
        if task is MaintenanceTask.SWEEP:
            return wait_s
        if depends_on is None:
            return float("inf")
        if depends_on != self._seen or task in self._failed:
            return wait_s
        return float("inf") if self._expires_at_ms is None else max(wait_s, (self._expires_at_ms - wall_ms) / 1000)

    def swept(self, now: float) -> None:
        self._done(MaintenanceTask.SWEEP, now + self._intervals_s[MaintenanceTask.SWEEP])

    def sweep_at_once(self, now: float) -> None:
        """Make a sweep due, because the partition's objects are not as expected: a sweep reports why, until it is resolved."""
        self._at[MaintenanceTask.SWEEP] = now

    def changed(self, now: float) -> None:
        """Retention committed a change: it is due again at once, because there may be more."""
        self._seen = None
        self._done(MaintenanceTask.RETENTION, now)

    def nothing_due_before(self, depends_on: Hashable, expires_at_ms: int | None, now: float) -> None:
        """Retention found nothing to do before ``expires_at_ms`` (wall time), or before something changes (None)."""
        self._seen, self._expires_at_ms = depends_on, expires_at_ms
        self._done(MaintenanceTask.RETENTION, now + self._intervals_s[MaintenanceTask.RETENTION])

    def failed(self, task: MaintenanceTask, now: float) -> None:
        self._failed.add(task)
        self._at[task] = now + min(RETRY_S, self._intervals_s[task])

    def _done(self, task: MaintenanceTask, again_at: float) -> None:
        self._failed.discard(task)
        self._at[task] = again_at

    def has_failed(self, depends_on: Hashable) -> bool:
        """Whether a task has failed and not succeeded since."""
        return bool(self._failed if depends_on is not None else self._failed - {MaintenanceTask.RETENTION})
