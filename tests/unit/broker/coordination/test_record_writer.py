"""The order in which a coordinator's records reach the log."""

from __future__ import annotations

import asyncio

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.record_writer import BATCH_BYTES_MAX, RecordWriter, TransactionalProducer
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core.batches.records import iterate_records
from stratalog_core.errors import NotLeader
from stratalog_core.system import SystemClock

PRODUCER = TransactionalProducer(1, 0)


class Log:
    """Appends at once, and confirms the batches when it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[bytes | None]] = []
        self.confirmed = asyncio.get_running_loop().create_future()
        self.is_lost = False

    def append(self, batch: bytearray) -> asyncio.Future[int]:
        if self.is_lost:
            raise NotLeader("lost")
        self.batches.append([record.key for record in iterate_records(memoryview(batch))])
        return self.confirmed


def record(key: bytes, value_bytes: int = 1) -> CoordinatorRecord:
    return CoordinatorRecord(key, bytes(value_bytes))


async def test_records_of_a_transaction_follow_those_that_were_queued_before_them() -> None:
    log = Log()
    writer = RecordWriter(log.append, SystemClock())
    reported: list[tuple[bytes, ErrorCode]] = []
    for key in (b"a", b"b", b"c"):
        writer.write([record(key, BATCH_BYTES_MAX)], lambda code, key=key: reported.append((key, code)))  # type: ignore[misc]
    checked: list[int] = []
    commit = asyncio.ensure_future(
        writer.written_in_transaction([record(b"commit")], PRODUCER, lambda: checked.append(len(log.batches)))
    )
    await asyncio.sleep(0)
    writer.write([record(b"later")], lambda code: reported.append((b"later", code)))
    await asyncio.sleep(0)
    assert log.batches == [[b"a"], [b"b"], [b"c"], [b"commit"], [b"later"]]
    assert checked == [3], "nothing comes between the check and the append"
    assert (reported, commit.done()) == ([], False), "they are in flight"
    log.confirmed.set_result(0)
    assert await commit is ErrorCode.none
    assert reported == [(key, ErrorCode.none) for key in (b"a", b"b", b"c", b"later")]


async def test_batches_are_appended_one_by_one_so_that_the_event_loop_runs_between_them() -> None:
    log = Log()
    writer = RecordWriter(log.append, SystemClock())
    for key in (b"a", b"b"):
        writer.write([record(key, BATCH_BYTES_MAX)], lambda _: None)
    await asyncio.sleep(0)
    assert log.batches == [[b"a"]]
    await asyncio.sleep(0)
    assert log.batches == [[b"a"], [b"b"]]


async def test_a_failed_append_is_reported() -> None:
    log = Log()
    writer = RecordWriter(log.append, SystemClock())
    log.is_lost = True
    assert await writer.written([record(b"a")]) is ErrorCode.not_coordinator
    assert await writer.written_in_transaction([record(b"a")], PRODUCER, lambda: None) is ErrorCode.not_coordinator

    def refuse() -> None:
        raise KafkaError(ErrorCode.invalid_txn_state)

    assert await writer.written_in_transaction([record(b"a")], PRODUCER, refuse) is ErrorCode.invalid_txn_state
    assert writer._waiting_bytes == 0
