"""The recovery protocol: where a ledger ends after its writer is gone.

This is BookKeeper's protocol ("protocol.md", section on recovery, and its TLA+ specification). The caller first stops ensemble
changes, by setting the stored record to IN_RECOVERY or by a higher epoch, and passes in a record in state IN_RECOVERY. Then:

1. Every bookie of the last fragment is fenced; it answers its last entry and its LAC. Once every write set has fewer than Qa
   bookies that are not fenced, the old writer can confirm nothing more.
2. From max(greatest LAC, first entry of the last fragment - 1) + 1 on, each entry is read with reads that also fence. A bookie
   lacks an entry only if it says so: by a read that decided the entry, or by its fence, which names its last entry. An error,
   a time-out, an unreadable or a corrupt copy decides nothing.
3. An entry with one good copy exists and is written again to its whole write set. The first entry that (Qw - Qa) + 1 bookies
   lack was never confirmed: the ledger ends before it.
4. When all recovered entries are confirmed again, the caller closes the record by compare-and-set. A recovery that loses this
   race takes the winner's end.

After a restore of metadata from an old copy, the ledger's last fragments may be unknown: bookies that are not named but have
entries (``strays``) are fenced and read, too, and all entries from the last known fragment on are written again.

An interrupted recovery can be repeated. Reads always use the record that was passed in, because replacements made during the
rewrite hold none of the old copies. This module does not write the entries (``LedgerWriterCore`` in recovery mode does), does
not close the record, keeps no time and does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from stratalog_bookies.client.core.fragments import write_bookies
from stratalog_bookies.protocol.messages import ENTRY_HEADER, EntryState, RangeAnswer, ReadEntry, entry_matches
from stratalog_core.errors import Corrupt
from stratalog_core.quorum import absence_proved, fencing_complete
from stratalog_metadata.records import Ledger, LedgerState

READ_AHEAD_ENTRIES = 512
"""Entries per read. Only entries that the writer had not confirmed are read, so few rounds are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Fence the ledger on ``bookie`` and ask for its last entry and LAC."""

    bookie: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRange:
    """Read entries ``first`` to ``last`` from ``bookie``, fencing first."""

    bookie: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """Write this entry again to its whole write set. Entries come in order, from ``LedgerRecovery.first_rewritten`` on."""

    entry_id: int
    header: bytes
    payload: memoryview


Instruction = Fence | ReadRange | Rewrite


class LedgerRecovery:
    """Recovery of one ledger up to the decision where it ends. Each event returns the next instructions."""

    def __init__(self, ledger: Ledger, strays: Collection[str] = ()) -> None:
        assert ledger.state is LedgerState.IN_RECOVERY, "the record must be IN_RECOVERY, so that ensemble changes are stopped"
        self._ledger = ledger
        self._ensemble = ledger.fragments[-1].bookies
        self._strays = tuple(strays)
        self._tails: dict[str, int] = {}
        self._fences_out: set[str] = set()
        self._reading: ReadRange | None = None
        self._read_failed: set[str] = set()
        self._unreadable: set[tuple[str, int]] = set()
        self._lacking: dict[int, set[str]] = {}
        self._found: dict[int, Rewrite] = {}
        self._cursor = -1
        self.lac = ledger.fragments[-1].first_entry - 1
        self.first_rewritten = -1
        self.end: int | None = None

    @property
    def is_fenced(self) -> bool:
        """Whether the old writer can confirm nothing more; from then on ``first_rewritten`` is known."""
        return self._cursor >= 0

    def start(self) -> list[Instruction]:
        return self.retry()

    def retry(self) -> list[Instruction]:
        """Repeat failed requests. Call periodically until ``end`` is known."""
        if self.end is not None:
            return []
        self._read_failed.clear()
        self._unreadable.clear()
        asked = (*self._ensemble, *self._strays)
        unfenced = [name for name in asked if name not in self._tails and name not in self._fences_out]
        self._fences_out.update(unfenced)
        return [*(Fence(bookie=name) for name in unfenced), *self._decide()]

    def on_fenced(self, bookie: str, last_entry: int, lac: int) -> list[Instruction]:
        """``bookie`` durably refuses adds of the old writer. Raises ``Corrupt`` if confirmed entries are lost."""
        self._fences_out.discard(bookie)
        self._tails[bookie] = last_entry
        self.lac = max(self.lac, lac)
        if self.end is not None and self.lac > self.end:
            raise self._lost(self.end + 1)
        if not self.is_fenced and self._coverage_complete():
            first = self._ledger.fragments[-1].first_entry if self._strays else self.lac + 1
            self._cursor = self.first_rewritten = first
        return self._decide()

    def on_fence_failed(self, bookie: str) -> list[Instruction]:
        """The fence failed or was not answered. It may have taken effect, so it counts for nothing."""
        self._fences_out.discard(bookie)
        return []

    def on_read(self, bookie: str, answer: RangeAnswer) -> list[Instruction]:
        """The answer to the outstanding read. Raises ``Corrupt`` if confirmed entries are lost."""
        asked, self._reading = self._reading, None
        assert asked is not None, "a read is outstanding"
        assert asked.bookie == bookie, "one read is outstanding at a time"
        if answer.decided_to < asked.first:
            self._read_failed.add(bookie)
            return self._decide()
        listed = {entry.entry_id: entry for entry in answer.entries}
        for entry_id in range(asked.first, min(asked.last, answer.decided_to) + 1):
            self._note(bookie, entry_id, listed.get(entry_id))
        return self._decide()

    def on_read_failed(self, bookie: str) -> list[Instruction]:
        """The outstanding read failed or was not answered: nothing is known from it."""
        self._reading = None
        self._read_failed.add(bookie)
        return self._decide()

    def _note(self, bookie: str, entry_id: int, entry: ReadEntry | None) -> None:
        ledger_id = self._ledger.ledger_id
        if entry is None:
            self._lacking.setdefault(entry_id, set()).add(bookie)
        elif entry.state == EntryState.PRESENT and entry_matches(ledger_id, entry):
            header = ENTRY_HEADER.pack(ledger_id, entry_id, entry.lac, entry.payload_bytes, entry.crc, 0)
            self._found.setdefault(entry_id, Rewrite(entry_id=entry_id, header=header, payload=entry.payload))
            self.lac = max(self.lac, entry.lac)
        else:
            self._unreadable.add((bookie, entry_id))

    def _coverage_complete(self) -> bool:
        if not self._tails.keys() >= set(self._strays):
            return False
        fenced = {position for position, name in enumerate(self._ensemble) if name in self._tails}
        return fencing_complete(len(self._ensemble), self._ledger.write_quorum, self._ledger.ack_quorum, fenced)

    def _decide(self) -> list[Instruction]:
        """Advance as far as the known answers allow. At most one read is outstanding, for the first undecided entry."""
        instructions: list[Instruction] = []
        while self.is_fenced and self.end is None:
            entry_id = self._cursor
            found = self._found.pop(entry_id, None)
            if found is not None:
                instructions.append(found)
                self._lacking.pop(entry_id, None)
                self._cursor += 1
                continue
            if self._is_absent(entry_id):
                self._finish(entry_id - 1)
            elif self._reading is None:
                instructions.extend(self._next_read(entry_id))
            break
        return instructions

    def _is_absent(self, entry_id: int) -> bool:
        lacking = sum(self._lacks(bookie, entry_id) for bookie in write_bookies(self._ledger, entry_id))
        is_proved = absence_proved(self._ledger.write_quorum, self._ledger.ack_quorum, lacking)
        return is_proved and all(self._lacks(stray, entry_id) for stray in self._strays)

    def _lacks(self, bookie: str, entry_id: int) -> bool:
        return self._tails.get(bookie, entry_id) < entry_id or bookie in self._lacking.get(entry_id, ())

    def _finish(self, end: int) -> None:
        if self.lac > end:
            raise self._lost(end + 1)
        self.end = end
        self._found.clear()
        self._lacking.clear()

    def _next_read(self, entry_id: int) -> list[Instruction]:
        bookie = self._best_source(entry_id)
        if bookie is None:
            return []
        last = min(self._tails.get(bookie, entry_id + READ_AHEAD_ENTRIES), entry_id + READ_AHEAD_ENTRIES)
        self._reading = ReadRange(bookie=bookie, first=entry_id, last=last)
        return [self._reading]

    def _best_source(self, entry_id: int) -> str | None:
        """A bookie not yet excluded for this entry; first the one known to have advanced furthest."""
        sources = [
            bookie
            for bookie in (*write_bookies(self._ledger, entry_id), *self._strays)
            if bookie not in self._read_failed
            and (bookie, entry_id) not in self._unreadable
            and not self._lacks(bookie, entry_id)
        ]
        return max(sources, key=lambda bookie: self._tails.get(bookie, -1), default=None)

    def _lost(self, entry_id: int) -> Corrupt:
        return Corrupt(
            f"ledger {self._ledger.ledger_id}: entry {entry_id} was confirmed (LAC {self.lac}), but too few bookies have it:"
            " data is lost; restore the disks that held it"
        )
