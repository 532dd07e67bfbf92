"""Plans moves of partitions between live brokers. Pure.

In this order, within the given bounds: everything that a leaving broker owns; partitions whose assignment or preferred rack
asks for another owner; then levelling of traffic, and levelling of partition counts, each from the most to the least loaded
broker.

Traffic and counts are levelled separately, over rates in several windows of time. For traffic, only partitions with traffic in
every window move, and only if the move levels the two brokers in every window. For counts, idle partitions move, or partitions
with traffic in every window whose move leaves the target with no more than the source had. So an idle partition never moves
for traffic, and a partition whose traffic has just started or ended does not move.

Always: a move for traffic lowers the sum of squares of brokers' loads in every window; a move for counts does not raise it,
and lowers the sum of squares of counts. So a sequence of plans over the same rates ends. Levelling starts at a wide spread and
continues to a narrow one, so that a load near the limit does not cause moves again and again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Final

SPREAD_BEGIN: Final = 0.5
"""Levelling starts when two brokers differ by more than this share of the mean broker's traffic or partition count."""
SPREAD_END: Final = 0.2
SHARE_MAX: Final = 0.75
"""Maximum share of the difference that one move may carry; a greater one would only swap the two brokers."""
SHARE_MIN: Final = 0.002
"""Minimum share: below it hundreds of moves would be needed."""
WINDOWS: Final = 3

Rates = tuple[float, ...]
IDLE: Final[Rates] = (0.0,) * WINDOWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One partition. ``rates``: bytes per second in each of ``WINDOWS`` windows of time; negligible rates are 0."""

    owner: int
    rates: Rates = IDLE
    rack: str = ""
    assigned: tuple[int, ...] = ()
    """Brokers in order of preference; they take precedence over the rack."""
    may_level: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One live broker."""

    rack: str = ""
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """``position`` is the partition's index in the planned sequence."""

    position: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The moves, and whether traffic or counts were levelled: then the next plan continues until the spread is narrow."""

    moves: Sequence[Move] = ()
    levels_traffic: bool = False
    levels_numbers: bool = False


NOTHING_MOVED: Final = Plan()


class Balance:
    """Partitions and traffic of each broker while a plan is made, and the moves that do not level."""

    def __init__(self, partitions: Sequence[Placed], brokers: Mapping[int, Place]) -> None:
        self.partitions = partitions
        self.owners = [partition.owner for partition in partitions]
        self.takers = sorted(broker_id for broker_id, place in brokers.items() if not place.is_leaving)
        self.counts = dict.fromkeys(brokers, 0)
        self.loads = dict.fromkeys(brokers, IDLE)
        self.moves: list[Move] = []
        self._brokers = brokers
        # Most partitions are idle or share their owner's mean rate, so thousands of them take a few dozen sums.
        for (owner, rates), number in Counter((partition.owner, partition.rates) for partition in partitions).items():
            if owner in brokers:
                self._add(owner, rates, number)

    def may_take(self, target: int, position: int) -> bool:
        """Whether the partition's assignment and preferred rack allow ``target`` as its owner."""
        return target in (self._wanted(position) or [target])

    def gaps(self, source: int, target: int) -> Rates:
        """How much more traffic ``source`` carries than ``target``, by window."""
        return tuple(more - less for more, less in zip(self.loads[source], self.loads[target], strict=True))

    def empty_leaving(self, moves_max: int) -> None:
        leaving = (
            position for position, owner in enumerate(self.owners) if owner in self._brokers and self._brokers[owner].is_leaving
        )
        self._move_to_least_loaded(leaving, moves_max)

    def follow_preferences(self, moves_max: int) -> None:
        misplaced = (
            position
            for position, (partition, owner) in enumerate(zip(self.partitions, self.owners, strict=True))
            if (partition.assigned or partition.rack) and owner in self._brokers and not self.may_take(owner, position)
        )
        self._move_to_least_loaded(misplaced, moves_max)

    def move(self, position: int, target: int) -> None:
        rates = self.partitions[position].rates
        self._add(self.owners[position], rates, -1)
        self._add(target, rates, 1)
        self.owners[position] = target
        self.moves.append(Move(position, target))

    def _wanted(self, position: int) -> list[int]:
        """Preferred owners: the first live broker of its assignment, or those in its preferred rack; none: any."""
        partition = self.partitions[position]
        assigned = [broker_id for broker_id in partition.assigned if broker_id in self.takers][:1]
        if assigned or not partition.rack:
            return assigned
        return [broker_id for broker_id in self.takers if self._brokers[broker_id].rack == partition.rack]

    def _move_to_least_loaded(self, positions: Iterable[int], moves_max: int) -> None:
        """Move idle partitions to the broker with the fewest, others to the one with the least traffic."""
        if not self.takers:
            return
        for position in positions:
            if len(self.moves) >= moves_max:
                return
            carries = any(self.partitions[position].rates)
            self.move(
                position,
                min(
                    self._wanted(position) or self.takers,
                    key=lambda broker_id: (sum(self.loads[broker_id]) if carries else 0.0, self.counts[broker_id], broker_id),
                ),
            )

    def _add(self, broker_id: int, rates: Rates, number: int) -> None:
        self.counts[broker_id] += number
        if rates != IDLE:
            self.loads[broker_id] = tuple(load + number * rate for load, rate in zip(self.loads[broker_id], rates, strict=True))


class Levelling:
    """Moves that level brokers. A partition that was moved already stays."""

    def __init__(self, balance: Balance) -> None:
        self._balance = balance

    @cached_property
    def _idle(self) -> dict[int, list[int]]:
        """Positions of idle partitions by owner."""
        found: dict[int, list[int]] = {broker_id: [] for broker_id in self._balance.takers}
        for position, owner, rates in self._movable():
            if rates == IDLE:
                found[owner].append(position)
        return found

    @cached_property
    def _carrying(self) -> dict[int, list[tuple[float, int]]]:
        """Partitions with traffic in every window: rates and positions by owner, the lightest first."""
        found: dict[int, list[tuple[float, int]]] = {broker_id: [] for broker_id in self._balance.takers}
        for position, owner, rates in self._movable():
            if rates != IDLE and all(rates):
                found[owner].append((sum(rates), position))
        return {owner: sorted(ranked) for owner, ranked in found.items()}

    def _movable(self) -> Iterator[tuple[int, int, Rates]]:
        balance = self._balance
        settled = {move.position for move in balance.moves}
        takers = frozenset(balance.takers)
        for position, (partition, owner) in enumerate(zip(balance.partitions, balance.owners, strict=True)):
            if partition.may_level and owner in takers and position not in settled:
                yield position, owner, partition.rates

    # --- traffic -----------------------------------------------------------------------------------------------------

    def level_traffic(self, moves_max: int, *, goes_on: bool) -> bool:
        """Says whether something moved."""
        balance = self._balance
        by_window = zip(*(balance.loads[broker_id] for broker_id in balance.takers), strict=True)
        mean = max(sum(window) for window in by_window) / len(balance.takers)
        widest = max((min(balance.gaps(*pair)) for pair in permutations(balance.takers, 2)), default=0.0)
        if widest <= (SPREAD_END if goes_on else SPREAD_BEGIN) * mean:
            return False
        return self._repeat(lambda: self._relieve(SPREAD_END * mean), moves_max)

    def _relieve(self, gap_min: float) -> bool:
        for source, target in self._pairs(lambda broker_id: sum(self._balance.loads[broker_id])):
            gaps = self._balance.gaps(source, target)
            if min(gaps) > gap_min:
                for entry in _nearest(self._carrying[source], sum(gaps) / 2):
                    if self._levels(entry, gaps) and self._balance.may_take(target, entry[1]):
                        self._carrying[source].remove(entry)
                        self._balance.move(entry[1], target)
                        return True
        return False

    def _levels(self, entry: tuple[float, int], gaps: Rates) -> bool:
        total, position = entry
        rates = self._balance.partitions[position].rates
        return total >= SHARE_MIN * sum(gaps) and all(rate <= SHARE_MAX * gap for rate, gap in zip(rates, gaps, strict=True))

    # --- numbers -----------------------------------------------------------------------------------------------------

    def level_numbers(self, moves_max: int, *, goes_on: bool) -> bool:
        """Says whether something moved."""
        counts = [self._balance.counts[broker_id] for broker_id in self._balance.takers]
        mean = sum(counts) / len(counts)
        if max(counts) - min(counts) <= (SPREAD_END if goes_on else SPREAD_BEGIN) * mean:
            return False
        return self._repeat(lambda: self._even_out(max(SPREAD_END * mean, 1.0)), moves_max)

    def _even_out(self, gap_min: float) -> bool:
        counts = self._balance.counts
        for source, target in self._pairs(lambda broker_id: counts[broker_id]):
            if counts[source] - counts[target] > gap_min and (
                self._give_idle(source, target) or self._give_light(source, target)
            ):
                return True
        return False

    def _give_idle(self, source: int, target: int) -> bool:
        for position in self._idle[source]:
            if self._balance.may_take(target, position):
                self._idle[source].remove(position)
                self._balance.move(position, target)
                return True
        return False

    def _give_light(self, source: int, target: int) -> bool:
        """The lightest partition with traffic whose move leaves ``target`` with no more than ``source`` had."""
        gaps = self._balance.gaps(source, target)
        for entry in self._carrying[source]:
            total, position = entry
            if total > sum(gaps):
                return False
            rates = self._balance.partitions[position].rates
            if all(rate <= gap for rate, gap in zip(rates, gaps, strict=True)) and self._balance.may_take(target, position):
                self._carrying[source].remove(entry)
                self._balance.move(position, target)
                return True
        return False

    # --- both --------------------------------------------------------------------------------------------------------

    def _pairs(self, load: Callable[[int], float]) -> Iterator[tuple[int, int]]:
        """Pairs of a source and a target, starting with the most and the least loaded."""
        by_load = sorted(self._balance.takers, key=lambda broker_id: (load(broker_id), broker_id))
        return ((source, target) for source in reversed(by_load) for target in by_load if source != target)

    def _repeat(self, move_one: Callable[[], bool], moves_max: int) -> bool:
        before = len(self._balance.moves)
        while len(self._balance.moves) < moves_max and move_one():
            pass
        return len(self._balance.moves) > before


def plan_moves(
    partitions: Sequence[Placed],
    brokers: Mapping[int, Place],
    *,
    leaving_max: int,
    others_max: int = 0,
    before: Plan = NOTHING_MOVED,
) -> Plan:
    """Plan at most ``leaving_max`` moves away from leaving brokers, or else ``others_max`` for racks, traffic and counts.

    ``before`` is the previous plan of the latter kind. Partitions whose owner is not in ``brokers`` are ignored.
    """
    balance = Balance(partitions, brokers)
    balance.empty_leaving(leaving_max)
    if balance.moves or not balance.takers or not others_max:
        return Plan(moves=balance.moves)
    balance.follow_preferences(others_max)
    levelling = Levelling(balance)
    levels_traffic = levelling.level_traffic(others_max, goes_on=before.levels_traffic)
    levels_numbers = levelling.level_numbers(others_max, goes_on=before.levels_numbers)
    return Plan(moves=balance.moves, levels_traffic=levels_traffic, levels_numbers=levels_numbers)


def _nearest(ranked: Sequence[tuple[float, int]], wanted: float) -> Iterator[tuple[float, int]]:
    """All candidates, those with the closest rate first."""
    above = bisect_left(ranked, (wanted, -1))
    below = above - 1
    while below >= 0 or above < len(ranked):
        if above == len(ranked) or (below >= 0 and wanted - ranked[below][0] <= ranked[above][0] - wanted):
            yield ranked[below]
            below -= 1
        else:
            yield ranked[above]
            above += 1
