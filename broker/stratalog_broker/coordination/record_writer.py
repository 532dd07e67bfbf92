"""Writes a coordinator's records: those of one event loop iteration as one batch, with several batches in flight.

Failures are reported as error codes, not exceptions, because one failed append is reported to many waiting clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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


class RecordWriter:
    """A queue of records for one partition. ``append`` returns after the partition's application has applied the batch."""

    def __init__(self, append: Append, clock: Clock) -> None:
        self._append = append
        self._clock = clock
        self._queue: list[tuple[Sequence[CoordinatorRecord], Written]] = []
        self._queued_bytes = 0
        self._waiting_bytes = 0
        self._appends: set[asyncio.Task[None]] = set()

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
            asyncio.get_running_loop().call_soon(self._flush)
        elif self._queued_bytes + size_bytes > BATCH_BYTES_MAX:
            self._flush()
            asyncio.get_running_loop().call_soon(self._flush)
        self._queue.append((records, written))
        self._queued_bytes += size_bytes
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
        self._flush()
        self._waiting_bytes += size_bytes
        try:
            await asyncio.sleep(0)  # tasks run in the order of their start: what was queued before is appended first
            check()
            await self._append(self._batch(records, producer))
        except errors.StratalogError as failure:
            return coordinator_error_of(failure)
        except KafkaError as refused:
            return refused.code
        finally:
            self._waiting_bytes -= size_bytes
        return ErrorCode.none

    def _flush(self) -> None:
        if not self._queue:
            return
        queue, size_bytes = self._queue, self._queued_bytes
        self._queue, self._queued_bytes = [], 0
        task = asyncio.get_running_loop().create_task(self._append_all(queue, size_bytes))
        self._appends.add(task)
        task.add_done_callback(self._appends.discard)

    async def _append_all(self, queue: list[tuple[Sequence[CoordinatorRecord], Written]], size_bytes: int) -> None:
        error = ErrorCode.none
        try:
            await self._append(self._batch([record for records, _ in queue for record in records]))
        except errors.StratalogError as failure:
            error = coordinator_error_of(failure)
        except KafkaError as refused:
            error = refused.code
        finally:
            self._waiting_bytes -= size_bytes
        for _, written in queue:
            written(error)

    def _batch(self, records: Sequence[CoordinatorRecord], producer: TransactionalProducer | None = None) -> bytearray:
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
