"""A ledger open for writing, as seen by its owner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from stratalog_bookies.client.core.writer import LedgerWriterCore
from stratalog_bookies.client.entry_replicator import EntryReplicator
from stratalog_bookies.client.ledger import LedgerListener
from stratalog_bookies.client.ledger_records import LedgerRecordPuts
from stratalog_bookies.client.replication import HeldBytes, Replication
from stratalog_core.errors import Conflict, Fenced, Invalid, LedgerFenced, StratalogError
from stratalog_core.ports import Buffer, Clock
from stratalog_metadata.records import NONE_UNDECIDED, Ledger, LedgerState
from stratalog_metadata.state.commands import EpochIs, Requirement, SessionAlive, Update
from stratalog_metadata.state.guarded_update import Superseded

ENTRY_BYTES_MAX: Final = 32 * 1024 * 1024
"""Maximum payload of one entry; with its header it must fit into one frame."""

_ONE_BUFFER: Final = (bytes, bytearray, memoryview)
_log = logging.getLogger(__name__)


class LedgerWriter(EntryReplicator):
    """Appends are pipelined, confirmed in order and reported to the listener. Ends by ``seal``, ``abandon`` or a failure."""

    def __init__(
        self,
        replication: Replication,
        ledger: Ledger,
        version: int,
        listener: LedgerListener,
        requirements: tuple[Requirement, ...] = (),
        *,
        puts: LedgerRecordPuts,
        held: HeldBytes,
        clock: Clock,
    ) -> None:
        super().__init__(replication, LedgerWriterCore(ledger, sink=self))
        self._puts = puts
        self._held = held
        self._clock = clock
        self._version = version
        self._listener = listener
        self._requirements = tuple(each for each in requirements if isinstance(each, EpochIs | SessionAlive))
        self._reported_first = -1
        self._reported_lac = -1
        self._failure_reported = False
        self._sealing = False
        self._all_confirmed: asyncio.Future[None] | None = None
        self._sent_lac = -1
        self._tick_next_entry = 0
        replication.directory.count_ledger(ledger.fragments[-1].bookies, 1)

    @property
    def ledger(self) -> Ledger:
        """The record as last committed."""
        return self._core.ledger

    @property
    def next_entry_id(self) -> int:
        return self._core.next_entry_id

    @property
    def lac(self) -> int:
        """Last add confirmed; -1 before the first."""
        return self._core.lac

    @property
    def unconfirmed_bytes(self) -> int:
        """Payload bytes that are not confirmed, or still being sent to a slow or replaced bookie."""
        return self._core.held_bytes

    @property
    def lacks_quorum(self) -> bool:
        """Whether so many bookies have failed that some entries cannot be confirmed now."""
        core = self._core
        return core.failed_mask != 0 and core.lacks_quorum

    @property
    def error(self) -> StratalogError | None:
        """Why the writer ended, if it failed."""
        return self._core.error

    def tell_first_copies(self, wanted: bool) -> None:
        """Whether to report the first copies of later entries to the listener (default: yes)."""
        self._core.tells_first_copies = wanted
        self._reported_first = self._core.first_copied

    def append(self, payload: Buffer | Sequence[Buffer]) -> int:
        """Send one entry and return its id; the listener hears its outcome.

        The payload is one buffer or several consecutive ones. They are not copied and must not change until all bookies of the
        entry have it. Raises ``Overloaded`` (nothing happened) at the client's bound, ``Invalid`` for an entry above 32 MiB or
        after ``seal``, and the writer's error once it has failed.
        """
        core = self._core
        if core.error is not None or self._sealing:
            raise self._refusal()
        if isinstance(payload, _ONE_BUFFER):
            parts: tuple[Buffer, ...] = (payload,)
            payload_bytes = len(payload)
        else:
            parts = tuple(payload)
            payload_bytes = sum(map(len, parts))
        if payload_bytes > ENTRY_BYTES_MAX:
            raise Invalid(f"an entry of {payload_bytes} bytes is too large; maximum is {ENTRY_BYTES_MAX}: send smaller batches")
        replication = self._replication
        self._held.take(payload_bytes)
        self._sent_lac = core.lac
        entry = core.append(parts, payload_bytes)
        replication.sender.send(core.targets(entry), entry)
        replication.busy[self] = None
        return entry.entry_id

    def _refusal(self) -> StratalogError:
        error = self._core.error
        if error is None:
            return Invalid(f"ledger {self.ledger.ledger_id} is being sealed: append to the next one")
        return type(error)(error.message, **error.detail)

    def deliver(self) -> None:
        try:
            self._notify()
        except Exception:
            # A defect of the listener: it missed notifications. It must not break the connection that other writers share.
            _log.exception("the listener of ledger %d failed", self.ledger.ledger_id)
            self._core.fail_outcome_unknown("the listener failed")
            self._notify()

    def _notify(self) -> None:
        core = self._core
        if core.tells_first_copies:
            while self._reported_first < core.first_copied:
                self._reported_first += 1
                self._listener.on_first_copy(self._reported_first)
        if self._reported_lac < core.lac:
            self._reported_lac = core.lac
            self._listener.on_confirmed(core.lac)
        if self._all_confirmed is not None and not core.unconfirmed and core.error is None:
            self._settle_seal(None)
        if core.error is not None:
            self._deliver_failure(core.error)
        elif core.failed_mask:
            super().deliver()

    def _settle_seal(self, error: StratalogError | None) -> None:
        waiter = self._all_confirmed
        if waiter is not None and not waiter.done():
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(type(error)(error.message, **error.detail))

    def _deliver_failure(self, error: StratalogError) -> None:
        if self._failure_reported:
            return
        self._failure_reported = True
        self._end_writing()
        self._settle_seal(error)
        self._listener.on_failed(error)

    def _end_writing(self) -> None:
        if not self._ended:
            self._end()
            self._replication.directory.count_ledger(self.ledger.fragments[-1].bookies, -1)

    def on_tick(self) -> bool:
        busy = super().on_tick()
        return busy or (not self._ended and self._reported_lac > self._sent_lac)

    def lac_to_send(self) -> int | None:
        """A LAC that no entry carries, if the ledger was idle for a tick: it is sent to the bookies explicitly."""
        core = self._core
        idle = core.next_entry_id == self._tick_next_entry
        self._tick_next_entry = core.next_entry_id
        if not idle or self._ended or core.lac <= self._sent_lac:
            return None
        self._sent_lac = core.lac
        return core.lac

    async def _commit(self, proposed: Ledger) -> None:
        replication = self._replication
        before = self.ledger.fragments[-1].bookies
        self._version = await self._puts.put(
            proposed, self._version, requirements=self._requirements,
            timeout_s=replication.settings.confirm_deadline_ms / 1000, share=False,
        )  # fmt: skip
        replication.directory.count_ledger(before, -1)
        replication.directory.count_ledger(proposed.fragments[-1].bookies, 1)

    async def seal(
        self,
        end_offset: int,
        updates: tuple[Update, ...] = (),
        requirements: tuple[Requirement, ...] = (),
        *,
        undecided_from: int = NONE_UNDECIDED,
    ) -> Ledger:
        """Wait until everything appended is confirmed, then close the ledger permanently; returns the CLOSED record.

        ``end_offset`` is the offset after its last record, ``undecided_from`` as in the record. ``updates`` take effect in
        the same command; if their
        ``requirements`` do not hold, the ledger is closed without them. Raises what ends the writer: ``LedgerFenced`` if
        another client is recovering or has closed it, ``StaleEpoch``, ``OutcomeUnknown``. Then only recovery can decide where
        it ends.
        """
        if self._sealing:
            raise Invalid(f"ledger {self.ledger.ledger_id} is being sealed already")
        if self._core.error is not None:
            raise self._refusal()
        self._sealing = True
        await self._confirm_all()
        while self._changing is not None:
            await asyncio.wait((self._changing,))
        if self._core.error is not None:
            raise self._refusal()
        if not self.check_state():
            self.deliver()
            raise self._refusal()
        self._end_writing()
        closed = self._closed_at(end_offset, undecided_from)
        try:
            await self._close(closed, updates, requirements)
        except Superseded:
            raise self._fail(LedgerFenced(f"ledger {closed.ledger_id} was taken over before it was sealed")) from None
        except StratalogError as error:
            raise self._fail(error) from None
        self._core.ledger = closed
        return closed

    async def _confirm_all(self) -> None:
        if self._core.unconfirmed:
            self._all_confirmed = asyncio.get_running_loop().create_future()
            await self._all_confirmed

    def _closed_at(self, end_offset: int, undecided_from: int) -> Ledger:
        return msgspec.structs.replace(
            self.ledger, state=LedgerState.CLOSED, last_entry=self.lac, payload_bytes=self._core.appended_bytes,
            end_offset=end_offset, closed_at_ms=self._clock.wall_ms(), undecided_from=undecided_from,
        )  # fmt: skip

    async def _close(self, closed: Ledger, updates: tuple[Update, ...], requirements: tuple[Requirement, ...]) -> None:
        """Put the record together with ``updates``, or alone if that is refused."""
        if updates:
            with contextlib.suppress(Conflict, Fenced):
                await self._put(closed, updates, requirements)
                return
        await self._put(closed)

    async def _put(self, closed: Ledger, updates: tuple[Update, ...] = (), requirements: tuple[Requirement, ...] = ()) -> None:
        replication = self._replication
        self._version = await self._puts.put(
            closed, self._version, requirements=(*self._requirements, *requirements), updates=updates,
            timeout_s=replication.settings.confirm_deadline_ms / 1000,
        )  # fmt: skip

    def _fail(self, error: StratalogError) -> StratalogError:
        self._core.fail(error)
        self._deliver_failure(error)
        return error

    def abandon(self) -> None:
        """Stop without sealing: this owner has lost its right to write. The listener is not called again."""
        self._failure_reported = True
        self._core.fail(LedgerFenced(f"ledger {self.ledger.ledger_id} was abandoned by its writer"))
        self._end_writing()
        self._settle_seal(self._core.error)
