"""The order in which a coordinator's records reach the log."""

from __future__ import annotations

import asyncio

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.record_writer import RecordWriter, TransactionalProducer
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_core.batches.records import iterate_records
from stratalog_core.system import SystemClock


async def test_records_of_a_transaction_follow_those_that_were_queued_before_them() -> None:
    keys: list[bytes | None] = []

    async def append(batch: bytearray) -> int:
        keys.extend(record.key for record in iterate_records(memoryview(batch)))
        return 0

    writer = RecordWriter(append, SystemClock())
    queued: asyncio.Future[ErrorCode] = asyncio.get_running_loop().create_future()
    writer.write([CoordinatorRecord(b"removal", None)], queued.set_result)
    commit = [CoordinatorRecord(b"commit", b"1")]
    assert await writer.written_in_transaction(commit, TransactionalProducer(1, 0), lambda: None) is ErrorCode.none
    assert await queued is ErrorCode.none
    assert keys == [b"removal", b"commit"]
