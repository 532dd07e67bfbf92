"""The ledger writer's protocol: which bookie gets which entry, what is confirmed, when the ensemble changes.

This is BookKeeper's protocol ("protocol.md", sections on writing and ensemble changes). Invariants:

- An entry is confirmed when Qa bookies of its write set have it durably and all earlier entries are confirmed.
- Everything before the last fragment is confirmed. A new fragment begins at LAC + 1 at the latest. It begins earlier if
  confirmed entries are still held that the failed bookie may lack and Qa of the staying bookies have, so that a failure leaves
  no entry with fewer copies than it should have.
- While an ensemble change is being committed, only bookies that stay in the ensemble count. An entry confirmed meanwhile is
  confirmed before and after the change, so the writer need not pause (BookKeeper's does).
- A replacement gets entries only after the change is committed: every entry of the new fragment that it should have, including
  confirmed ones, which are held until then.
- One answer "fenced" ends the writer. Recovery decides which unconfirmed entries exist.

``lac`` and ``first_copied`` only rise; ``error`` is set at most once, and then nothing changes. This module does not choose
bookies (``placement.py``), keeps no time and does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stratalog_bookies.client.core.entry import AddSink, PendingEntry, pack_header
from stratalog_bookies.client.core.fragments import with_replacements, write_masks
from stratalog_bookies.protocol.messages import RECOVERY_ADD, Status
from stratalog_core.errors import Corrupt, Invalid, LedgerFenced, OutcomeUnknown, StratalogError
from stratalog_core.ports import Buffer
from stratalog_core.quorum import check_quorums
from stratalog_metadata.records import Ledger


class Send(NamedTuple):
    """Send ``entry`` to ``bookie``. A tuple, because an ensemble change resends thousands."""

    bookie: str
    entry: PendingEntry


class LedgerWriterCore:
    """One open ledger, or one in recovery whose last entries are copied. Not thread-safe; never blocks."""

    def __init__(self, ledger: Ledger, *, sink: AddSink, first_entry: int = 0, recovering: bool = False) -> None:
        check_quorums(ledger.ensemble_size, ledger.write_quorum, ledger.ack_quorum)
        self.ledger = ledger
        self.next_entry_id = first_entry
        self.lac = first_entry - 1
        self.first_copied = first_entry - 1
        self.held_bytes = 0
        self.appended_bytes = 0
        self.error: StratalogError | None = None
        self.tells_first_copies = True
        """Whether a first copy alone is reported to the listener."""
        self.failed_mask = 0
        """``failed_positions`` as bits."""
        self._sink = sink
        self._ledger_id = ledger.ledger_id
        self._ack_quorum = ledger.ack_quorum
        self._flags = RECOVERY_ADD if recovering else 0
        self._masks = write_masks(ledger.ensemble_size, ledger.write_quorum)
        self._entries: dict[int, PendingEntry] = {}
        self._given_up = 0
        self._leaving = 0
        self._proposed: Ledger | None = None
        self._hold_from = 0
        self._set_ensemble()

    # -- appending

    def append(self, payload: tuple[Buffer, ...], payload_bytes: int) -> PendingEntry:
        """Take the next entry; the caller sends it to ``targets(entry)``. The buffers must not change until
        the entry is released.
        """
        entry_id = self.next_entry_id
        header = pack_header(self._ledger_id, entry_id, self.lac, payload, payload_bytes, self._flags)
        return self._take(entry_id, header, payload, payload_bytes)

    def append_recovered(self, header: bytes, payload: memoryview) -> PendingEntry:
        """Take the next entry as it was read; its bytes stay the same (LAC and CRC included)."""
        return self._take(self.next_entry_id, header[:-1] + bytes((self._flags,)), (payload,), len(payload))

    def _take(self, entry_id: int, header: bytes, payload: tuple[Buffer, ...], payload_bytes: int) -> PendingEntry:
        write_mask = self._masks[entry_id % len(self._masks)]
        entry = PendingEntry(
            entry_id, header, payload, payload_bytes, write_mask, write_mask & ~self._given_up, self._sink
        )  # fmt: skip
        self._entries[entry_id] = entry
        self.next_entry_id = entry_id + 1
        self.held_bytes += payload_bytes
        self.appended_bytes += payload_bytes
        return entry

    def targets(self, entry: PendingEntry) -> tuple[str, ...]:
        """Bookies to send a new entry to: its write set without the failed ones."""
        mask = entry.awaiting & ~self.failed_mask
        targets = self._targets.get(mask)
        if targets is None:
            targets = self._targets[mask] = tuple(name for name, bit in self._bits.items() if bit & mask)
        return targets

    # -- answers

    def on_added(self, entry: PendingEntry, bookie: str) -> bool:
        """``bookie`` has the entry durably. Returns whether ``lac`` rose, or ``first_copied`` rose and is reported.

        Hot path: three times per entry. An answer of a bookie that has been replaced finds no bit.
        """
        bit = self._bits.get(bookie, 0) & entry.write_mask
        if not bit or self.error is not None:
            return False
        entry.awaiting &= ~bit
        entry.acked |= bit
        entry_id = entry.entry_id
        rose = False
        if entry_id == self.first_copied + 1:
            self._advance_first_copied()
            rose = self.tells_first_copies
        if entry_id <= self.lac:
            if not entry.awaiting:
                self._release(entry)
        elif entry_id == self.lac + 1 and (entry.acked & ~self._leaving).bit_count() >= self._ack_quorum:
            self._advance_lac()
            rose = True
        return rose

    def on_refused(self, entry: PendingEntry, bookie: str, status: int) -> bool:
        """``bookie`` answered a status other than OK. Returns whether to resend the entry shortly."""
        if self.error is not None:
            return False
        if status in (Status.FENCED, Status.NO_SUCH_LEDGER):
            # Fencing is permanent, so even a late reply of a replaced bookie proves that another owner took over.
            self.fail(LedgerFenced(f"ledger {self._ledger_id} is fenced or deleted on {bookie}; only recovery knows its end"))
            return False
        if not self._bits.get(bookie, 0) & entry.awaiting:
            return False
        if status == Status.OVERLOADED:
            return True
        error = self._corruption(entry, bookie, status)
        if error is not None:
            self.fail(error)
        else:
            self.on_bookie_failed(bookie)
        return False

    def _corruption(self, entry: PendingEntry, bookie: str, status: int) -> StratalogError | None:
        where = f"entry {entry.entry_id} of ledger {self._ledger_id}"
        if status == Status.CONFLICT:
            return Corrupt(f"{bookie} holds a different {where}")
        if status == Status.BAD_CRC and not entry.digest_matches():
            return Corrupt(f"the payload of {where} was changed after it was appended")
        return None

    def on_bookie_failed(self, bookie: str) -> None:
        """Send nothing more to ``bookie`` until it is revived; what it has durably still counts.

        Next, ``begin_change`` replaces it, or ``give_up`` continues without it.
        """
        if self.error is None:
            self.failed_mask |= self._bits.get(bookie, 0)

    def give_up(self) -> None:
        """No bookie can replace the failed ones now: release the confirmed entries held for them."""
        self._given_up |= self.failed_mask & ~self._leaving
        for entry in self._entries.values():
            entry.awaiting &= ~self._given_up
        self._release_settled()

    def fail(self, error: StratalogError) -> None:
        """End the writer permanently. Unconfirmed entries may or may not exist."""
        if self.error is None:
            self.error = error
            self._entries.clear()
            self.held_bytes = 0

    def fail_outcome_unknown(self, reason: str) -> None:
        """End the writer because its entries cannot be confirmed in time."""
        waiting = self.next_entry_id - 1 - self.lac
        self.fail(OutcomeUnknown(f"{waiting} entries of ledger {self._ledger_id} could not be confirmed: {reason}"))

    # -- ensemble changes

    @property
    def staying_failed_mask(self) -> int:
        """Failed positions that the current ensemble change does not replace."""
        return self.failed_mask & ~self._leaving

    @property
    def is_settled(self) -> bool:
        """Whether every entry is confirmed and no answer is awaited."""
        return not self._entries

    @property
    def failed_positions(self) -> tuple[int, ...]:
        """Ensemble positions whose bookie must be replaced or revived."""
        return tuple(position for position in range(len(self._bits)) if self.failed_mask >> position & 1)

    @property
    def lacks_quorum(self) -> bool:
        """Whether some write set has fewer than Qa bookies that work."""
        return any((mask & ~self.failed_mask).bit_count() < self._ack_quorum for mask in self._masks)

    @property
    def is_changing(self) -> bool:
        return self._proposed is not None

    @property
    def unconfirmed(self) -> int:
        """Number of appended entries that are not confirmed."""
        return self.next_entry_id - 1 - self.lac

    def begin_change(self, replacements: Mapping[int, str]) -> Ledger:
        """Begin to replace failed positions; returns the record to commit by compare-and-set.

        Exactly one of ``commit_change``, ``abandon_change`` (definitely not committed) and ``fail`` must follow.
        """
        if self._proposed is not None:
            raise Invalid("an ensemble change is in progress already")
        leaving = sum(1 << position for position in replacements)
        assert leaving & ~self.failed_mask == 0, "only failed positions are replaced"
        self._leaving = leaving
        self._hold_from = self._first_changed(leaving)
        self._proposed = with_replacements(self.ledger, self._hold_from, replacements)
        return self._proposed

    def _first_changed(self, leaving: int) -> int:
        """First entry of the new fragment: from LAC + 1 back over held entries that the staying bookies alone confirm."""
        first, floor = self.lac + 1, self.ledger.fragments[-1].first_entry
        while first > floor and (entry := self._entries.get(first - 1)) is not None:
            if (entry.acked & ~leaving).bit_count() < self._ack_quorum:
                break
            first -= 1
        return first

    def release_held(self) -> None:
        """The change takes too long: release the confirmed entries held for the replacement. The auditor fills its gaps."""
        self._given_up |= self._leaving
        self._hold_from = self.next_entry_id
        self.give_up()

    def commit_change(self) -> list[Send]:
        """The proposed record is committed: switch to the new ensemble. Returns what to send to the replacements."""
        assert self._proposed is not None, "no ensemble change is in progress"
        replaced, self._leaving = self._leaving, 0
        self.ledger, self._proposed = self._proposed, None
        self.failed_mask &= ~replaced
        self._given_up &= ~replaced
        self._set_ensemble()
        first_entry = self.ledger.fragments[-1].first_entry
        for entry_id, entry in self._entries.items():
            if entry_id >= first_entry:
                entry.acked &= ~replaced
            else:
                entry.awaiting &= ~replaced
        sends = self._send_again(replaced, first_entry)
        self._release_settled()
        return sends

    def abandon_change(self) -> None:
        """The proposed record is definitely not committed: the old ensemble counts again."""
        self._proposed = None
        self._leaving = 0
        self._advance_lac()
        self._release_settled()

    def revive(self, positions: Iterable[int]) -> list[Send]:
        """The failed bookies at ``positions`` answer again. Returns the held entries that they miss."""
        revived = 0
        for position in positions:
            revived |= self.failed_mask & 1 << position & ~self._leaving
        self.failed_mask &= ~revived
        self._given_up &= ~revived
        return self._send_again(revived, 0)

    def _send_again(self, mask: int, first_entry: int) -> list[Send]:
        sends: list[Send] = []
        for entry_id, entry in self._entries.items():
            missing = entry.write_mask & mask & ~entry.acked if entry_id >= first_entry else 0
            if missing:
                entry.awaiting |= missing
                sends.extend(Send(name, entry) for name, bit in self._bits.items() if bit & missing)
        return sends

    def _set_ensemble(self) -> None:
        bookies = self.ledger.fragments[-1].bookies
        self._bits = {bookie: 1 << position for position, bookie in enumerate(bookies)}
        self._targets: dict[int, tuple[str, ...]] = {}

    # -- confirming and letting go

    def _advance_first_copied(self) -> None:
        entries, following = self._entries, self.first_copied + 1
        while following <= self.lac or ((entry := entries.get(following)) is not None and entry.acked):
            following += 1
        self.first_copied = following - 1

    def _advance_lac(self) -> None:
        entries, leaving, ack_quorum = self._entries, self._leaving, self._ack_quorum
        following = self.lac + 1
        while (entry := entries.get(following)) is not None and (entry.acked & ~leaving).bit_count() >= ack_quorum:
            self.lac = following
            if not entry.awaiting:
                self._release(entry)
            following += 1
        if self.first_copied < self.lac:
            self._advance_first_copied()

    def _release(self, entry: PendingEntry) -> None:
        """Forget a settled entry, unless the current change may have to send it to a replacement."""
        if self._proposed is not None and entry.entry_id >= self._hold_from:
            return
        if self._entries.pop(entry.entry_id, None) is not None:
            self.held_bytes -= entry.payload_bytes

    def _release_settled(self) -> None:
        for entry in list(self._entries.values()):
            if entry.entry_id <= self.lac and not entry.awaiting:
                self._release(entry)

    def validate_state(self) -> None:
        """Assert the invariants. O(held entries): called around ensemble changes, not per entry."""
        assert self.ledger.fragments[-1].first_entry <= self.lac + 1, "everything before the last fragment is confirmed"
        assert self.first_copied >= self.lac, "a confirmed entry has a first copy"
        held = sum([entry.payload_bytes for entry in self._entries.values()])
        assert self.held_bytes == held, "held bytes are those of the held entries"
        if self.error is None:
            unconfirmed = range(self.lac + 1, self.next_entry_id)
            assert all(entry_id in self._entries for entry_id in unconfirmed), "unconfirmed entries are held"
        assert (self._leaving != 0) == (self._proposed is not None), "bookies leave in an ensemble change only"
