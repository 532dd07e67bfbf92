"""Linearizable reads without log entries: the current commit index, once a quorum has confirmed the leader.

A read waits for a round of heartbeats that began after the read arrived (Ongaro's dissertation, section 6.4). Reads of one
turn share a round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from stratalog_metadata.raft.membership import Membership
from stratalog_metadata.raft.ready import ReadReady


class ReadQueue:
    """Reads in ``waiting`` have no round yet; those in ``confirming`` know their round and index."""

    __slots__ = ("confirming", "round", "waiting")

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.confirming: deque[tuple[int, ReadReady]] = deque()
        self.round = 0

    def begin_round(self, commit: int, *, may_read: bool) -> int:
        """Begin a round of heartbeats and return its number. All waiting reads join it if ``commit`` may be read."""
        self.round += 1
        if may_read:
            self.confirming.extend((self.round, ReadReady(context=context, index=commit)) for context in self.waiting)
            self.waiting.clear()
        return self.round

    def confirmed(self, membership: Membership, rounds: Mapping[int, int]) -> list[ReadReady]:
        """Remove and return the reads whose round a quorum has answered."""
        agreed = membership.agreed(rounds)
        done = []
        while self.confirming and self.confirming[0][0] <= agreed:
            done.append(self.confirming.popleft()[1])
        return done

    def lose_all(self) -> list[int]:
        """Remove all reads and return their contexts."""
        lost = self.waiting + [read.context for _, read in self.confirming]
        self.waiting.clear()
        self.confirming.clear()
        return lost
