"""The auditor: holds the audit lease, checks all closed ledgers periodically, moves copies and fills gaps in others.

A move first copies every entry of a share to the target, and only then names the target in the ledger's record, by
compare-and-set under the lease. A failure is retried in the next audit. The auditor deletes nothing: the copies on a replaced
bookie are deleted with their ledger. In an idle cluster an audit costs one pass over the records in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from stratalog_bookies.client.core.fragments import with_moved
from stratalog_bookies.client.ledger_records import LedgerRecordPuts
from stratalog_bookies.client.read_client import open_read_client
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.metrics import Counters
from stratalog_bookies.repair.copier import Copier
from stratalog_bookies.repair.core.audit_plan import Move, copies_by_bookie, ledgers_to_restore, plan_moves, with_loads
from stratalog_bookies.repair.core.audit_progress import Progress
from stratalog_bookies.repair.core.lost_bookies import FailedStorage, LostBookies
from stratalog_bookies.repair.core.shares import share_of
from stratalog_core.errors import Conflict, SessionExpired, StratalogError
from stratalog_core.ports import Clock, Random, Transport
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Bookie, Lease, Ledger, LedgerState, bookie_key, lease_key, ledger_key
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import ABSENT, Command, Put, Requirement, SessionAlive, VersionIs

AUDIT_WORK: Final = "bookies/audit"
_COMMIT_TIMEOUT_S: Final = 10.0
_WARNINGS_MAX: Final = 3
_BOOKIES: Final = "bookie/"
_log = logging.getLogger(__name__)

SessionId = Callable[[], int]


class AuditLease:
    """The lease on auditing: one auditor at a time. It belongs to the bookie's session and ends with it."""

    def __init__(self, metadata: MetadataClient) -> None:
        self._metadata = metadata

    def guards(self, session_id: int) -> tuple[Requirement, ...] | None:
        """Requirements for every command of the auditor; None if this session does not hold the lease."""
        found = self._metadata.view.get(lease_key(AUDIT_WORK))
        if found is None or not session_id or not isinstance(found.record, Lease) or found.record.session_id != session_id:
            return None
        return SessionAlive(session_id=session_id), VersionIs(key=lease_key(AUDIT_WORK), version=found.version)

    async def hold(self, session_id: int) -> tuple[Requirement, ...] | None:
        """Take the lease if it is free. Returns ``guards``. Raises ``Retriable`` or ``OutcomeUnknown``: try again later."""
        if session_id and self._metadata.view.get(lease_key(AUDIT_WORK)) is None:
            lease = Lease(name=AUDIT_WORK, session_id=session_id)
            requirements = (SessionAlive(session_id=session_id), VersionIs(key=lease.key(), version=ABSENT))
            try:
                await self._metadata.propose(Command(updates=(Put(record=lease),), requirements=requirements))
            except (Conflict, SessionExpired):
                return None
        return self.guards(session_id)


class Auditor:
    """Runs in each bookie; only the holder of the lease acts. ``session_id`` returns the bookie's session (0: none)."""

    def __init__(
        self,
        settings: BookieSettings,
        metadata: MetadataClient,
        transport: Transport,
        clock: Clock,
        random: Random,
        counters: Counters,
        session_id: SessionId,
    ) -> None:
        self._settings = settings
        self._metadata = metadata
        self._puts = LedgerRecordPuts(metadata)
        self._clock = clock
        self._random = random
        self._counters = counters
        self._session_id = session_id
        client = open_read_client(metadata, transport, clock, random)
        self._directory = client.directory
        self._copier = Copier(
            client.requests, client.reads, client.directory, counters, settings.audit_bytes_per_s, self._note_refusal
        )
        self._lease = AuditLease(metadata)
        self._lost = LostBookies(settings.audit_delay_s)
        self._progress = Progress()
        self._refusing = FailedStorage(frozenset())
        """Disks that have refused an entry in this audit, because they are full or have failed."""
        self._failures = 0
        self._copies_by_bookie: Counter[str] = Counter()
        self._wake = asyncio.Event()
        self._unsubscribe = metadata.view.subscribe(self._on_changes)

    async def run(self) -> None:
        """Audit periodically until cancelled."""
        try:
            while True:
                await self._audit_safely()
                await self._pause()
        finally:
            self._unsubscribe()
            self._directory.close()

    async def _audit_safely(self) -> None:
        try:
            await self.audit()
        except StratalogError as failure:
            _log.info("the audit is postponed: %s", failure)
        except Exception:
            _log.exception("the audit failed unexpectedly and is retried")

    async def _pause(self) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(self._settings.audit_interval_s):
                await self._wake.wait()
        except TimeoutError:
            return

    def _on_changes(self, changes: Sequence[Change]) -> None:
        """Record every bookie that returns, however briefly. Audit at once when a bookie begins to drain."""
        bookies = [change for change in changes if change.key.startswith(_BOOKIES)]
        if bookies:
            self._observe()
        if any(change.after is not None and _is_draining(change) for change in bookies):
            self._wake.set()

    def _observe(self) -> None:
        self._lost.observe(self._metadata.view.all(Bookie), self._copies_by_bookie, self._clock.monotonic())

    # -- one look

    async def audit(self) -> None:
        """Repair what can be repaired now, if this is the auditor. Raises what taking the lease raises."""
        self._observe()
        if await self._lease.hold(self._session_id()) is None:
            return
        ledgers = list(self._metadata.view.all(Ledger))
        self._copies_by_bookie = copies_by_bookie(ledgers)
        self._failures = 0
        self._refusing = FailedStorage(frozenset())
        self._progress.begin(ledgers, self._directory.candidates())
        urgent = ledgers_to_restore(ledgers, self._lost_now(), self._draining())
        for ledger in [*urgent, *self._progress.unsettled(ledgers)]:
            guards = self._lease.guards(self._session_id())
            if guards is None:
                return
            await self._restore_safely(ledger.ledger_id, guards)
            # Thousands of ledgers may need nothing or allow nothing: yield in between.
            await asyncio.sleep(0)

    def _lost_now(self) -> FailedStorage:
        self._observe()
        return self._lost.lost(self._clock.monotonic())

    def _draining(self) -> frozenset[str]:
        return frozenset(each.bookie_id for each in self._metadata.view.all(Bookie) if each.draining)

    async def _restore_safely(self, ledger_id: int, guards: tuple[Requirement, ...]) -> None:
        try:
            await self._restore(ledger_id, guards)
        except StratalogError as failure:
            self._failed(ledger_id, failure)

    async def _restore(self, ledger_id: int, guards: tuple[Requirement, ...]) -> None:
        found = self._metadata.view.get(ledger_key(ledger_id))
        if found is None or not isinstance(found.record, Ledger) or found.record.state is not LedgerState.CLOSED:
            return
        ledger, version = found.record, found.version
        present = self._directory.candidates()
        candidates = with_loads(self._directory.candidates(ledger_id), self._copies_by_bookie)
        moves = plan_moves(ledger, self._lost_now().of(ledger_id), self._draining(), candidates, self._random)
        for move in moves:
            if await self._fill(ledger, move.fragment, move.position, move.target):
                ledger, version = await self._commit(ledger, version, move, guards)
        if not moves:
            self._progress.placed(ledger, present)
        await self._fill_gaps(ledger)

    async def _fill_gaps(self, ledger: Ledger) -> None:
        """Copy to each live bookie of the ledger what it should hold and lacks because it was away during the write."""
        for fragment, position in self._progress.unchecked(ledger, self._lost.down().of(ledger.ledger_id)):
            bookie = ledger.fragments[fragment].bookies[position]
            if bookie in self._refusing.of(ledger.ledger_id):
                continue
            if await self._fill(ledger, fragment, position, bookie):
                self._progress.completed(ledger, fragment, position)

    def _note_refusal(self, bookie: str, ledger_id: int) -> None:
        record = self._metadata.view.find(Bookie, bookie_key(bookie))
        if record is not None:
            disk = (bookie, ledger_id % record.disks, record.disks)
            self._refusing = FailedStorage(frozenset(), self._refusing.disks | {disk})

    async def _fill(self, ledger: Ledger, fragment: int, position: int, bookie: str) -> bool:
        """Copy to ``bookie`` what it lacks of this share. Returns whether it now holds all of it, durably."""
        try:
            copied = await self._copier.complete(ledger, share_of(ledger, fragment, position), bookie)
        except StratalogError as failure:
            self._failed(ledger.ledger_id, failure)
            return False
        if copied:
            _log.info("ledger %d, fragment %d: %d entries copied to %s", ledger.ledger_id, fragment, copied, bookie)
        return True

    async def _commit(self, ledger: Ledger, version: int, move: Move, guards: tuple[Requirement, ...]) -> tuple[Ledger, int]:
        """Name the target, which now holds every entry, in the record. Returns the new record and its version.

        Raises ``Conflict`` if the target changes meanwhile: a bookie that drains is removed as soon as no ledger names it.
        """
        target = self._metadata.view.get(bookie_key(move.target))
        if target is None or not isinstance(target.record, Bookie) or target.record.draining:
            raise Conflict(f"{move.target} takes no more copies")
        guards = (*guards, VersionIs(key=bookie_key(move.target), version=target.version))
        left = ledger.fragments[move.fragment].bookies[move.position]
        moved = with_moved(ledger, move.fragment, move.position, move.target)
        version = await self._puts.put(
            moved, version, requirements=guards, timeout_s=_COMMIT_TIMEOUT_S, share=False
        )  # fmt: skip
        self._counters.audit_moves += 1
        self._copies_by_bookie.update({move.target: 1, left: -1})
        self._progress.moved(moved, move.fragment, move.position)
        _log.info(
            "ledger %d, fragment %d: %s replaces %s (%s)", ledger.ledger_id, move.fragment, move.target, left, move.cause
        )  # fmt: skip
        return moved, version

    def _failed(self, ledger_id: int, failure: StratalogError) -> None:
        """Log only the first failures of an audit as warnings: one dead bookie may cause thousands."""
        self._failures += 1
        level = logging.WARNING if self._failures <= _WARNINGS_MAX else logging.DEBUG
        _log.log(level, "the repair of ledger %d is postponed: %s: %s", ledger_id, type(failure).__name__, failure)


def _is_draining(change: Change) -> bool:
    return change.after is not None and isinstance(change.after.record, Bookie) and change.after.record.draining
