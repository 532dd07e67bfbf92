"""The shell of a writer core: sends its entries, replaces failed bookies, gives up at the deadline.

Used by ledger writers, which commit an ensemble change in metadata, and by recoveries, which keep it until they close the
ledger.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from stratalog_bookies.client.core.entry import PendingEntry
from stratalog_bookies.client.core.placement import Candidate, choose_replacements
from stratalog_bookies.client.core.writer import LedgerWriterCore, Send
from stratalog_bookies.client.replication import Replication
from stratalog_core.errors import LedgerFenced, OutcomeUnknown, Retriable, StratalogError
from stratalog_metadata.records import Ledger
from stratalog_metadata.state.guarded_update import Superseded

_log = logging.getLogger(__name__)
_HOLD_MS: Final = 1000
"""How long confirmed entries are held for a replacement while its commit is in progress."""


class EntryReplicator:
    """Replicates one ledger's entries. Subclasses define how a change is committed and who is notified."""

    def __init__(self, replication: Replication, core: LedgerWriterCore) -> None:
        self._replication = replication
        self._core = core
        self._changing: asyncio.Task[None] | None = None
        self._change_ticks = 0
        self._replace_tried = 0
        self._tick_lac = -1
        self._stalled_ticks = 0
        self._ended = False
        # The core's own method: saves one call per answer on the hot path.
        self.on_added = core.on_added

    @property
    def held_bytes(self) -> int:
        return self._core.held_bytes

    def on_refused(self, entry: PendingEntry, bookie: str, status: int) -> bool:
        return self._core.on_refused(entry, bookie, status)

    def on_bookie_failed(self, bookie: str) -> None:
        self._core.on_bookie_failed(bookie)
        self.deliver()

    def deliver(self) -> None:
        """Called after events: replace bookies that have just failed."""
        if self._core.failed_mask & ~self._replace_tried:
            self._replace_failed()

    def on_tick(self) -> bool:
        core = self._core
        if self._ended:
            return not core.is_settled
        if self._changing is not None:
            self._change_ticks += 1
            if self._change_ticks * self._replication.settings.tick_ms > _HOLD_MS:
                core.release_held()
            self._revive_during_change()
        elif core.failed_mask:
            self._replace_failed()
        self._check_progress()
        return not core.is_settled or core.failed_mask != 0

    def _check_progress(self) -> None:
        core, settings = self._core, self._replication.settings
        if not core.unconfirmed or core.lac != self._tick_lac or core.error is not None:
            self._tick_lac, self._stalled_ticks = core.lac, 0
            return
        self._stalled_ticks += 1
        if self._stalled_ticks * settings.tick_ms > settings.confirm_deadline_ms:
            core.fail_outcome_unknown(f"none was confirmed for {settings.confirm_deadline_ms} ms")
            self.deliver()

    def _send(self, entry: PendingEntry) -> None:
        self._replication.sender.send(self._core.targets(entry), entry)
        self._watch()

    def _watch(self) -> None:
        self._replication.busy[self] = None

    def _send_all(self, sends: list[Send]) -> None:
        for bookie, entry in sends:
            self._replication.sender.send((bookie,), entry)

    def _replace_failed(self) -> None:
        """Replace failed bookies with spare ones; where there is none, take back those that are live again."""
        core = self._core
        self._replace_tried = core.failed_mask
        if self._ended:
            core.give_up()
        if self._changing is not None or self._ended or core.error is not None or not core.failed_mask:
            return
        self._watch()
        candidates = self._replication.directory.candidates(core.ledger.ledger_id)
        ensemble = core.ledger.fragments[-1].bookies
        replacements = choose_replacements(candidates, ensemble, core.failed_positions, self._replication.random)
        if replacements:
            self._change_ticks = 0
            proposed = core.begin_change(replacements)
            self._changing = asyncio.get_running_loop().create_task(self._change(proposed))
        else:
            self._revive(candidates, ensemble)
            core.give_up()

    def _revive(self, candidates: list[Candidate], ensemble: tuple[str, ...]) -> None:
        back = {each.bookie_id for each in candidates if each.live and not each.read_only}
        positions = [position for position in self._core.failed_positions if ensemble[position] in back]
        if positions:
            self._send_all(self._core.revive(positions))
            self._replace_tried = self._core.failed_mask

    def _revive_during_change(self) -> None:
        """Take back bookies that failed during a change without waiting for its end: without them nothing may be confirmed."""
        core = self._core
        if core.error is None and core.staying_failed_mask:
            candidates = self._replication.directory.candidates(core.ledger.ledger_id)
            self._revive(candidates, core.ledger.fragments[-1].bookies)

    async def _change(self, proposed: Ledger) -> None:
        core = self._core
        try:
            if self.check_state():
                await self._commit(proposed)
        except Superseded:
            core.fail(LedgerFenced(f"ledger {core.ledger.ledger_id} was taken over while its ensemble changed"))
        except OutcomeUnknown as unknown:
            core.fail(unknown)
        except Retriable:
            core.abandon_change()
        except StratalogError as error:
            core.fail(error)
        else:
            if core.error is None:
                self._send_all(core.commit_change())
                self.check_state()
        self._changing = None
        self._replace_tried &= core.failed_mask
        self.deliver()

    def check_state(self) -> bool:
        """Assert the core's invariants around a durable change of the record. A violation is a defect and ends the writer."""
        try:
            self._core.validate_state()
        except AssertionError:
            _log.exception("the writer of ledger %d is in an impossible state", self._core.ledger.ledger_id)
            self._core.fail_outcome_unknown("the writer is in an impossible state")
            return False
        return True

    async def _commit(self, proposed: Ledger) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """Stop replacing bookies. Answers to entries in flight still count."""
        self._ended = True
        self._core.give_up()
        if self._changing is not None:
            self._changing.cancel()
            self._changing = None
