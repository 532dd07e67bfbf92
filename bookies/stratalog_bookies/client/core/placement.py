"""Chooses the bookies of a ledger.

Hosts and racks are failure domains. An ensemble spans as many hosts as possible, then as many racks, then prefers the least
loaded bookies; ties are broken at random. If each host is in one rack, this also spans as many racks as possible.

Live bookies come first. A registered bookie that is down may fill a position without a live candidate, as long as every entry
still reaches Qa live bookies: the ledger starts degraded and is completed when the bookie returns. Read-only and draining
bookies are never chosen. No I/O; randomness is passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from stratalog_core.errors import NotEnoughBookies
from stratalog_core.ports import Random
from stratalog_core.quorum import check_quorums


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A bookie as seen by placement. ``live``: it has a session and has not just failed this client. ``load``: any measure."""

    bookie_id: str
    rack: str
    host: str = ""
    live: bool
    read_only: bool = False
    draining: bool = False
    load: float = 0.0

    @property
    def takes_ledgers(self) -> bool:
        """Whether a ledger may be placed here, now or once the bookie is live again."""
        return not self.read_only and not self.draining


@dataclass(frozen=True, slots=True, order=True)
class Spread:
    """How many hosts and racks hold copies; greater is better."""

    hosts: int
    racks: int


def spread_of(members: Iterable[Candidate]) -> Spread:
    """The spread of an ensemble."""
    known = list(members)
    return Spread(len({each.host for each in known}), len({each.rack for each in known}))


def best_spread(candidates: Iterable[Candidate], ensemble_size: int) -> Spread:
    """The best spread that ``ensemble_size`` of the ``candidates`` could have."""
    spread = spread_of(candidates)
    return Spread(min(spread.hosts, ensemble_size), min(spread.racks, ensemble_size))


def require_bookies(candidates: Iterable[Candidate], ensemble_size: int, write_quorum: int, ack_quorum: int) -> None:
    """Raises ``NotEnoughBookies`` if no ensemble can be chosen."""
    writable = [candidate for candidate in candidates if candidate.takes_ledgers]
    live = sum(candidate.live for candidate in writable)
    live_wanted = ensemble_size - (write_quorum - ack_quorum)
    if live < live_wanted or len(writable) < ensemble_size:
        raise NotEnoughBookies(
            f"an ensemble of {ensemble_size} (write quorum {write_quorum}, ack quorum {ack_quorum}) needs {ensemble_size}"
            f" bookies, {live_wanted} of them live; {len(writable)} are writable and {live} live: start more bookies"
        )


def choose_ensemble(
    candidates: Iterable[Candidate], ensemble_size: int, write_quorum: int, ack_quorum: int, random: Random
) -> tuple[str, ...]:
    """Bookies for a new ledger, in random order. Raises ``NotEnoughBookies``, ``Invalid``."""
    check_quorums(ensemble_size, write_quorum, ack_quorum)
    known = list(candidates)
    require_bookies(known, ensemble_size, write_quorum, ack_quorum)
    live = [candidate for candidate in known if candidate.takes_ledgers and candidate.live]
    down = [candidate for candidate in known if candidate.takes_ledgers and not candidate.live]
    chosen = _spread(_ranked(live, random), (), ensemble_size)
    chosen += _spread(_ranked(down, random), chosen, ensemble_size - len(chosen))
    random.shuffle(chosen)
    return tuple(candidate.bookie_id for candidate in chosen)


def choose_replacements(
    candidates: Iterable[Candidate], ensemble: Sequence[str], positions: Collection[int], random: Random
) -> dict[int, str]:
    """A live bookie for as many of the failed ``positions`` as possible. No bookie gets two positions."""
    known = {candidate.bookie_id: candidate for candidate in candidates}
    spare = [each for each in known.values() if each.live and each.takes_ledgers and each.bookie_id not in ensemble]
    staying = [known[name] for place, name in enumerate(ensemble) if place not in positions and name in known]
    chosen = _spread(_ranked(spare, random), staying, len(positions))
    return {position: candidate.bookie_id for position, candidate in zip(sorted(positions), chosen, strict=False)}


def _ranked(candidates: list[Candidate], random: Random) -> list[Candidate]:
    shuffled = list(candidates)
    random.shuffle(shuffled)
    return sorted(shuffled, key=lambda candidate: candidate.load)


def _spread(ranked: list[Candidate], members: Collection[Candidate], count: int) -> list[Candidate]:
    """``count`` more members, each from the host, then the rack, with the fewest members; earlier candidates win ties."""
    hosts = Counter(member.host for member in members)
    racks = Counter(member.rack for member in members)
    left = list(ranked)
    chosen: list[Candidate] = []
    while left and len(chosen) < count:
        best = min(left, key=lambda candidate: (hosts[candidate.host], racks[candidate.rack]))
        left.remove(best)
        chosen.append(best)
        hosts[best.host] += 1
        racks[best.rack] += 1
    return chosen
