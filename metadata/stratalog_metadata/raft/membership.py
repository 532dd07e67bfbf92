"""Who votes. The only place that knows what a quorum is, so that changing the members will change nothing else.

Voters are fixed by configuration for now.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from stratalog_core.quorum import majority


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The voters' node ids, all positive."""

    voters: frozenset[int]

    def __post_init__(self) -> None:
        assert self.voters, "a quorum has members"
        assert min(self.voters) > 0, "node ids are positive"

    def others(self, node_id: int) -> list[int]:
        return sorted(self.voters - {node_id})

    def is_quorum(self, nodes: Set[int]) -> bool:
        return len(self.voters & nodes) >= majority(len(self.voters))

    def is_lost(self, refusals: Set[int]) -> bool:
        """Whether so many refusals leave no quorum."""
        return not self.is_quorum(self.voters - refusals)

    def agreed(self, values: Mapping[int, int]) -> int:
        """Largest value that a quorum has reached (a log index, or a round); who is not named has 0."""
        reached = sorted((values.get(voter, 0) for voter in self.voters), reverse=True)
        return reached[majority(len(self.voters)) - 1]
