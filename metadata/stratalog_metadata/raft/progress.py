"""A follower's replication progress as its leader knows it, and how much may be in flight to it.

PROBE: the end of its log is unknown; one append at a time. REPLICATE: appends are pipelined up to a bound. SNAPSHOT: it needs
entries that were compacted away; one chunk at a time.
"""

from __future__ import annotations

from collections import deque
from enum import Enum


class Flow(Enum):
    PROBE = "probe"
    REPLICATE = "replicate"
    SNAPSHOT = "snapshot"


class Progress:
    """``match``: last index known to be durable there. ``next``: first index to send. ``active``: it answered within the
    last election timeout. ``heard_at``: monotonic time of its last answer in seconds; None if it never answered.
    """

    __slots__ = (
        "active",
        "commit_sent",
        "flow",
        "heard_at",
        "in_flight",
        "in_flight_max",
        "match",
        "next",
        "paused",
        "snapshot_index",
        "snapshot_position",
    )

    def __init__(self, next_index: int, in_flight_max: int) -> None:
        self.match = 0
        self.next = next_index
        self.flow = Flow.PROBE
        self.paused = False
        self.active = False
        self.heard_at: float | None = None
        self.in_flight: deque[int] = deque()
        self.in_flight_max = in_flight_max
        self.snapshot_index = 0
        self.snapshot_position = -1
        self.commit_sent = 0

    def heard(self, now: float) -> None:
        """Record an answer."""
        self.active = True
        self.heard_at = now

    def may_send(self) -> bool:
        if self.flow is Flow.REPLICATE:
            return len(self.in_flight) < self.in_flight_max
        return not self.paused

    def sent(self, last_index: int) -> None:
        """Record that an append with entries up to ``last_index`` was sent."""
        if self.flow is Flow.REPLICATE:
            self.next = last_index + 1
            self.in_flight.append(last_index)
        else:
            self.paused = True

    def acknowledged(self, index: int) -> bool:
        """Record that entries up to ``index`` are durable there. Returns whether that is new."""
        news = index > self.match
        self.match = max(self.match, index)
        self.next = max(self.next, self.match + 1)
        while self.in_flight and self.in_flight[0] <= index:
            self.in_flight.popleft()
        if self.flow is Flow.PROBE or (self.flow is Flow.SNAPSHOT and self.match >= self.snapshot_index):
            self._enter(Flow.REPLICATE)
        return news

    def rejected(self, index: int, next_try: int) -> bool:
        """Record a rejection at ``index``. Returns whether it is new and not an old answer."""
        if self.flow is Flow.REPLICATE:
            if index <= self.match:
                return False
            self.probe()
            return True
        if self.flow is Flow.SNAPSHOT or self.next - 1 != index:
            return False
        self.next = max(min(index, next_try), self.match + 1)
        self.paused = False
        return True

    def probe(self) -> None:
        """Go back to PROBE after ``match``."""
        self._enter(Flow.PROBE)
        self.next = self.match + 1

    def await_snapshot(self, index: int) -> None:
        self._enter(Flow.SNAPSHOT)
        self.snapshot_index = index
        self.snapshot_position = -1

    def chunk_wanted(self, index: int, position: int) -> bool:
        """Record the position that the follower asks for. Returns whether it is new: an old answer must not send a chunk
        twice.
        """
        if self.flow is not Flow.SNAPSHOT or index != self.snapshot_index or position == self.snapshot_position:
            return False
        self.snapshot_position = position
        self.paused = True
        return True

    def heard_heartbeat(self) -> None:
        """Record a heartbeat reply: what was held back or lost may be sent again."""
        self.paused = False
        if self.flow is Flow.REPLICATE and len(self.in_flight) >= self.in_flight_max:
            self.in_flight.popleft()

    def _enter(self, flow: Flow) -> None:
        self.flow = flow
        self.paused = False
        self.in_flight.clear()
