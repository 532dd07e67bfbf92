"""Which bookies a ledger gets, pure: live ones in different racks first, the less loaded before the more, ties by chance.

A bookie that is down but registered may fill a place that nobody else can, as long as every entry still reaches Qa live ones:
the ledger is then born degraded and heals when the bookie returns, instead of not being born. Read-only and draining ones are
never chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from stratalog_core.errors import NotEnoughBookies
from stratalog_core.ports import Random
from stratalog_core.quorum import check_quorums


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A bookie as placement sees it. ``live``: it has a session and has not just failed us; ``load``: any measure."""

    bookie_id: str
    rack: str
    live: bool
    read_only: bool = False
    draining: bool = False
    load: float = 0.0

    @property
    def takes_ledgers(self) -> bool:
        """Whether a ledger may be placed here, now or once it is live again."""
        return not self.read_only and not self.draining


def choose_ensemble(
    candidates: Iterable[Candidate], ensemble_size: int, write_quorum: int, ack_quorum: int, random: Random
) -> tuple[str, ...]:
    """Bookies for a new ledger, in random order. Raises ``NotEnoughBookies``, ``Invalid``."""
    check_quorums(ensemble_size, write_quorum, ack_quorum)
    writable = [candidate for candidate in candidates if candidate.takes_ledgers]
    live = [candidate for candidate in writable if candidate.live]
    live_wanted = ensemble_size - (write_quorum - ack_quorum)
    if len(live) < live_wanted or len(writable) < ensemble_size:
        raise NotEnoughBookies(
            f"an ensemble of {ensemble_size} (write quorum {write_quorum}, ack quorum {ack_quorum}) needs {ensemble_size}"
            f" bookies, {live_wanted} of them live; {len(writable)} are writable and {len(live)} live: start more bookies"
        )
    chosen = _spread(_ranked(live, random), (), ensemble_size)
    down = [candidate for candidate in writable if not candidate.live]
    chosen += _spread(_ranked(down, random), [candidate.rack for candidate in chosen], ensemble_size - len(chosen))
    random.shuffle(chosen)
    return tuple(candidate.bookie_id for candidate in chosen)


def choose_replacements(
    candidates: Iterable[Candidate], ensemble: Sequence[str], positions: Collection[int], random: Random
) -> dict[int, str]:
    """A live bookie for as many of the failed ``positions`` as there are; a bookie never takes a second place."""
    known = {candidate.bookie_id: candidate for candidate in candidates}
    spare = [each for each in known.values() if each.live and each.takes_ledgers and each.bookie_id not in ensemble]
    racks = [known[name].rack for place, name in enumerate(ensemble) if place not in positions and name in known]
    chosen = _spread(_ranked(spare, random), racks, len(positions))
    return {position: candidate.bookie_id for position, candidate in zip(sorted(positions), chosen, strict=False)}


def _ranked(candidates: list[Candidate], random: Random) -> list[Candidate]:
    shuffled = list(candidates)
    random.shuffle(shuffled)
    return sorted(shuffled, key=lambda candidate: candidate.load)


def _spread(ranked: list[Candidate], racks_taken: Collection[str], count: int) -> list[Candidate]:
    """The first ``count``, each from the rack least used so far; the ranking decides among equals."""
    uses: dict[str, int] = {}
    for rack in racks_taken:
        uses[rack] = uses.get(rack, 0) + 1
    left = list(ranked)
    chosen: list[Candidate] = []
    while left and len(chosen) < count:
        best = min(left, key=lambda candidate: uses.get(candidate.rack, 0))
        left.remove(best)
        chosen.append(best)
        uses[best.rack] = uses.get(best.rack, 0) + 1
    return chosen
