"""Writes a coordinator's records: those of one event loop iteration as one batch, with several batches in flight.

Records reach the log in the order in which they were passed to the writer.
Failures are reported as error codes, not exceptions, because one failed append is reported to many waiting clients.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode

from stratalog_bookies.client.ledger_writer import ENTRY_BYTES_MAX
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core import errors
from stratalog_core.batches.batch import TRANSACTIONAL_BIT
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.ports import Clock

BATCH_BYTES_MAX: Final = 64 * 1024  # about a thousand offsets; a larger batch would block the event loop
WAITING_BYTES_MAX: Final = 32 * 1024 * 1024
Append = Callable[[bytearray], Awaitable[int]]
"""Appends a batch to the log before it returns; the result is awaited."""


class TransactionalProducer(NamedTuple):
    """The producer whose transaction a batch belongs to."""

    producer_id: int
    epoch: int


Written = Callable[[ErrorCode], None]


def coordinator_error_of(error: errors.StratalogError) -> ErrorCode:
    """Return the code for a failed write: NOT_COORDINATOR if ownership was lost, else COORDINATOR_NOT_AVAILABLE."""
    if isinstance(error, errors.NotLeader | errors.Fenced):
        return ErrorCode.not_coordinator
    return ErrorCode.coordinator_not_available


class _Batch:
    """Writes that become one batch."""

    __slots__ = ("size_bytes", "writes")

    def __init__(self) -> None:
        self.writes: list[tuple[Sequence[CoordinatorRecord], Written]] = []
        self.size_bytes = 0


class RecordWriter:
    """A queue of records for one partition. ``append`` is done when the partition's application has applied the batch."""

    def __init__(self, append: Append, clock: Clock) -> None:
        self._append = append
        self._clock = clock
        self._queue: deque[_Batch] = deque()
        """Batches that are not appended yet."""
        self._waiting_bytes = 0
        self._appends: set[asyncio.Future[int]] = set()

    def write(self, records: Sequence[CoordinatorRecord], written: Written) -> None:
        """Queue records; ``written`` is called later, once, with ``none`` when the ack quorum has them and they are applied.

        It is called with COORDINATOR_NOT_AVAILABLE if more than ``WAITING_BYTES_MAX`` would be waiting, and with
        MESSAGE_TOO_LARGE if the records do not fit into one entry of a ledger.
        """
        if not records:
            asyncio.get_running_loop().call_soon(written, ErrorCode.none)
            return
        size_bytes = sum(record.size_bytes for record in records)
        if self._waiting_bytes + size_bytes > WAITING_BYTES_MAX:
            asyncio.get_running_loop().call_soon(written, _refusal(size_bytes))
            return
        if not self._queue:
            asyncio.get_running_loop().call_soon(self._append_next)
        if not self._queue or self._queue[-1].size_bytes + size_bytes > BATCH_BYTES_MAX:
            self._queue.append(_Batch())
        batch = self._queue[-1]
        batch.writes.append((records, written))
        batch.size_bytes += size_bytes
        self._waiting_bytes += size_bytes

    async def written(self, records: Sequence[CoordinatorRecord]) -> ErrorCode:
        """Write records like ``write`` and return the code with which they finished."""
        done: asyncio.Future[ErrorCode] = asyncio.get_running_loop().create_future()
        self.write(records, lambda error: None if done.done() else done.set_result(error))
        return await done

    async def written_in_transaction(
        self, records: Sequence[CoordinatorRecord], producer: TransactionalProducer, check: Callable[[], None]
    ) -> ErrorCode:
        """Write records as one batch of a producer's transaction; return the code with which that finished.

        ``check`` is called immediately before the append, with nothing in between; what it raises prevents the append.
        """
        size_bytes = sum(record.size_bytes for record in records)
        if self._waiting_bytes + size_bytes > WAITING_BYTES_MAX:
            return _refusal(size_bytes)
        while self._queue:
            self._append_first()
        self._waiting_bytes += size_bytes
        try:
            check()
            await self._append(self._built(records, producer))
        except errors.StratalogError as failure:
            return coordinator_error_of(failure)
        except KafkaError as refused:
            return refused.code
        finally:
            self._waiting_bytes -= size_bytes
        return ErrorCode.none

    def _append_next(self) -> None:
        """Append the first batch of the queue, and the others in later iterations of the event loop."""
        if len(self._queue) > 1:
            asyncio.get_running_loop().call_soon(self._append_next)
        if self._queue:
            self._append_first()

    def _append_first(self) -> None:
        batch = self._queue.popleft()
        appended = self._appended([record for records, _ in batch.writes for record in records])
        self._appends.add(appended)
        appended.add_done_callback(partial(self._report, batch))

    def _appended(self, records: Sequence[CoordinatorRecord]) -> asyncio.Future[int]:
        try:
            return asyncio.ensure_future(self._append(self._built(records)))
        except (errors.StratalogError, KafkaError) as failure:
            failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            failed.set_exception(failure)
            return failed

    def _report(self, batch: _Batch, appended: asyncio.Future[int]) -> None:
        """Report the outcome of an append to those who have written the batch."""
        self._appends.discard(appended)
        self._waiting_bytes -= batch.size_bytes
        if appended.cancelled():
            return
        error = ErrorCode.none
        match appended.exception():
            case None:
                pass
            case errors.StratalogError() as failure:
                error = coordinator_error_of(failure)
            case KafkaError() as refused:
                error = refused.code
            case bug:
                raise bug
        for _, written in batch.writes:
            written(error)

    def _built(self, records: Sequence[CoordinatorRecord], producer: TransactionalProducer | None = None) -> bytearray:
        now_ms = self._clock.wall_ms()
        of_transaction: dict[str, int] = {}
        if producer is not None:
            producer_id, epoch = producer
            of_transaction = {"attributes": TRANSACTIONAL_BIT, "producer_id": producer_id, "producer_epoch": epoch}
        batch = build_batch(
            [
                Record(offset=offset, timestamp_ms=now_ms, key=record.key, value=record.value, headers=record.headers)
                for offset, record in enumerate(records)
            ],
            **of_transaction,
        )
        if len(batch) > ENTRY_BYTES_MAX:
            # Queued for the next ledger, it would cost this broker the partition. It is one write: large ones are not joined.
            raise KafkaError(ErrorCode.message_too_large)
        return batch


def _refusal(size_bytes: int) -> ErrorCode:
    """Return the code for records that are not queued: there may be room for them later, unless they are too large."""
    return ErrorCode.message_too_large if size_bytes > ENTRY_BYTES_MAX else ErrorCode.coordinator_not_available
