"""Session leases, judged by the leader from renewals on its monotonic clock. No I/O.

Always: a session expires no earlier than its lease plus a margin after its last renewal arrived, so later than its holder
assumes, who counts from when the renewal was sent. A new leader grants every session a full lease.

Sessions with a grace (``grace_s``) may end earlier: if the connection of the last renewal breaks, as it does at once when a
process is killed, the session is suspect and ends after its grace unless a renewal arrives over any connection. Its holder may
still run (docs/adr/0039-a-broken-connection-ends-a-session-early.md). If all sessions with a grace are suspect at once, none
ends early: the leader's own network has probably failed, and there would be no broker to take over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MARGIN_FRACTION: Final = 0.05
MARGIN_S_MIN: Final = 0.05
STALL_S_MAX: Final = 0.5
SHORT_STALL_S_MAX: Final = 0.2
"""Margin that is added to a grace: renewals may wait unread in a socket."""
NEVER: Final = float("inf")


@dataclass(slots=True)
class _Lease:
    lease_s: float
    grace_s: float
    deadline: float
    carrier: object = None
    """The connection of the last renewal."""
    suspect_until: float = NEVER

    @property
    def is_suspect(self) -> bool:
        return self.suspect_until != NEVER


class LeaseTable:
    """Leases of sessions. Times are the caller's monotonic seconds."""

    __slots__ = ("_expired", "_leases", "_ticked_at")

    def __init__(self, leases_s: Iterable[tuple[int, float, float]], now: float) -> None:
        self._leases: dict[int, _Lease] = {}
        self._expired: set[int] = set()
        self._ticked_at = now
        for session_id, lease_s, grace_s in leases_s:
            self.opened(session_id, lease_s, now, grace_s)

    def opened(self, session_id: int, lease_s: float, now: float, grace_s: float = 0.0) -> None:
        with_margin_s = lease_s + max(lease_s * MARGIN_FRACTION, MARGIN_S_MIN)
        self._leases[session_id] = _Lease(with_margin_s, grace_s, now + with_margin_s)

    def ended(self, session_id: int) -> None:
        self._leases.pop(session_id, None)
        self._expired.discard(session_id)

    def renew(self, session_id: int, now: float, carrier: object = None) -> bool:
        """Renew a session. Returns whether it is alive; a session that was declared expired stays expired."""
        lease = self._leases.get(session_id)
        if lease is None or session_id in self._expired:
            return False
        lease.deadline = now + lease.lease_s
        lease.carrier, lease.suspect_until = carrier, NEVER
        return True

    def carrier_lost(self, carrier: object, now: float) -> list[int]:
        """Record a lost connection. Returns the sessions with a grace whose last renewal came over it: they are suspect
        now.
        """
        suspects = [session_id for session_id, lease in self._leases.items() if lease.carrier is carrier and lease.grace_s]
        for session_id in suspects:
            lease = self._leases[session_id]
            lease.carrier, lease.suspect_until = None, now + lease.grace_s
        return suspects

    def tick(self, now: float) -> frozenset[int]:
        """Sessions that have expired and are not ended yet.

        If this process was suspended or starved, renewals may wait in its sockets: every lease is extended by the lost time.
        """
        stalled = now - self._ticked_at
        self._ticked_at = now
        if stalled > SHORT_STALL_S_MAX:
            self._extend(stalled)
        for session_id, lease in self._leases.items():
            if lease.deadline <= now or (lease.suspect_until <= now and self._somebody_stays()):
                self._expired.add(session_id)
        return frozenset(self._expired)

    def _extend(self, stalled: float) -> None:
        for lease in self._leases.values():
            lease.deadline += stalled if stalled > STALL_S_MAX else 0.0
            lease.suspect_until += stalled

    def _somebody_stays(self) -> bool:
        return any(lease.grace_s and not lease.is_suspect for lease in self._leases.values())

    def next_deadline(self) -> float:
        """Time of the next possible expiry; infinity if there is none."""
        waiting = (lease for session_id, lease in self._leases.items() if session_id not in self._expired)
        return min((min(lease.deadline, lease.suspect_until) for lease in waiting), default=NEVER)
