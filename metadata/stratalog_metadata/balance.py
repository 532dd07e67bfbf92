"""Which partitions move to which broker although their owners live: pure.

In this order, and never more than asked for: everything that a leaving broker owns; what is not in its preferred rack
although a broker there could take it; and, while loads are too far apart, from the most loaded to the least loaded.

Always: a move that levels makes the two brokers' loads more alike by a margin, so a sequence of plans over the same loads ends.
Levelling begins at a wide spread and goes on to a narrow one, so that loads that waver about a limit move nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

SPREAD_BEGIN: Final = 0.5
"""Levelling begins when the most and the least loaded broker are further apart than so much of the mean load."""
SPREAD_END: Final = 0.2
SHARE_MAX: Final = 0.75
"""What moves is at most so much of the difference: otherwise it would only change places with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One partition. Loads are relative to each other: 1 is what the mean partition has."""

    owner: int
    load: float = 1.0
    rack: str = ""
    may_level: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One live broker."""

    rack: str = ""
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """``position`` is that of the partition in the sequence that was planned over."""

    position: int
    target: int


class Balance:
    """Loads of brokers while a plan is made."""

    def __init__(self, partitions: Sequence[Placed], brokers: Mapping[int, Place]) -> None:
        self._partitions = partitions
        self._brokers = brokers
        self._takers = sorted(broker_id for broker_id, place in brokers.items() if not place.is_leaving)
        self._owners = [partition.owner for partition in partitions]
        self._loads = dict.fromkeys(brokers, 0.0)
        for partition in partitions:
            if partition.owner in self._loads:
                self._loads[partition.owner] += partition.load
        self.moves: list[Move] = []

    def candidates(self, rack: str) -> list[int]:
        """Who may take a partition that prefers ``rack``: those there, or all if nobody is there."""
        return [broker_id for broker_id in self._takers if self._brokers[broker_id].rack == rack] if rack else []

    def empty_leaving(self, moves_max: int) -> None:
        leaving = (
            position
            for position, owner in enumerate(self._owners)
            if owner in self._brokers and self._brokers[owner].is_leaving
        )
        self._move_to_least_loaded(leaving, moves_max)

    def prefer_racks(self, moves_max: int) -> None:
        misplaced = (
            position
            for position, (partition, owner) in enumerate(zip(self._partitions, self._owners, strict=True))
            if partition.rack and owner in self._brokers and owner not in (self.candidates(partition.rack) or [owner])
        )
        self._move_to_least_loaded(misplaced, moves_max)

    def _move_to_least_loaded(self, positions: Iterable[int], moves_max: int) -> None:
        if not self._takers:
            return
        for position in positions:
            if len(self.moves) >= moves_max:
                return
            candidates = self.candidates(self._partitions[position].rack) or self._takers
            self._move(position, min(candidates, key=lambda broker_id: (self._loads[broker_id], broker_id)))

    def level(self, moves_max: int, *, is_levelling: bool) -> None:
        """``is_levelling``: it had begun already, so it goes on until the spread is narrow."""
        if not self._takers:
            return
        loads = [self._loads[broker_id] for broker_id in self._takers]
        mean = sum(loads) / len(loads)
        if max(loads) - min(loads) <= (SPREAD_END if is_levelling else SPREAD_BEGIN) * mean:
            return
        while len(self.moves) < moves_max and self._level_once(SPREAD_END * mean):
            pass

    def _level_once(self, gap_min: float) -> bool:
        by_load = sorted(self._takers, key=lambda broker_id: (self._loads[broker_id], broker_id))
        pairs = sorted(
            ((self._loads[target] - self._loads[source], source, target) for source, target in product(by_load, by_load))
        )
        for negative_gap, source, target in pairs:
            if -negative_gap <= gap_min:
                return False
            position = self._best(source, target, -negative_gap)
            if position is not None:
                self._move(position, target)
                return True
        return False

    def _best(self, source: int, target: int, gap: float) -> int | None:
        """The partition whose move makes the two most alike."""
        found = [
            (abs(partition.load - gap / 2), position)
            for position, (partition, owner) in enumerate(zip(self._partitions, self._owners, strict=True))
            if owner == source
            and partition.may_level
            and 0 < partition.load <= SHARE_MAX * gap
            and target in (self.candidates(partition.rack) or [target])
        ]
        return min(found)[1] if found else None

    def _move(self, position: int, target: int) -> None:
        load, owner = self._partitions[position].load, self._owners[position]
        self._loads[owner] -= load
        self._loads[target] += load
        self._owners[position] = target
        self.moves.append(Move(position, target))


def plan_moves(
    partitions: Sequence[Placed],
    brokers: Mapping[int, Place],
    *,
    leaving_max: int,
    others_max: int = 0,
    is_levelling: bool = False,
) -> list[Move]:
    """At most ``leaving_max`` moves away from leaving brokers, or else ``others_max`` for racks and loads.

    Partitions whose owner is not in ``brokers`` are somebody else's concern.
    """
    balance = Balance(partitions, brokers)
    balance.empty_leaving(leaving_max)
    if not balance.moves:
        balance.prefer_racks(others_max)
        balance.level(others_max, is_levelling=is_levelling)
    return balance.moves
