"""How a duel goes: which message is late or lost, and when recovery begins. Names of bookies and timings come from the seed.

``any_weather`` draws everything. The others are interleavings in which one rule of the protocol is all that keeps a confirmed
entry; the first two are those in which BookKeeper once lost data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from simulation.weather import LOST
from stratalog_bookies.protocol import messages

if TYPE_CHECKING:
    from simulation.duels import Duel

TO_BOOKIES: Final = (messages.ADD, messages.READ, messages.FENCE)
ROTTEN: Final = "bookie-1"


def any_weather(duel: Duel) -> None:
    """Everything is drawn: weather, moment, and whether the newest entry's copy on one bookie goes bad."""
    pair, calm = duel.pair, duel.random.choice([0.5, 0.7, 0.9])
    methods = duel.random.sample(TO_BOOKIES, duel.random.randint(1, len(TO_BOOKIES)))
    pair.weather.draw(duel.random, pair.writer.name, pair.bookies, (messages.ADD,), calm=calm, late_s=0.7)
    pair.weather.draw(duel.random, pair.recoverer.name, pair.bookies, methods, calm=calm, late_s=0.7)
    moment = duel.random.randrange(duel.entries)
    rot = duel.random.random() < 0.5
    away = duel.random.random() < 0.5

    def at(reached: int) -> None:
        if reached >= moment and not duel.recover.is_set():
            if rot:
                pair.spoil(duel.known.appended[reached])
            if away:
                pair.away(duel.random.choice(duel.bookies))
            duel.recover.set()

    if duel.random.random() < 0.5:
        duel.after_confirmed = at
    else:
        duel.after_first_copy = at
    duel.recover_in(duel.random.uniform(0.05, 1.0))


def late_adds(duel: Duel) -> None:
    """One bookie has the last entry, one never gets it, one gets it after recovery has read there and found nothing.

    Fences reach the first two, which is enough of them; then the first is away. If the read of the third does not fence it,
    the old writer gets its second copy after the ledger was closed without the entry (bookkeeper#2614).
    """
    pair, last = duel.pair, duel.entries - 1
    first, second, third = duel.random.sample(duel.bookies, 3)
    duel.pause_s = 0.03

    def before_append(entry_id: int) -> None:
        if entry_id == last:
            pair.weather.set(pair.writer.name, second, messages.ADD, LOST)
            pair.weather.set(pair.writer.name, third, messages.ADD, duel.random.uniform(0.35, 0.7))
            pair.weather.set(pair.recoverer.name, third, messages.FENCE, LOST)
            pair.weather.set(pair.recoverer.name, first, messages.READ, LOST)

    duel.before_append = before_append
    duel.after_first_copy = lambda entry_id: duel.recover.set() if entry_id == last else None
    duel.recover_in(2.0)


def young_fragment(duel: Duel) -> None:
    """Two bookies fail and are replaced; the new ones have no entry and no LAC yet when recovery asks them, and nobody else
    answers. The ledger does not begin anew because they know of nothing (second defect of the BookKeeper TLA+ work).
    """
    pair = duel.pair
    failing, staying = duel.random.sample(duel.bookies, 2), ""
    staying = next(bookie for bookie in duel.bookies if bookie not in failing)
    duel.pause_s, turn = 0.02, duel.random.randrange(1, max(duel.entries, 2))
    others = [bookie for bookie in pair.bookies if bookie not in duel.bookies]
    duel.entries = max(duel.entries, turn + 2)

    def before_append(entry_id: int) -> None:
        if entry_id != turn:
            return
        for bookie in failing:
            pair.weather.set(pair.writer.name, bookie, messages.ADD, LOST)
        late_s = duel.random.uniform(0.2, 0.6)
        for bookie in others:
            pair.weather.set(pair.writer.name, bookie, messages.ADD, late_s)
            if duel.random.random() < 0.3:
                pair.weather.set(pair.recoverer.name, bookie, messages.ADD, LOST)
        pair.weather.set(pair.recoverer.name, staying, messages.FENCE, duel.random.choice([LOST, 0.4]))
        pair.on_change(duel)

    duel.before_append = before_append
    duel.recover_in(2.0)


def acked_by_who_leaves(duel: Duel) -> None:
    """An entry has its first copy on a bookie that is replaced next, and its second while the replacement is committed.

    Only one of the two counts: the new ensemble has one copy.
    """
    pair, turn = duel.pair, duel.random.randrange(duel.entries)
    leaving, silent, late = duel.random.sample(duel.bookies, 3)
    duel.pause_s, duel.entries = 0.02, turn + 3
    answer_s = duel.random.uniform(0.25, 0.5)

    def before_append(entry_id: int) -> None:
        if entry_id == turn:
            pair.weather.set(pair.writer.name, silent, messages.ADD, LOST)
            pair.weather.set(pair.writer.name, late, messages.ADD, answer_s)
            for bookie in set(pair.bookies) - set(duel.bookies):
                pair.weather.set(pair.writer.name, bookie, messages.ADD, 0.3)
        elif entry_id == turn + 1:
            pair.weather.set(pair.writer.name, leaving, messages.ADD, LOST)

    duel.before_append = before_append
    duel.recover_in(duel.random.uniform(0.8, 1.4))


def rewritten_elsewhere(duel: Duel) -> None:
    """The last entry has one copy, and recovery can write it to none of the others that the record names."""
    pair, last = duel.pair, duel.entries - 1
    _, *others = duel.random.sample(duel.bookies, len(duel.bookies))

    def before_append(entry_id: int) -> None:
        if entry_id == last:
            for bookie in others:
                pair.weather.set(pair.writer.name, bookie, messages.ADD, LOST)
                pair.weather.set(pair.recoverer.name, bookie, messages.ADD, LOST)

    duel.before_append = before_append
    duel.after_first_copy = lambda entry_id: duel.recover.set() if entry_id == last else None
    duel.recover_in(2.0)


def unreadable_copy(duel: Duel) -> None:
    """Of the last entry's two copies one goes bad and the other's bookie is away. That the third lacks it proves nothing."""
    if ROTTEN not in duel.bookies:
        any_weather(duel)
        return
    pair, last = duel.pair, duel.entries - 1
    away, lacking = duel.random.sample([bookie for bookie in duel.bookies if bookie != ROTTEN], 2)
    duel.pause_s = 0.03

    def before_append(entry_id: int) -> None:
        if entry_id == last:
            pair.weather.set(pair.writer.name, lacking, messages.ADD, LOST)

    def confirmed(lac: int) -> None:
        if lac == last:
            pair.spoil(duel.known.appended[last])
            pair.away(away)
            duel.recover.set()

    duel.before_append, duel.after_confirmed = before_append, confirmed
    duel.recover_in(2.0)
