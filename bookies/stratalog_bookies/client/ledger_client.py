"""The ledger client: the interface of brokers and tiering workers to bookies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from stratalog_bookies.client.add_sender import AddSender
from stratalog_bookies.client.bookie_requests import BookieRequests
from stratalog_bookies.client.config import LedgerClientSettings
from stratalog_bookies.client.core.bookie_health import BookieHealth
from stratalog_bookies.client.core.entry import Entry, EntryHead
from stratalog_bookies.client.core.placement import Candidate, Spread, choose_ensemble, require_bookies, spread_of
from stratalog_bookies.client.directory import BookieDirectory
from stratalog_bookies.client.ledger import LedgerListener, LedgerSpec
from stratalog_bookies.client.ledger_ids import LedgerIds
from stratalog_bookies.client.ledger_reads import LacNews, LedgerReads
from stratalog_bookies.client.ledger_records import LedgerRecordPuts
from stratalog_bookies.client.ledger_recovery import DeletedOnBookies, LedgerRecoveries, Recovered
from stratalog_bookies.client.ledger_writer import LedgerWriter
from stratalog_bookies.client.replication import EntryHolder, HeldBytes, Replication
from stratalog_bookies.metrics import AddMetrics
from stratalog_bookies.protocol.messages import LedgerTail
from stratalog_core.errors import LedgerFenced, StratalogError
from stratalog_core.ports import Clock, Random, Transport
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Fragment, Ledger
from stratalog_metadata.state.commands import ABSENT, Requirement, Update
from stratalog_metadata.state.guarded_update import Superseded

_log = logging.getLogger(__name__)


class LedgerClient:
    """Creates, recovers, reads and deletes ledgers. One per process; construct it inside the running event loop."""

    def __init__(
        self,
        metadata: MetadataClient,
        transport: Transport,
        clock: Clock,
        random: Random,
        settings: LedgerClientSettings | None = None,
    ) -> None:
        settings = settings or LedgerClientSettings()
        self._settings = settings
        self._busy: dict[EntryHolder, None] = {}
        avoid_s, avoid_s_max = settings.bookie_avoid_ms / 1000, settings.bookie_avoid_ms_max / 1000
        directory = BookieDirectory(
            metadata.view, transport, clock, BookieHealth(avoid_s, avoid_s_max), BookieHealth(avoid_s, avoid_s_max)
        )  # fmt: skip
        self._clock = clock
        self._random = random
        self._directory = directory
        self._requests = BookieRequests(directory, settings.request_timeout_ms / 1000)
        self._puts = LedgerRecordPuts(metadata)
        self._sender = AddSender(directory, settings, self._on_bookie_failed)
        self._held = HeldBytes(settings.held_bytes_max, self._busy)
        self._replication = Replication(
            settings=settings, directory=directory, sender=self._sender, busy=self._busy, random=random
        )
        self._reads = LedgerReads(
            self._requests, directory, random,
            hedge_s=settings.hedge_delay_ms / 1000, deadline_s=settings.read_deadline_ms / 1000,
        )  # fmt: skip
        self._recoveries = LedgerRecoveries(self._replication, self._requests, self._reads, self._puts, metadata, clock)
        self._ids = LedgerIds(metadata, settings.ledger_id_block)
        self._spread = SpreadWatch()
        self._loop = asyncio.get_running_loop()
        self._tick = self._loop.call_later(settings.tick_ms / 1000, self._on_tick)

    def metrics(self) -> list[AddMetrics]:
        """Metric groups of the client, for one scrape."""
        return self._sender.metrics()

    def require_bookies(self, write_quorum: int, ack_quorum: int) -> None:
        """Raises ``NotEnoughBookies`` if, as far as this process knows, no ledger with these quorums can be created now."""
        require_bookies(self._directory.candidates(), write_quorum, write_quorum, ack_quorum)

    async def create(
        self,
        spec: LedgerSpec,
        *,
        requirements: tuple[Requirement, ...] = (),
        updates: Callable[[Ledger], tuple[Update, ...]],
        listener: LedgerListener,
    ) -> LedgerWriter:
        """Create a ledger in one metadata command: its record, and the caller's ``updates`` under its ``requirements``.

        ``EpochIs`` and ``SessionAlive`` among the requirements also guard every later change of the record by this writer.
        Raises ``NotEnoughBookies``, ``Conflict``, ``StaleEpoch`` or ``Unavailable`` (nothing happened), ``OutcomeUnknown``
        (re-read the partition: the ledger may be in it, empty), ``LedgerFenced`` (it was created and taken over).
        """
        ledger_id = await self._ids.take()
        candidates = self._directory.candidates(ledger_id)
        ensemble = choose_ensemble(
            candidates, spec.ensemble_size, spec.write_quorum, spec.ack_quorum, self._random
        )  # fmt: skip
        self._spread.chosen(ensemble, candidates)
        ledger = Ledger(
            ledger_id=ledger_id, topic_id=spec.topic_id, partition=spec.partition, base_offset=spec.base_offset,
            leader_epoch=spec.leader_epoch, write_quorum=spec.write_quorum, ack_quorum=spec.ack_quorum,
            fragments=(Fragment(first_entry=0, bookies=ensemble),),
        )  # fmt: skip
        try:
            version = await self._puts.put(
                ledger, ABSENT, requirements=requirements, updates=updates(ledger),
                timeout_s=self._settings.confirm_deadline_ms / 1000,
            )  # fmt: skip
        except Superseded:
            raise LedgerFenced(f"ledger {ledger.ledger_id} was taken over right after its creation") from None
        return LedgerWriter(
            self._replication, ledger, version, listener, requirements,
            puts=self._puts, held=self._held, clock=self._clock,
        )  # fmt: skip

    async def recover(self, ledger_ids: Sequence[int], *, requirements: tuple[Requirement, ...] = ()) -> list[Ledger]:
        """Fence, recover and close ledgers whose writers are gone; returns CLOSED records in the order of ``ledger_ids``.

        Closed ledgers pass through. ``requirements`` guard every change of a record. If an ``EpochIs`` among them is of a
        ledger's own partition and above the ledger's epoch, one command less is needed; the ledger must then have been created
        under an ``EpochIs``, too. All ledgers are brought as far as possible before the first failure is raised:
        ``NoSuchLedger`` (also if bookies have deleted a ledger, because metadata is an older copy), ``StaleEpoch``,
        ``Unavailable`` (too few bookies answer), ``OutcomeUnknown``, ``Corrupt`` (bookies have lost confirmed entries).
        Repeating it is always safe. ``end_offset`` is taken from the last batch's header; without a batch it is the base
        offset.
        """
        return [recovered.ledger for recovered in await self.recover_reading(ledger_ids, requirements=requirements)]

    async def recover_reading(
        self, ledger_ids: Sequence[int], *, requirements: tuple[Requirement, ...] = (), may_be_deleted: bool = False
    ) -> list[Recovered]:
        """``recover``, and what it read of the ledgers: a takeover needs the same.

        With ``may_be_deleted``, a ledger that bookies have deleted is closed empty, whatever the others still have.
        """
        return await self._recoveries.recover(ledger_ids, requirements, may_be_deleted=may_be_deleted)

    async def read(self, ledger: Ledger, first: int, last: int, max_bytes: int) -> list[Entry]:
        """At least one entry: a contiguous run from ``first`` on, at most to ``last``.

        Payloads add up to at most ``max_bytes``, unless the first alone is larger. ``last`` must not exceed what the caller
        knows to be confirmed. Every entry has matched its CRC; a corrupt copy is skipped for another bookie's. Raises
        ``NoSuchEntry`` if all bookies of the first entry say so, else ``Unavailable``.
        """
        return await self._reads.entries(ledger, first, last, max_bytes)

    async def read_together(self, ledger: Ledger, first: int, last: int) -> list[Entry]:
        """``read`` of few and small entries for many ledgers: the reads of one event-loop turn are one request per bookie.

        Returns at least one entry. Entries that exceed the shared bound are requested again.
        """
        return await self._reads.together(ledger, first, last)

    async def read_headers(self, ledger: Ledger, first: int, last: int) -> list[EntryHead]:
        """Size and first 61 payload bytes of every entry from ``first`` to ``last``. Raises as ``read`` does."""
        return await self._reads.heads(ledger, first, last)

    async def read_lac(self, ledger: Ledger) -> int:
        """Last entry of a closed ledger; for an open one the LAC that its bookies know, which lags by the adds in flight."""
        return await self._reads.lac(ledger)

    async def await_lac(self, ledger: Ledger, above: int, max_wait_s: float) -> LacNews:
        """Wait until an open ledger's LAC is above ``above``, its writer has ended, or ``max_wait_s`` have passed.

        Each call asks one bookie, in rotation. A bookie that was replaced hears of nothing more, so read the ledger's record
        again before the next call. Raises ``Unavailable`` if no bookie of the last fragment answers.
        """
        return await self._reads.await_lac(ledger, above, max_wait_s)

    async def tails(self, ledger: Ledger) -> dict[str, LedgerTail | StratalogError]:
        """The ledger's tail on each bookie in its record, or the error of the request. Changes nothing, unlike recovery."""
        names = sorted({name for fragment in ledger.fragments for name in fragment.bookies})
        answers = await asyncio.gather(
            *(self._requests.lac(name, ledger.ledger_id) for name in names), return_exceptions=True
        )  # fmt: skip
        found: dict[str, LedgerTail | StratalogError] = {}
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, StratalogError):
                raise answer
            found[name] = answer
        return found

    async def refuse_deleted(self, ledger: Ledger) -> None:
        """Raise ``NoSuchLedger`` if a bookie in the ledger's record has deleted it, because metadata is an older copy."""
        tails = await self.tails(ledger)
        deleted = [name for name, tail in tails.items() if isinstance(tail, LedgerTail) and tail.deleted]
        if deleted:
            raise DeletedOnBookies(ledger.ledger_id, deleted)

    async def delete(self, ledger_ids: Sequence[int]) -> None:
        """Notify all bookies that these ledgers, whose records are removed from metadata, may be deleted.

        Only a hint: an unreachable bookie finds out when it next compares its ledgers with metadata.
        """
        if not ledger_ids:
            return
        requests = self._requests
        names = self._directory.registered()
        outcomes = await asyncio.gather(*(requests.delete(name, ledger_ids) for name in names), return_exceptions=True)
        for name, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                _log.info("bookie %s could not be notified of %d deleted ledgers: %s", name, len(ledger_ids), outcome)

    def _on_bookie_failed(self, bookie: str) -> None:
        for holder in list(self._busy):
            holder.on_bookie_failed(bookie)

    def _on_tick(self) -> None:
        self._tick = self._loop.call_later(self._settings.tick_ms / 1000, self._on_tick)
        self._sender.on_tick()
        lacs: dict[str, list[tuple[int, int]]] = {}
        for holder in list(self._busy):
            if isinstance(holder, LedgerWriter):
                _gather_lac(holder, lacs)
            if not holder.on_tick():
                self._busy.pop(holder, None)
        for bookie, pairs in lacs.items():
            # Best effort: it only saves work in recoveries and reads.
            self._requests.write_lacs(bookie, pairs).add_done_callback(_ignore_outcome)

    async def close(self) -> None:
        """Stop. Open ledgers stay open in metadata; the partition's next owner recovers them."""
        self._tick.cancel()
        self._sender.close()
        for holder in list(self._busy):
            if isinstance(holder, LedgerWriter):
                holder.abandon()
        self._busy.clear()
        self._directory.close()
        await self._puts.close()
        await self._recoveries.close()
        await self._ids.close()


def _gather_lac(writer: LedgerWriter, lacs: dict[str, list[tuple[int, int]]]) -> None:
    lac = writer.lac_to_send()
    if lac is not None:
        for bookie in writer.ledger.fragments[-1].bookies:
            lacs.setdefault(bookie, []).append((writer.ledger.ledger_id, lac))


def _ignore_outcome(future: asyncio.Future[bytes]) -> None:
    if not future.cancelled():
        future.exception()


class SpreadWatch:
    """Logs when new ensembles stop spanning hosts and racks, and when they do so again.

    Remembers the last report per ensemble size. A cluster on one host and in one rack reports nothing.
    """

    def __init__(self) -> None:
        self._short: dict[int, Spread] = {}

    def chosen(self, ensemble: Sequence[str], candidates: Iterable[Candidate]) -> None:
        """A ledger was placed on ``ensemble``."""
        known = list(candidates)
        size, spread = len(ensemble), spread_of(each for each in known if each.bookie_id in ensemble)
        there = spread_of(known)
        is_short = (there.hosts > 1 and spread.hosts < size) or (there.racks > 1 and spread.racks < size)
        before = self._short.get(size)
        if is_short and spread != before:
            self._short[size] = spread
            _log.warning(
                "new ensembles of %d bookies share failure domains (hosts: %d, racks: %d) until there are bookies on more hosts"
                " and racks; the auditor then moves copies apart", size, spread.hosts, spread.racks,
            )  # fmt: skip
        elif before is not None and not is_short:
            del self._short[size]
            _log.info("new ensembles of %d bookies no longer share failure domains", size)
