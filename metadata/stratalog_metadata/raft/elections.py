"""The votes of one campaign."""

from __future__ import annotations

from stratalog_metadata.raft.membership import Membership


class Election:
    __slots__ = ("_granted", "_refused")

    def __init__(self) -> None:
        self._granted: set[int] = set()
        self._refused: set[int] = set()

    def count(self, voter: int, granted: bool) -> None:
        """A voter's first answer counts."""
        if voter not in self._granted | self._refused:
            (self._granted if granted else self._refused).add(voter)

    def is_won(self, membership: Membership) -> bool:
        return membership.is_quorum(self._granted)

    def is_lost(self, membership: Membership) -> bool:
        return membership.is_lost(self._refused)
