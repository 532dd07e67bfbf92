"""Which copies of which closed ledgers have to be moved, and where to: sans-IO.

A copy moves if its bookie is lost or draining, or if another bookie would let the fragment span more hosts, or more racks on as
many hosts. What always holds: only closed ledgers are touched (an open one belongs to its writer, one in recovery to whoever
recovers it); a target is live, takes ledgers and is not in the ensemble; a move of a misplaced copy raises the fragment's
``Spread``, so that such moves end. Nothing here copies or commits.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum

from stratalog_bookies.client.core.placement import Candidate, best_spread, choose_replacements, spread_of
from stratalog_bookies.repair.core.lost_bookies import Gone
from stratalog_core.ports import Random
from stratalog_metadata.records import Fragment, Ledger, LedgerState


class Cause(StrEnum):
    """Why a copy moves."""

    LOST = "lost"
    DRAINING = "draining"
    MISPLACED = "misplaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """``target`` takes over ``position`` of fragment number ``fragment``."""

    fragment: int
    position: int
    target: str
    cause: Cause


def loads(ledgers: Iterable[Ledger]) -> Counter[str]:
    """In how many fragments each bookie stands."""
    return Counter(name for ledger in ledgers for fragment in ledger.fragments for name in fragment.bookies)


def weigh(candidates: Iterable[Candidate], stands: Mapping[str, int]) -> list[Candidate]:
    """The candidates with these loads, so that what is moved goes where the least is."""
    return [dataclasses.replace(each, load=float(stands.get(each.bookie_id, 0))) for each in candidates]


def in_need(ledgers: Iterable[Ledger], lost: Gone, draining: AbstractSet[str]) -> list[Ledger]:
    """Closed ledgers that name a lost or draining bookie, those with the fewest copies left first."""
    ranked = [
        (_urgency(ledger, lost.of(ledger.ledger_id), draining), ledger)
        for ledger in ledgers
        if ledger.state is LedgerState.CLOSED
    ]
    wanting = [each for each in ranked if any(each[0])]
    return [ledger for _, ledger in sorted(wanting, key=lambda each: (-each[0][0], -each[0][1], each[1].ledger_id))]


def _urgency(ledger: Ledger, lost: AbstractSet[str], draining: AbstractSet[str]) -> tuple[int, int]:
    """Copies lost in the worst fragment, and copies to be moved."""
    worst = max(sum([name in lost for name in fragment.bookies]) for fragment in ledger.fragments)
    leaving = sum([name in draining for fragment in ledger.fragments for name in fragment.bookies])
    return worst, leaving


def plan_moves(
    ledger: Ledger, lost: AbstractSet[str], draining: AbstractSet[str], candidates: Sequence[Candidate], random: Random
) -> list[Move]:
    """As many moves as there are bookies for; lost copies first, then draining ones, then misplaced ones."""
    if ledger.state is not LedgerState.CLOSED:
        return []
    moves = []
    for number, fragment in enumerate(ledger.fragments):
        causes = _leaving(fragment, lost, draining)
        moves += _replace(number, fragment, causes, candidates, random) if causes else []
        moves += _spread(number, fragment, candidates, random) if not causes else []
    return sorted(moves, key=lambda move: list(Cause).index(move.cause))


def _leaving(fragment: Fragment, lost: AbstractSet[str], draining: AbstractSet[str]) -> dict[int, Cause]:
    """Positions whose bookies are to be replaced."""
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
    # With too few spare bookies the lost copies get them: the draining ones still exist.
    ordered = sorted(causes, key=lambda position: causes[position] is not Cause.LOST)
    fitting = sum([each.live and each.takes_ledgers and each.bookie_id not in fragment.bookies for each in candidates])
    chosen = choose_replacements(candidates, fragment.bookies, ordered[:fitting], random)
    return [
        Move(fragment=number, position=position, target=target, cause=causes[position]) for position, target in chosen.items()
    ]


def _spread(number: int, fragment: Fragment, candidates: Sequence[Candidate], random: Random) -> list[Move]:
    """The one move that raises the fragment's spread most; nothing if a member is not live, because it may come back."""
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
