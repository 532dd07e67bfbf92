"""Which copies of which closed ledgers must move, and where to.

A copy moves if its bookie is lost or draining, or if another bookie would spread the fragment over more hosts, or over more
racks on as many hosts. Invariants: only closed ledgers are touched (an open one belongs to its writer, one in recovery to the
recovering client); a target is live, takes ledgers and is not in the ensemble; a move of a misplaced copy raises the fragment's
``Spread``, so such moves terminate. It copies nothing, commits nothing, and does no I/O.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum

from stratalog_bookies.client.core.placement import Candidate, best_spread, choose_replacements, spread_of
from stratalog_bookies.repair.core.lost_bookies import FailedStorage
from stratalog_core.ports import Random
from stratalog_metadata.records import Fragment, Ledger, LedgerState


class Cause(StrEnum):
    """Why a copy moves."""

    LOST = "lost"
    DRAINING = "draining"
    MISPLACED = "misplaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """``target`` replaces the bookie at ``position`` of fragment number ``fragment``."""

    fragment: int
    position: int
    target: str
    cause: Cause


def copies_by_bookie(ledgers: Iterable[Ledger]) -> Counter[str]:
    """Number of fragments that each bookie is part of."""
    return Counter(name for ledger in ledgers for fragment in ledger.fragments for name in fragment.bookies)


def with_loads(candidates: Iterable[Candidate], copies: Mapping[str, int]) -> list[Candidate]:
    """The candidates with these loads, so that copies move to the least loaded bookies."""
    return [dataclasses.replace(each, load=float(copies.get(each.bookie_id, 0))) for each in candidates]


def ledgers_to_restore(ledgers: Iterable[Ledger], lost: FailedStorage, draining: AbstractSet[str]) -> list[Ledger]:
    """Closed ledgers that name a lost or draining bookie, those with the fewest copies left first."""
    ranked = [
        (_urgency(ledger, lost.of(ledger.ledger_id), draining), ledger)
        for ledger in ledgers
        if ledger.state is LedgerState.CLOSED
    ]
    wanting = [each for each in ranked if any(each[0])]
    return [ledger for _, ledger in sorted(wanting, key=lambda each: (-each[0][0], -each[0][1], each[1].ledger_id))]


def _urgency(ledger: Ledger, lost: AbstractSet[str], draining: AbstractSet[str]) -> tuple[int, int]:
    """Sort key: copies lost in the worst fragment, then copies to move."""
    worst = max(sum([name in lost for name in fragment.bookies]) for fragment in ledger.fragments)
    leaving = sum([name in draining for fragment in ledger.fragments for name in fragment.bookies])
    return worst, leaving


def plan_moves(
    ledger: Ledger, lost: AbstractSet[str], draining: AbstractSet[str], candidates: Sequence[Candidate], random: Random
) -> list[Move]:
    """As many moves as there are bookies for: lost copies first, then draining, then misplaced ones."""
    if ledger.state is not LedgerState.CLOSED:
        return []
    moves = []
    for number, fragment in enumerate(ledger.fragments):
        causes = _leaving(fragment, lost, draining)
        moves += _replace(number, fragment, causes, candidates, random) if causes else []
        moves += _spread(number, fragment, candidates, random) if not causes else []
    return sorted(moves, key=lambda move: list(Cause).index(move.cause))


def _leaving(fragment: Fragment, lost: AbstractSet[str], draining: AbstractSet[str]) -> dict[int, Cause]:
    """Positions whose bookies must be replaced."""
    causes: dict[int, Cause] = {}
    for position, name in enumerate(fragment.bookies):
        if name in lost:
            causes[position] = Cause.LOST
        elif name in draining:
            causes[position] = Cause.DRAINING
    return causes


def _replace(
    number: int, fragment: Fragment, causes: Mapping[int, Cause], candidates: Sequence[Candidate], random: Random
) -> list[Move]:
    # If bookies are short, lost copies take precedence: draining bookies still serve theirs.
    ordered = sorted(causes, key=lambda position: causes[position] is not Cause.LOST)
    fitting = sum([each.live and each.takes_ledgers and each.bookie_id not in fragment.bookies for each in candidates])
    chosen = choose_replacements(candidates, fragment.bookies, ordered[:fitting], random)
    return [
        Move(fragment=number, position=position, target=target, cause=causes[position]) for position, target in chosen.items()
    ]


def _spread(number: int, fragment: Fragment, candidates: Sequence[Candidate], random: Random) -> list[Move]:
    """The move that raises the fragment's spread most. None if a member is not live, because it may return."""
    known = {each.bookie_id: each for each in candidates if each.live}
    if any(name not in known for name in fragment.bookies):
        return []
    members = [known[name] for name in fragment.bookies]
    spread = spread_of(members)
    takers = [each for each in known.values() if each.takes_ledgers and each.bookie_id not in fragment.bookies]
    if spread == best_spread([*members, *takers], len(members)):
        return []
    random.shuffle(takers)
    options = [
        (spread_of([*members[:position], taker, *members[position + 1 :]]), -taker.load, position, taker)
        for taker in takers
        for position in range(len(members))
    ]
    found, _, position, taker = max(options, key=lambda option: option[:3])
    if found <= spread:
        return []
    return [Move(fragment=number, position=position, target=taker.bookie_id, cause=Cause.MISPLACED)]
