"""When each member of a consumer group must be heard or must have done what it was asked for. Does no I/O."""

from __future__ import annotations

from collections.abc import Container

from stratalog_broker.coordination.wake_times import NEVER_MS, Instant


class MemberDeadlines:
    """Monotonic times in milliseconds. ``wake_at_ms`` is never later than the next deadline."""

    def __init__(self) -> None:
        self.sessions: dict[str, int] = {}
        """When each member's session ends."""
        self.tasks: dict[str, int] = {}
        """When each member must have done its task: to revoke partitions, to join again, or to ask for its assignment."""
        self.wake_at_ms = NEVER_MS
        self._wake_is_due = False

    def extend_session(self, member_id: str, at_ms: int) -> None:
        self.sessions[member_id] = at_ms
        self.wake_by(at_ms)

    def expect(self, member_id: str, at_ms: int) -> None:
        """Give a member a task; the deadline of one that it has already stays."""
        if member_id not in self.tasks:
            self.tasks[member_id] = at_ms
            self.wake_by(at_ms)

    def done(self, member_id: str) -> None:
        """Record that a member has done its task."""
        self.tasks.pop(member_id, None)

    def forget(self, member_id: str) -> None:
        self.sessions.pop(member_id, None)
        self.tasks.pop(member_id, None)

    def wake_by(self, at_ms: int) -> None:
        self.wake_at_ms = min(self.wake_at_ms, at_ms)

    def overdue(self, now: Instant, heard: Container[str]) -> list[str]:
        """Return the members that missed a deadline, except those that are ``heard``."""
        if self.wake_at_ms > now.monotonic_ms:
            return []
        self._wake_is_due = True
        found = {
            member_id: None
            for deadlines in (self.sessions, self.tasks)
            for member_id, at_ms in deadlines.items()
            if at_ms <= now.monotonic_ms and member_id not in heard
        }
        return list(found)

    def plan_wake(self, at_ms: int) -> None:
        """Set ``wake_at_ms``, not later than ``at_ms``."""
        if self._wake_is_due:  # O(members), seldom: sessions end much later than their members' next heartbeats
            self._wake_is_due = False
            self.wake_at_ms = min([NEVER_MS, *self.sessions.values(), *self.tasks.values()])
        self.wake_by(at_ms)
