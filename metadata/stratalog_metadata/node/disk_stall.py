"""Notices that this node's disk completes nothing while a quorum of the others has stored more. Pure.

A disk that hangs reports no error, and heartbeats do not need it: without this, a leader would lead on and apply nothing, and
watchers would follow a node whose state no longer changes. While too few of the other disks work as well, nothing is committed
beyond this node's log, and another leader would not help: that is no stall.
"""

from __future__ import annotations

from typing import Final

TIMEOUTS: Final = 10
"""Election timeouts without progress after which the disk counts as stalled. A sync that takes a few seconds is no reason."""


class DiskStall:
    """Times are monotonic seconds. Call ``observe`` at each turn, at least with each heartbeat."""

    def __init__(self, election_timeout_s: float, heartbeat_s: float, now: float) -> None:
        self._limit_s = TIMEOUTS * election_timeout_s
        self._step_s_max = 2 * heartbeat_s
        self._seen_at = now
        self._stable = -1
        self._stalled_s = 0.0

    @property
    def is_stalled(self) -> bool:
        return self._stalled_s >= self._limit_s

    def observe(self, commit: int, stable: int, now: float) -> None:
        """Record that the quorum has committed entries up to ``commit``, of which those up to ``stable`` are durable here.

        Long turns count as short ones: a stall of this process is not taken for one of the disk.
        """
        passed_s = min(now - self._seen_at, self._step_s_max)
        self._seen_at = now
        if commit <= stable or stable != self._stable:
            self._stable, self._stalled_s = stable, 0.0
        else:
            self._stalled_s += passed_s
