"""Recovering ledgers: fence, copy what may have been confirmed, close. Many at once, batched by bookie.

Each ledger is a small state machine driven by answers; all of them advance in the same turns of the event loop, so that
their requests leave together (``requests.py``) and their metadata commands commit together. Nothing waits for a slow bookie
once enough others have answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec

from stratalog_bookies.client.entry_pump import EntryPump
from stratalog_bookies.client.ledger_reads import HEAD_BYTES, LedgerReads
from stratalog_bookies.client.ledger_records import Superseded, put_ledger
from stratalog_bookies.client.record_reads import RecordReads
from stratalog_bookies.client.recovery import Fence, Instruction, LedgerRecovery, ReadRange, Rewrite
from stratalog_bookies.client.services import Services
from stratalog_bookies.client.writer import LedgerWriterCore
from stratalog_bookies.messages import LedgerTail, Range, RangeAnswer, Status
from stratalog_core.batch import MAGIC, read_header
from stratalog_core.checkpoint import is_checkpoint
from stratalog_core.errors import NoSuchLedger, StratalogError, Unavailable
from stratalog_metadata.commands import Requirement
from stratalog_metadata.records import Ledger, LedgerState, Versioned

Answer = TypeVar("Answer")
_HEADS_AT_ONCE: Final = 64
"""Heads asked for at a time, of entries behind the last batch."""


class _Rewriter(EntryPump):
    """Copies recovered entries to their whole write set; ensemble changes stay in its record until the close."""

    def __init__(self, services: Services, ledger: Ledger, first_entry: int, on_progress: Callable[[], None]) -> None:
        super().__init__(services, LedgerWriterCore(ledger, sink=self, first_entry=first_entry, recovering=True))
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
        self._end()


class _Run:
    """One ledger from IN_RECOVERY to the decision where it ends, with everything up to there copied."""

    def __init__(self, services: Services, ledger: Ledger) -> None:
        self._services = services
        self._ledger = ledger
        self._protocol = LedgerRecovery(ledger)
        self._rewriter: _Rewriter | None = None
        self._loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self._timer = self._loop.call_later(services.settings.recovery_retry_ms / 1000, self._retry)
        self._carry_out(self._protocol.start())

    def result(self) -> Ledger:
        """The record with the fragments that rewriting made and the last entry; not closed yet."""
        assert self._protocol.end is not None
        ledger = self._rewriter.core.ledger if self._rewriter is not None else self._ledger
        return msgspec.structs.replace(ledger, last_entry=self._protocol.end)

    def _retry(self) -> None:
        self._timer = self._loop.call_later(self._services.settings.recovery_retry_ms / 1000, self._retry)
        self._carry_out(self._protocol.retry())

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Fence(bookie=bookie):
                    fenced = self._services.requests.fence(bookie, self._ledger.ledger_id)
                    fenced.add_done_callback(partial(self._handle, self._on_fenced, bookie))
                case ReadRange(bookie=bookie, first=first, last=last):
                    read = self._services.requests.recovery_read(bookie, Range(self._ledger.ledger_id, first, last))
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
        """An answer came, or surely will not."""
        if self.finished.done():
            if not future.cancelled():
                future.exception()
            return
        try:
            self._carry_out(event(bookie, future))
        except StratalogError as lost_data:
            self.finished.set_exception(lost_data)

    def _on_fenced(self, bookie: str, future: asyncio.Future[LedgerTail]) -> list[Instruction]:
        if future.cancelled() or future.exception() is not None or future.result().status != Status.OK:
            return self._protocol.on_fence_failed(bookie)
        tail = future.result()
        return self._protocol.on_fenced(bookie, tail.last_entry, tail.lac)

    def _on_read(self, bookie: str, future: asyncio.Future[RangeAnswer]) -> list[Instruction]:
        if future.cancelled() or future.exception() is not None:
            return self._protocol.on_read_failed(bookie)
        return self._protocol.on_read(bookie, future.result())

    def _rewrite(self, found: Rewrite) -> None:
        if self._rewriter is None:
            first = self._protocol.first_rewritten
            self._rewriter = _Rewriter(self._services, self._ledger, first, self._check_finished)
        self._rewriter.rewrite(found)

    def _check_finished(self) -> None:
        rewriter = self._rewriter
        if self.finished.done():
            return
        if rewriter is not None and rewriter.core.error is not None:
            self.finished.set_exception(rewriter.core.error)
        elif self._protocol.end is not None and (rewriter is None or rewriter.core.lac >= self._protocol.end):
            self.finished.set_result(None)
            self._timer.cancel()

    def stop(self) -> None:
        self._timer.cancel()
        self.finished.cancel()
        if self._rewriter is not None:
            self._rewriter.end()


class LedgerRecoveries:
    """Recovers ledgers; may be repeated, and run by several at once, at any point."""

    def __init__(self, services: Services, reads: LedgerReads) -> None:
        self._services = services
        self._reads = reads
        self._records = RecordReads(services.metadata)

    async def close(self) -> None:
        await self._records.close()

    async def recover(self, ledger_ids: Sequence[int], requirements: tuple[Requirement, ...]) -> list[Ledger]:
        """CLOSED records in the order of ``ledger_ids``; see ``LedgerClient.recover``."""
        if not ledger_ids:
            return []
        found = await self._records.read(ledger_ids)
        outcomes = await asyncio.gather(
            *(
                self._recover_in_time(ledger_id, versioned, requirements)
                for ledger_id, versioned in zip(ledger_ids, found, strict=True)
            ),
            return_exceptions=True,
        )
        ledgers: list[Ledger] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            ledgers.append(outcome)
        return ledgers

    async def _recover_in_time(self, ledger_id: int, found: Versioned | None, requirements: tuple[Requirement, ...]) -> Ledger:
        deadline_s = self._services.settings.recovery_deadline_ms / 1000
        try:
            async with asyncio.timeout(deadline_s):
                return await self._recover(ledger_id, found, requirements)
        except TimeoutError:
            raise Unavailable(
                f"ledger {ledger_id} could not be recovered in {deadline_s:g} s: too few of its bookies answer, or no quorum of"
                " metadata nodes; try again"
            ) from None

    async def _recover(self, ledger_id: int, found: Versioned | None, requirements: tuple[Requirement, ...]) -> Ledger:
        while True:
            if found is None:
                raise NoSuchLedger(f"ledger {ledger_id} is not in the metadata")
            ledger = found.record
            assert isinstance(ledger, Ledger)
            if ledger.state is LedgerState.CLOSED:
                return ledger
            try:
                return await self._recover_open(ledger, found.version, requirements)
            except Superseded as other:
                # Another recovery got ahead, or the writer changed its ensemble a moment before: begin again from there.
                found = other.found

    async def _recover_open(self, ledger: Ledger, version: int, requirements: tuple[Requirement, ...]) -> Ledger:
        if ledger.state is LedgerState.OPEN:
            ledger = msgspec.structs.replace(ledger, state=LedgerState.IN_RECOVERY)
            version = await self._put(ledger, version, requirements)
        run = _Run(self._services, ledger)
        try:
            await run.finished
            closed = await self._closed(run.result())
        finally:
            run.stop()
        await self._put(closed, version, requirements)
        return closed

    async def _put(self, ledger: Ledger, version: int, requirements: tuple[Requirement, ...]) -> int:
        services = self._services
        timeout_s = services.settings.recovery_deadline_ms / 1000
        return await put_ledger(
            services.metadata, services.clock, ledger, version, requirements=requirements, timeout_s=timeout_s
        )  # fmt: skip

    async def _closed(self, ledger: Ledger) -> Ledger:
        """The record to close with: its size, and the offset after its last record, read from the entries' heads."""
        payload_bytes, end_offset = 0, ledger.base_offset
        if ledger.last_entry >= 0:
            sizes, end_offset = await asyncio.gather(
                self._reads.heads(ledger, 0, ledger.last_entry, head_bytes=0), self._end_offset(ledger)
            )
            payload_bytes = sum(head.payload_bytes for head in sizes)
        return msgspec.structs.replace(
            ledger, state=LedgerState.CLOSED, payload_bytes=payload_bytes, end_offset=end_offset,
            closed_at_ms=self._services.clock.wall_ms(),
        )  # fmt: skip

    async def _end_offset(self, ledger: Ledger) -> int:
        """The next offset of the last record batch. Checkpoint parts, which stand at the ledger's begin, are no batches.

        The batch is read whole, because what is decided here stays for ever and a head alone has no checksum.
        """
        last = ledger.last_entry
        while last >= 0:
            (entry,) = await self._reads.together(ledger, last, last)
            if _is_batch(entry.payload):
                return read_header(entry.payload).next_offset
            last = await self._last_of_another_kind(ledger, last - 1)
        return ledger.base_offset

    async def _last_of_another_kind(self, ledger: Ledger, last: int) -> int:
        """The last entry up to ``last`` that, by its head, is no checkpoint part; -1 if there is none."""
        while last >= 0:
            first = max(last - _HEADS_AT_ONCE + 1, 0)
            for head in reversed(await self._reads.heads(ledger, first, last)):
                if not is_checkpoint(head.head):
                    return head.entry_id
            last = first - 1
        return -1


def _is_batch(payload: memoryview) -> bool:
    return len(payload) >= HEAD_BYTES and not is_checkpoint(payload) and read_header(payload).magic == MAGIC
