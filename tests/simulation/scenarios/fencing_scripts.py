"""Scripts of races: which message is delayed or lost, and when recovery starts. Bookies and timings come from the seed.

``any_link_faults`` draws everything. The others are interleavings in which one rule of the protocol is all that keeps a
confirmed entry; the first two are those in which BookKeeper once lost data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from simulation.faults.link_faults import LOST
from stratalog_bookies.protocol import messages

if TYPE_CHECKING:
    from simulation.scenarios.fencing_races import FencingRace

TO_BOOKIES: Final = (messages.ADD, messages.READ, messages.FENCE)
ROTTEN: Final = "bookie-1"


def any_link_faults(race: FencingRace) -> None:
    """Draw everything: link faults, moment, and whether one bookie's copy of the newest entry is corrupted."""
    pair, calm = race.pair, race.random.choice([0.5, 0.7, 0.9])
    methods = race.random.sample(TO_BOOKIES, race.random.randint(1, len(TO_BOOKIES)))
    pair.link_faults.draw(race.random, pair.writer.name, pair.bookies, (messages.ADD,), calm=calm, late_s=0.7)
    pair.link_faults.draw(race.random, pair.recoverer.name, pair.bookies, methods, calm=calm, late_s=0.7)
    moment = race.random.randrange(race.entries)
    rot = race.random.random() < 0.5
    away = race.random.random() < 0.5

    def at(reached: int) -> None:
        if reached >= moment and not race.recover.is_set():
            if rot:
                pair.spoil(race.known.appended[reached])
            if away:
                pair.away(race.random.choice(race.bookies))
            race.recover.set()

    if race.random.random() < 0.5:
        race.after_confirmed = at
    else:
        race.after_first_copy = at
    race.recover_in(race.random.uniform(0.05, 1.0))


def late_adds(race: FencingRace) -> None:
    """One bookie has the last entry, one never gets it, one gets it after recovery has read there and found nothing.

    Fences reach the first two, which suffices; then the first is away. If the read of the third does not fence it, the old
    writer gets its second copy after the ledger was closed without the entry (bookkeeper#2614).
    """
    pair, last = race.pair, race.entries - 1
    first, second, third = race.random.sample(race.bookies, 3)
    race.pause_s = 0.03

    def before_append(entry_id: int) -> None:
        if entry_id == last:
            pair.link_faults.set(pair.writer.name, second, messages.ADD, LOST)
            pair.link_faults.set(pair.writer.name, third, messages.ADD, race.random.uniform(0.35, 0.7))
            pair.link_faults.set(pair.recoverer.name, third, messages.FENCE, LOST)
            pair.link_faults.set(pair.recoverer.name, first, messages.READ, LOST)

    race.before_append = before_append
    race.after_first_copy = lambda entry_id: race.recover.set() if entry_id == last else None
    race.recover_in(2.0)


def young_fragment(race: FencingRace) -> None:
    """Two bookies fail and are replaced; the new ones have no entry and no LAC yet, and only they answer recovery.

    Recovery must not restart the ledger because they have nothing (second defect of the BookKeeper TLA+ work).
    """
    pair = race.pair
    failing, staying = race.random.sample(race.bookies, 2), ""
    staying = next(bookie for bookie in race.bookies if bookie not in failing)
    race.pause_s, turn = 0.02, race.random.randrange(1, max(race.entries, 2))
    others = [bookie for bookie in pair.bookies if bookie not in race.bookies]
    race.entries = max(race.entries, turn + 2)

    def before_append(entry_id: int) -> None:
        if entry_id != turn:
            return
        for bookie in failing:
            pair.link_faults.set(pair.writer.name, bookie, messages.ADD, LOST)
        late_s = race.random.uniform(0.2, 0.6)
        for bookie in others:
            pair.link_faults.set(pair.writer.name, bookie, messages.ADD, late_s)
            if race.random.random() < 0.3:
                pair.link_faults.set(pair.recoverer.name, bookie, messages.ADD, LOST)
        pair.link_faults.set(pair.recoverer.name, staying, messages.FENCE, race.random.choice([LOST, 0.4]))
        pair.on_change(race)

    race.before_append = before_append
    race.recover_in(2.0)


def acked_by_who_leaves(race: FencingRace) -> None:
    """An entry has its first copy on a bookie that is replaced next, and its second while the replacement is committed.

    Only one of the two counts: the new ensemble has one copy.
    """
    pair, turn = race.pair, race.random.randrange(race.entries)
    leaving, silent, late = race.random.sample(race.bookies, 3)
    race.pause_s, race.entries = 0.02, turn + 3
    answer_s = race.random.uniform(0.25, 0.5)

    def before_append(entry_id: int) -> None:
        if entry_id == turn:
            pair.link_faults.set(pair.writer.name, silent, messages.ADD, LOST)
            pair.link_faults.set(pair.writer.name, late, messages.ADD, answer_s)
            for bookie in set(pair.bookies) - set(race.bookies):
                pair.link_faults.set(pair.writer.name, bookie, messages.ADD, 0.3)
        elif entry_id == turn + 1:
            pair.link_faults.set(pair.writer.name, leaving, messages.ADD, LOST)

    race.before_append = before_append
    race.recover_in(race.random.uniform(0.8, 1.4))


def rewritten_elsewhere(race: FencingRace) -> None:
    """The last entry has one copy, and recovery can write it to none of the other bookies in the record."""
    pair, last = race.pair, race.entries - 1
    _, *others = race.random.sample(race.bookies, len(race.bookies))

    def before_append(entry_id: int) -> None:
        if entry_id == last:
            for bookie in others:
                pair.link_faults.set(pair.writer.name, bookie, messages.ADD, LOST)
                pair.link_faults.set(pair.recoverer.name, bookie, messages.ADD, LOST)

    race.before_append = before_append
    race.after_first_copy = lambda entry_id: race.recover.set() if entry_id == last else None
    race.recover_in(2.0)


def unreadable_copy(race: FencingRace) -> None:
    """The last entry has two copies: one is corrupted, the other's bookie is away. A third bookie without it proves nothing."""
    if ROTTEN not in race.bookies:
        any_link_faults(race)
        return
    pair, last = race.pair, race.entries - 1
    away, lacking = race.random.sample([bookie for bookie in race.bookies if bookie != ROTTEN], 2)
    race.pause_s = 0.03

    def before_append(entry_id: int) -> None:
        if entry_id == last:
            pair.link_faults.set(pair.writer.name, lacking, messages.ADD, LOST)

    def confirmed(lac: int) -> None:
        if lac == last:
            pair.spoil(race.known.appended[last])
            pair.away(away)
            race.recover.set()

    race.before_append, race.after_confirmed = before_append, confirmed
    race.recover_in(2.0)
