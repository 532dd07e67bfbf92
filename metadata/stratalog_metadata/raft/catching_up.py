"""When a learner is close enough to vote.

Dissertation, 4.2.1: it is sent the log in rounds, each up to where the log ended when the round began. A round that took
no longer than an election timeout shows that, as a voter, it would hold nothing up for longer than an election does.
"""

from __future__ import annotations


class CatchUp:
    """One learner's rounds. ``done``: the last round was short enough. Times are the caller's monotonic seconds."""

    __slots__ = ("_begun_at", "_round_s_max", "_target", "done")

    def __init__(self, last_index: int, now: float, round_s_max: float) -> None:
        self.done = False
        self._target = last_index
        self._begun_at = now
        self._round_s_max = round_s_max

    def acknowledged(self, match: int, last_index: int, now: float) -> None:
        """The learner has everything up to ``match``; the log ends at ``last_index``."""
        if match < self._target:
            return
        self.done = now - self._begun_at <= self._round_s_max or match >= last_index
        self._target = last_index
        self._begun_at = now
