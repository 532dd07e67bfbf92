"""Recovers ledgers: fences them, copies what may have been confirmed, closes them. Many at once, batched by bookie.

Each ledger is a small state machine driven by answers. All of them advance in the same event-loop turns, so that their requests
are batched (``bookie_requests.py``) and their metadata commands shared. A slow bookie delays nothing once enough others have
answered.

If the partition's epoch shuts the old writer out, the record in the view is the last one that the writer made, and one command
closes the ledger. Otherwise the record is read from the quorum and set to IN_RECOVERY first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final, NamedTuple, TypeVar

import msgspec

from stratalog_bookies.client.bookie_requests import BookieRequests
from stratalog_bookies.client.core.entry import Entry, EntryHead
from stratalog_bookies.client.core.recovery import Fence, Instruction, LedgerRecovery, ReadRange, Rewrite
from stratalog_bookies.client.core.writer import LedgerWriterCore
from stratalog_bookies.client.entry_replicator import EntryReplicator
from stratalog_bookies.client.ledger_reads import HEAD_BYTES, LedgerReads
from stratalog_bookies.client.ledger_records import LedgerRecordPuts, LedgerRecordReads
from stratalog_bookies.client.replication import Replication
from stratalog_bookies.protocol.messages import LedgerTail, Range, RangeAnswer, Status
from stratalog_core.batches.batch import MAGIC, read_header
from stratalog_core.batches.checkpoint import is_checkpoint
from stratalog_core.errors import NoSuchLedger, StratalogError, Unavailable
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import (
    LEDGER_IDS,
    UNKNOWN_UNDECIDED,
    Bookie,
    Counter,
    Ledger,
    LedgerState,
    Partition,
    Versioned,
    counter_key,
    ledger_key,
    partition_key,
)
from stratalog_metadata.state.commands import EpochIs, Requirement
from stratalog_metadata.state.guarded_update import Superseded

Answer = TypeVar("Answer")
_HEADS_AT_ONCE: Final = 64
"""Heads requested at a time when searching the last batch."""
KEPT_HEADS_MAX: Final = 128
"""Above this many entries only sizes are read: a thousand ledgers may be recovered at once."""
SIZES_AT_ONCE: Final = 4096
"""Sizes of entries that are read at a time, about 600 KB as objects."""
SIZE_READS_AT_ONCE: Final = 16
"""Reads of sizes in progress, however many ledgers are recovered at once."""
KEPT_BYTES_MAX: Final = 16 * 1024
"""Ledgers up to this size are read whole, not only at their end."""


class Recovered(NamedTuple):
    """A closed ledger, and what recovery read of it: the heads of all entries or of none, and likewise the entries.

    The entries are views of the answer: do not keep them.
    """

    ledger: Ledger
    heads: list[EntryHead]
    entries: list[Entry]


class _Rewriter(EntryReplicator):
    """Copies recovered entries to their whole write set. Ensemble changes stay in its record until the ledger is closed."""

    def __init__(self, replication: Replication, ledger: Ledger, first_entry: int, on_progress: Callable[[], None]) -> None:
        super().__init__(replication, LedgerWriterCore(ledger, sink=self, first_entry=first_entry, recovering=True))
        self._on_progress = on_progress

    @property
    def core(self) -> LedgerWriterCore:
        return self._core

    def rewrite(self, found: Rewrite) -> None:
        assert found.entry_id == self._core.next_entry_id, "entries are recovered in order"
        self._send(self._core.append_recovered(found.header, found.payload))

    def deliver(self) -> None:
        super().deliver()
        self._on_progress()

    async def _commit(self, proposed: Ledger) -> None:
        pass

    def end(self) -> None:
        """Stop. Unconfirmed entries are let go, which nothing else would do: the next recovery reads them again."""
        self._end()
        if self._core.unconfirmed or self._core.is_changing:
            self._core.fail_outcome_unknown("its recovery was stopped")


class DeletedOnBookies(NoSuchLedger):
    """Bookies have deleted the ledger. They do so only if its record was removed, so what others still have is not needed."""

    def __init__(self, ledger_id: int, bookies: Iterable[str]) -> None:
        where = ", ".join(sorted(bookies))
        super().__init__(f"ledger {ledger_id} was deleted on {where}, and metadata has it: it was restored from an older copy")


class _OpenRecovery:
    """One ledger from IN_RECOVERY to the decision where it ends, with everything up to there copied."""

    def __init__(self, replication: Replication, requests: BookieRequests, ledger: Ledger, strays: Collection[str]) -> None:
        self._replication = replication
        self._requests = requests
        self._ledger = ledger
        self._protocol = LedgerRecovery(ledger, strays)
        self._rewriter: _Rewriter | None = None
        self._loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self._timer = self._loop.call_later(replication.settings.recovery_retry_ms / 1000, self._retry)
        self._carry_out(self._protocol.start())

    def result(self) -> Ledger:
        """The record with the last entry and the fragments made by the rewrite; not closed yet."""
        assert self._protocol.end is not None
        ledger = self._rewriter.core.ledger if self._rewriter is not None else self._ledger
        return msgspec.structs.replace(ledger, last_entry=self._protocol.end)

    def _retry(self) -> None:
        self._timer = self._loop.call_later(self._replication.settings.recovery_retry_ms / 1000, self._retry)
        self._carry_out(self._protocol.retry())

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Fence(bookie=bookie):
                    fenced = self._requests.fence(bookie, self._ledger.ledger_id)
                    fenced.add_done_callback(partial(self._handle, self._on_fenced, bookie))
                case ReadRange(bookie=bookie, first=first, last=last):
                    read = self._requests.recovery_read(bookie, Range(self._ledger.ledger_id, first, last))
                    read.add_done_callback(partial(self._handle, self._on_read, bookie))
                case Rewrite():
                    self._rewrite(instruction)
        self._check_finished()

    def _handle(
        self,
        event: Callable[[str, asyncio.Future[Answer]], list[Instruction]],
        bookie: str,
        future: asyncio.Future[Answer],
    ) -> None:
        """A request was answered or definitely will not be."""
        if self.finished.done():
            if not future.cancelled():
                future.exception()
            return
        try:
            self._carry_out(event(bookie, future))
        except StratalogError as lost_data:
            self.finished.set_exception(lost_data)

    def _on_fenced(self, bookie: str, future: asyncio.Future[LedgerTail]) -> list[Instruction]:
        tail = future.result() if not future.cancelled() and future.exception() is None else None
        if tail is not None and tail.status == Status.OK:
            return self._protocol.on_fenced(bookie, tail.last_entry, tail.lac)
        if tail is not None and tail.deleted:
            raise DeletedOnBookies(self._ledger.ledger_id, [bookie])
        return self._protocol.on_fence_failed(bookie)

    def _on_read(self, bookie: str, future: asyncio.Future[RangeAnswer]) -> list[Instruction]:
        if future.cancelled() or future.exception() is not None:
            return self._protocol.on_read_failed(bookie)
        return self._protocol.on_read(bookie, future.result())

    def _rewrite(self, found: Rewrite) -> None:
        if self._rewriter is None:
            first = self._protocol.first_rewritten
            self._rewriter = _Rewriter(self._replication, self._ledger, first, self._check_finished)
        self._rewriter.rewrite(found)

    def _check_finished(self) -> None:
        rewriter = self._rewriter
        if self.finished.done():
            return
        is_done = self._protocol.end is not None and (rewriter is None or rewriter.core.lac >= self._protocol.end)
        if is_done and rewriter is not None:
            rewriter.check_state()
        if rewriter is not None and rewriter.core.error is not None:
            self.finished.set_exception(rewriter.core.error)
        elif is_done:
            self.finished.set_result(None)
            self._timer.cancel()

    def stop(self) -> None:
        self._timer.cancel()
        self.finished.cancel()
        if self._rewriter is not None:
            self._rewriter.end()


class LedgerRecoveries:
    """Recovers ledgers. A recovery may be repeated, and several may run at once."""

    def __init__(
        self,
        replication: Replication,
        requests: BookieRequests,
        reads: LedgerReads,
        puts: LedgerRecordPuts,
        metadata: MetadataClient,
        clock: Clock,
    ) -> None:
        self._replication = replication
        self._requests = requests
        self._reads = reads
        self._puts = puts
        self._view = metadata.view
        self._clock = clock
        self._records = LedgerRecordReads(metadata)
        self._size_slots = asyncio.Semaphore(SIZE_READS_AT_ONCE)
        self._stray_slot = asyncio.Semaphore(1)

    async def close(self) -> None:
        await self._records.close()

    async def recover(
        self, ledger_ids: Sequence[int], requirements: tuple[Requirement, ...], *, may_be_deleted: bool
    ) -> list[Recovered]:
        """The outcome of each of ``ledger_ids``, in order; see ``LedgerClient.recover_reading``."""
        recover = partial(self._recover_in_time, requirements=requirements, may_be_deleted=may_be_deleted)
        if len(ledger_ids) == 1:
            return [await recover(ledger_ids[0])]
        outcomes = await asyncio.gather(*(recover(ledger_id) for ledger_id in ledger_ids), return_exceptions=True)
        recovered: list[Recovered] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            recovered.append(outcome)
        return recovered

    async def _recover_in_time(
        self, ledger_id: int, *, requirements: tuple[Requirement, ...], may_be_deleted: bool
    ) -> Recovered:
        deadline_s = self._replication.settings.recovery_deadline_ms / 1000
        try:
            async with asyncio.timeout(deadline_s):
                return await self._recover(ledger_id, requirements, may_be_deleted=may_be_deleted)
        except TimeoutError:
            raise Unavailable(
                f"ledger {ledger_id} could not be recovered in {deadline_s:g} s: too few of its bookies answer, or there is no"
                " quorum of metadata nodes; try again"
            ) from None

    async def _recover(self, ledger_id: int, requirements: tuple[Requirement, ...], *, may_be_deleted: bool) -> Recovered:
        found = self._view.get(ledger_key(ledger_id))
        if found is None or not self._is_shut_out(found, requirements):
            (found,) = await self._records.read((ledger_id,))
        while True:
            if found is None:
                raise NoSuchLedger(f"ledger {ledger_id} does not exist in metadata")
            ledger = found.record
            assert isinstance(ledger, Ledger)
            if ledger.state is LedgerState.CLOSED:
                return Recovered(ledger, [], [])
            try:
                return await self._recover_open(found, ledger, requirements, may_be_deleted=may_be_deleted)
            except Superseded as other:
                # Another recovery was first, or the writer changed its ensemble just before: start again from its record.
                found = other.found

    def _is_shut_out(self, found: Versioned, requirements: tuple[Requirement, ...]) -> bool:
        """Whether the writer can no longer change the ledger's record, and ``found`` is at least as new as its last change.

        Each command of a writer requires the epoch under which it created the ledger. The view is a state of the whole metadata
        log, so a record seen beside a higher epoch is what that writer left.
        """
        ledger = found.record
        if not isinstance(ledger, Ledger):
            return False
        key = partition_key(ledger.topic_id, ledger.partition)
        for each in requirements:
            if isinstance(each, EpochIs) and each.key == key and each.leader_epoch > ledger.leader_epoch:
                partition = self._view.find(Partition, key)
                return partition is not None and partition.leader_epoch >= each.leader_epoch
        return False

    async def _recover_open(
        self, found: Versioned, ledger: Ledger, requirements: tuple[Requirement, ...], *, may_be_deleted: bool
    ) -> Recovered:
        version, timeout_s = found.version, self._replication.settings.recovery_deadline_ms / 1000
        if ledger.state is LedgerState.OPEN:
            ledger = msgspec.structs.replace(ledger, state=LedgerState.IN_RECOVERY)
            if not self._is_shut_out(found, requirements):
                version = await self._puts.put(ledger, version, requirements=requirements, timeout_s=timeout_s)
        try:
            recovered = await self._recovered(ledger)
        except DeletedOnBookies:
            if not may_be_deleted:
                raise
            recovered = await self._closed(_emptied(ledger))
        await self._puts.put(recovered.ledger, version, requirements=requirements, timeout_s=timeout_s)
        return recovered

    async def _recovered(self, ledger: Ledger) -> Recovered:
        """The ledger with its end, not closed in metadata yet. Raises ``DeletedOnBookies``."""
        strays = await self._strays(ledger)
        # All entries that are written again are in memory at once.
        async with self._stray_slot if strays else nullcontext():
            run = _OpenRecovery(self._replication, self._requests, ledger, strays)
            try:
                await run.finished
                return await self._closed(run.result())
            finally:
                run.stop()

    async def _strays(self, ledger: Ledger) -> list[str]:
        """The bookies that have entries of the last fragment or beyond, although the ledger's record does not name them for it.

        There are some only if metadata was restored from a copy that is older than the ledger's last change of bookies. Raises
        ``DeletedOnBookies`` if a bookie has deleted the ledger since, and what a request to a live bookie raises.
        """
        counter, last = self._view.find(Counter, counter_key(LEDGER_IDS)), ledger.fragments[-1]
        if counter is None or ledger.ledger_id >= counter.lost_below:
            return []
        live = [each.bookie_id for each in self._view.all(Bookie) if each.session_id]
        tails = dict(
            zip(live, await asyncio.gather(*(self._requests.lac(name, ledger.ledger_id) for name in live)), strict=True)
        )
        deleted = [name for name, tail in tails.items() if tail.deleted]
        if deleted:
            raise DeletedOnBookies(ledger.ledger_id, deleted)
        return [name for name, tail in tails.items() if name not in last.bookies and tail.last_entry >= last.first_entry]

    async def _closed(self, ledger: Ledger) -> Recovered:
        """The record to close with: its size, and the offset after its last record, read from its entries."""
        if ledger.last_entry < 0:
            return Recovered(self._closed_at(ledger, 0, ledger.base_offset), [], [])
        heads: list[EntryHead] = []
        if ledger.last_entry < KEPT_HEADS_MAX:
            heads = await self._reads.heads(ledger, 0, ledger.last_entry)
            payload_bytes = sum(head.payload_bytes for head in heads)
        else:
            payload_bytes = await self._payload_bytes(ledger)
        is_small = bool(heads) and payload_bytes <= KEPT_BYTES_MAX
        entries = await self._reads.together(ledger, 0 if is_small else ledger.last_entry, ledger.last_entry)
        end_offset = await self._end_offset(ledger, entries)
        is_whole = is_small and len(entries) == len(heads)
        return Recovered(self._closed_at(ledger, payload_bytes, end_offset), heads, entries if is_whole else [])

    async def _payload_bytes(self, ledger: Ledger) -> int:
        total = 0
        for first in range(0, ledger.last_entry + 1, SIZES_AT_ONCE):
            last = min(first + SIZES_AT_ONCE - 1, ledger.last_entry)
            async with self._size_slots:
                total += sum(head.payload_bytes for head in await self._reads.heads(ledger, first, last, head_bytes=0))
        return total

    def _closed_at(self, ledger: Ledger, payload_bytes: int, end_offset: int) -> Ledger:
        return msgspec.structs.replace(
            ledger, state=LedgerState.CLOSED, payload_bytes=payload_bytes, end_offset=end_offset,
            closed_at_ms=self._clock.wall_ms(), undecided_from=UNKNOWN_UNDECIDED,
        )  # fmt: skip

    async def _end_offset(self, ledger: Ledger, entries: list[Entry]) -> int:
        """The offset after the last record batch. Checkpoint parts at the start of a ledger are not batches.

        ``entries`` have been read already; the answer may have been cut short before the last. The batch is read whole, because
        the result is permanent and a head alone has no checksum.
        """
        last, read = ledger.last_entry, {entry.entry_id: entry for entry in entries}
        while last >= 0:
            entry = read[last] if last in read else (await self._reads.together(ledger, last, last))[0]
            if _is_batch(entry.payload):
                return read_header(entry.payload).next_offset
            last = await self._last_of_another_kind(ledger, last - 1)
        return ledger.base_offset

    async def _last_of_another_kind(self, ledger: Ledger, last: int) -> int:
        """The last entry up to ``last`` whose head is not that of a checkpoint part; -1 if there is none."""
        while last >= 0:
            first = max(last - _HEADS_AT_ONCE + 1, 0)
            for head in reversed(await self._reads.heads(ledger, first, last)):
                if not is_checkpoint(head.head):
                    return head.entry_id
            last = first - 1
        return -1


def _emptied(ledger: Ledger) -> Ledger:
    fragments = tuple(each for each in ledger.fragments if not each.first_entry)
    return msgspec.structs.replace(ledger, last_entry=-1, fragments=fragments)


def _is_batch(payload: memoryview) -> bool:
    return len(payload) >= HEAD_BYTES and not is_checkpoint(payload) and read_header(payload).magic == MAGIC
