"""Which bookies to ask for a range of entries, and the result of their answers.

A range is split into pieces that one bookie can serve: the part in one fragment, or single entries of a striped ledger. Each
piece is requested from one replica, and from the next one if that replica fails, lacks the entry, or is slow (a hedge).
Invariants: an entry is absent only if every bookie of its write set says so; a corrupt or unreadable copy decides nothing; the
result is a contiguous run from the first entry on. No I/O and no timers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from stratalog_bookies.client.core.fragments import fragment_of, is_striped, write_bookies
from stratalog_bookies.protocol.messages import EntryState, RangeAnswer, ReadEntry
from stratalog_core.errors import Invalid, NoSuchEntry, Unavailable
from stratalog_metadata.records import Ledger

STRIPED_ENTRIES_MAX = 1024
"""Maximum entries of a striped ledger requested at once: each is a range of its own."""

Accept = Callable[[ReadEntry], bool]


class Ask(NamedTuple):
    """Request entries ``first`` to ``last`` from ``bookie``; pass its answer in with this."""

    bookie: str
    piece: int
    first: int
    last: int


class _Piece:
    __slots__ = ("absent_at", "failures", "first", "last", "outstanding", "replicas", "settled")

    def __init__(self, first: int, last: int, replicas: list[str]) -> None:
        self.first = first
        self.last = last
        self.replicas = replicas
        self.outstanding = 0
        self.absent_at: set[str] = set()
        self.failures: list[str] = []
        self.settled = False


class ReadPlan:
    """One read of ``first`` to ``last``: ``start`` returns the first requests, each answer further ones,
    until ``is_finished``.
    """

    def __init__(
        self,
        ledger: Ledger,
        first: int,
        last: int,
        *,
        avoid: Collection[str],
        accept: Accept,
        turn: int = 0,
        striped_max: int = STRIPED_ENTRIES_MAX,
    ) -> None:
        """``avoid`` are bookies to ask last; ``turn`` rotates the choice among equal replicas (pass a random number).

        ``striped_max`` bounds the entries requested of a striped ledger.
        """
        if not 0 <= first <= last:
            raise Invalid(f"entries {first} to {last} are not a valid range")
        self._ledger = ledger
        self._first = first
        self._last = last
        self._accept = accept
        self._entries: dict[int, ReadEntry] = {}
        self._pieces = [
            _Piece(begin, end, _replicas(ledger, begin, avoid, turn)) for begin, end in _cut(ledger, first, last, striped_max)
        ]  # fmt: skip

    def start(self) -> list[Ask]:
        return [ask for index in range(len(self._pieces)) for ask in self._ask_next(index)]

    def on_answer(self, ask: Ask, answer: RangeAnswer) -> list[Ask]:
        piece = self._pieces[ask.piece]
        piece.outstanding -= 1
        listed = False
        for entry in answer.entries:
            listed = listed or entry.entry_id == ask.first
            if entry.state == EntryState.PRESENT and entry.entry_id not in self._entries and self._accept(entry):
                self._entries[entry.entry_id] = entry
        if piece.settled or ask.first in self._entries:
            piece.settled = True
            return []
        if answer.decided_to >= ask.first and not listed:
            piece.absent_at.add(ask.bookie)
        else:
            piece.failures.append(f"{ask.bookie}: {'unreadable or corrupt' if listed else answer.status.name}")
        return self._ask_next(ask.piece)

    def on_failure(self, ask: Ask, reason: str) -> list[Ask]:
        piece = self._pieces[ask.piece]
        piece.outstanding -= 1
        piece.failures.append(f"{ask.bookie}: {reason}")
        return [] if piece.settled else self._ask_next(ask.piece)

    def on_slow(self) -> list[Ask]:
        """Hedge: ask one more replica for each open piece."""
        return [ask for index, piece in enumerate(self._pieces) if not piece.settled for ask in self._ask_next(index)]

    def _ask_next(self, index: int) -> list[Ask]:
        piece = self._pieces[index]
        if not piece.replicas:
            piece.settled = not piece.outstanding
            return []
        piece.outstanding += 1
        return [Ask(piece.replicas.pop(0), index, piece.first, piece.last)]

    @property
    def is_finished(self) -> bool:
        return all(piece.settled for piece in self._pieces)

    def result(self, bytes_max: int | None = None) -> list[ReadEntry]:
        """The contiguous run from the first entry on, cut before it exceeds ``bytes_max``; the first entry is always included.

        Raises ``NoSuchEntry`` if every replica of the first entry says that it does not exist, else ``Unavailable`` if it is
        missing.
        """
        run: list[ReadEntry] = []
        total = 0
        for entry_id in range(self._first, self._last + 1):
            entry = self._entries.get(entry_id)
            if entry is None or (run and bytes_max is not None and total + entry.payload_bytes > bytes_max):
                break
            total += entry.payload_bytes
            run.append(entry)
        if not run:
            self._raise_missing()
        return run

    def _raise_missing(self) -> None:
        piece, ledger_id = self._pieces[0], self._ledger.ledger_id
        if piece.absent_at.issuperset(write_bookies(self._ledger, self._first)):
            raise NoSuchEntry(f"ledger {ledger_id} has no entry {self._first}, according to all its bookies")
        raise Unavailable(f"entry {self._first} of ledger {ledger_id} could not be read ({'; '.join(piece.failures)})")


def _cut(ledger: Ledger, first: int, last: int, striped_max: int) -> Iterator[tuple[int, int]]:
    if is_striped(ledger):
        yield from ((entry_id, entry_id) for entry_id in range(first, min(last, first + striped_max - 1) + 1))
        return
    starts = [fragment.first_entry for fragment in ledger.fragments if first < fragment.first_entry <= last]
    for begin, following in zip([first, *starts], [*starts, last + 1], strict=True):
        yield begin, following - 1


def _replicas(ledger: Ledger, entry_id: int, avoid: Collection[str], turn: int) -> list[str]:
    if is_striped(ledger):
        ordered = list(write_bookies(ledger, entry_id))
    else:
        bookies = fragment_of(ledger, entry_id).bookies
        ordered = [bookies[(turn + step) % len(bookies)] for step in range(len(bookies))]
    return sorted(ordered, key=lambda bookie: bookie in avoid)
