"""The deadlines of a group: the end of the rebalance phase, sessions, and pending members. Does no I/O.

``wake_at_ms`` is never later than the next deadline; it may be earlier, because moving a deadline back does not move it.
"""

from __future__ import annotations

from collections.abc import Iterable

from stratalog_broker.coordination.groups.core.membership import Member
from stratalog_broker.coordination.wake_times import NEVER_MS, Instant


class Deadlines:
    """Monotonic times in milliseconds; ``NEVER_MS`` means no deadline."""

    def __init__(self) -> None:
        self.wake_at_ms = NEVER_MS
        self.phase_at_ms = NEVER_MS

    def set_phase(self, at_ms: int) -> None:
        self.phase_at_ms = at_ms
        self.wake_by(at_ms)

    def clear_phase(self) -> None:
        self.phase_at_ms = NEVER_MS

    def expect_heartbeat(self, member: Member, now: Instant, within_ms: int | None = None) -> None:
        """Extend the member's session by ``within_ms``, by default by its session time-out."""
        member.session_deadline_ms = now.monotonic_ms + (member.session_timeout_ms if within_ms is None else within_ms)
        self.wake_by(member.session_deadline_ms)

    def wake_by(self, at_ms: int) -> None:
        self.wake_at_ms = min(self.wake_at_ms, at_ms)

    def plan_wake(self, deadlines_ms: Iterable[int]) -> None:
        """Set ``wake_at_ms`` to the earliest of the phase's deadline and the given ones."""
        self.wake_at_ms = min([self.phase_at_ms, *deadlines_ms])
