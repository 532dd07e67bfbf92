"""Which sessions are alive, as the leader judges by renewals on its monotonic clock. Sans-IO.

Always: a session is declared expired no earlier than its lease plus a margin after the last renewal came in, so later
than its holder, who counts from when the renewal was sent. A new leader begins with a full lease for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

MARGIN_FRACTION: Final = 0.05
MARGIN_S_MIN: Final = 0.05
STALL_S_MAX: Final = 0.5


class LeaseBoard:
    """Deadlines of sessions; seconds on the caller's monotonic clock."""

    __slots__ = ("_deadlines", "_expired", "_leases", "_ticked_at")

    def __init__(self, leases_s: Iterable[tuple[int, float]], now: float) -> None:
        self._leases: dict[int, float] = {}
        self._deadlines: dict[int, float] = {}
        self._expired: set[int] = set()
        self._ticked_at = now
        for session_id, lease_s in leases_s:
            self.opened(session_id, lease_s, now)

    def opened(self, session_id: int, lease_s: float, now: float) -> None:
        self._leases[session_id] = lease_s + max(lease_s * MARGIN_FRACTION, MARGIN_S_MIN)
        self._deadlines[session_id] = now + self._leases[session_id]

    def ended(self, session_id: int) -> None:
        self._leases.pop(session_id, None)
        self._deadlines.pop(session_id, None)
        self._expired.discard(session_id)

    def renew(self, session_id: int, now: float) -> bool:
        """Says whether the session is alive; one that was declared expired does not come back."""
        if session_id not in self._deadlines or session_id in self._expired:
            return False
        self._deadlines[session_id] = now + self._leases[session_id]
        return True

    def tick(self, now: float) -> frozenset[int]:
        """All sessions that have expired and are not ended yet.

        If this process was stopped for a while (suspended, starved), renewals may wait in its sockets: everybody gets the
        lost time.
        """
        stalled = now - self._ticked_at
        self._ticked_at = now
        if stalled > STALL_S_MAX:
            for session_id in self._deadlines:
                self._deadlines[session_id] += stalled
        self._expired.update(session_id for session_id, deadline in self._deadlines.items() if deadline <= now)
        return frozenset(self._expired)

    def next_deadline(self) -> float:
        """When ``tick`` may have news; infinity if never."""
        waiting = (deadline for session_id, deadline in self._deadlines.items() if session_id not in self._expired)
        return min(waiting, default=float("inf"))
