"""Sends the rows of a task exactly once: its rows and its marker are committed in one transaction. Independent of Spark.

A *unit* is the part of a batch that one task writes. Its marker is an offset that is committed in the unit's own consumer
group: the offset is the batch number; the metadata holds the number of rows and their checksum. These steps, in this order,
write each row exactly once:

1. Initialize the unit's producer. This fences every earlier attempt that may still run, and ends its transaction.
2. Read the marker. If it names this batch, send nothing.
3. Send the rows, and commit them in one transaction with the marker.

If the reply to the commit is lost, steps 1 and 2 are repeated, and the marker shows the outcome. Invariant: read_committed
consumers see the rows of exactly those units that have markers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final
from zlib import crc32

import msgspec
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from stratalog_core.errors import Conflict, Corrupt, Fenced, OutcomeUnknown, Unavailable
from stratalog_core.kafka_clients import as_ours, retried, translated
from stratalog_core.malformed import MALFORMED
from stratalog_pipeline.brokers import options_checked
from stratalog_pipeline.kafka_sink import CLIENT_DEFAULTS, REQUEST_S_MAX, Row, WriteOptions, rows_of, send_rows

PREFIX: Final = "stratalog-sink-"
"""Prefix of transactional ids and of marker groups, so that one prefixed ACL covers both."""
TRANSACTION_TIMEOUT_MS: Final = 900_000
"""The maximum that brokers allow by default. A task must write its rows in this time."""
DECIDE_S: Final = 120.0
"""Time limit for an earlier transaction to end, and for the reply to a commit."""
_SUM_MASK: Final = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Task number ``task`` of batch number ``batch`` of a write. Batches are numbered from 0."""

    write: str
    batch: int
    task: int

    @property
    def name(self) -> str:
        """The unit's transactional id and marker group. All batches share them, which bounds their number."""
        return f"{PREFIX}{self.write}-{self.task}"


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """The last batch of which a unit's rows are written. ``checksum`` does not depend on the order of rows."""

    batch: int
    rows: int
    checksum: int


class _Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a marker that is stored as the metadata of its offset."""

    rows: int
    checksum: int


class RowsSum:
    """Counts rows and sums the CRCs of their keys and values."""

    def __init__(self) -> None:
        self.rows = 0
        self.checksum = 0

    def counted(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows, and count them."""
        for row in rows:
            self.rows += 1
            self.checksum = (self.checksum + _crc(row["value"], _crc(row["key"], 0))) & _SUM_MASK
            yield row


def _crc(field: bytes | str | None, before: int) -> int:
    if field is None:
        return crc32(b"none", before)
    return crc32(field.encode() if isinstance(field, str) else field, crc32(b"some", before))


def send_once(batches: Iterable[pa.RecordBatch], options: WriteOptions, unit: Unit) -> int:
    """Write the unit's rows unless they are written; return their number.

    A unit without rows needs no marker, except task 0, by whose marker the next batch sees that none are lost. Raises
    ``Fenced`` if another attempt took over, ``Conflict`` if the rows are not those that were written, markers of the batch
    before are missing, or a later batch is written; ``OutcomeUnknown``; and as ``kafka_sink.send``. After any of them the unit
    may be run again.
    """
    total = RowsSum()
    rows = total.counted(rows_of(batches, options.topic))
    first = next(rows, None)
    if first is None and unit.task:
        return 0
    all_rows = rows if first is None else chain([first], rows)
    producer = _begin(options, unit)
    written = written_marker(options, unit)
    if written is not None:
        return written.rows if options.trusts_markers else _compared(unit, written, all_rows, total)
    _write(producer, options, unit, all_rows, total)
    return total.rows


def _compared(unit: Unit, written: Marker, rows: Iterable[Row], total: RowsSum) -> int:
    """Raise ``Conflict`` unless the rows are those that were written; otherwise rows could be written twice, or never."""
    for _ in rows:
        pass
    if (total.rows, total.checksum) != (written.rows, written.checksum):
        raise Conflict(
            f"task {unit.task} of batch {unit.batch} of write {unit.write} has {total.rows} rows that are not the "
            f"{written.rows} that it wrote before: the batch was split into other tasks, or its rows changed. Split it in a "
            "way that can be repeated, such as .repartition(8, 'key'); or leave written tasks as they are, with the option "
            "markers=trusted"
        )
    return written.rows


def _begin(options: WriteOptions, unit: Unit) -> Producer:
    """Return a producer that has fenced the unit's earlier attempts and ended their transactions."""
    timeout = {"transaction.timeout.ms": TRANSACTION_TIMEOUT_MS}
    with options_checked():
        producer = Producer({**CLIENT_DEFAULTS, **timeout, **options.client, "transactional.id": unit.name})
    retried(lambda: producer.init_transactions(REQUEST_S_MAX), DECIDE_S)
    return producer


def written_marker(options: WriteOptions, unit: Unit) -> Marker | None:
    """Return the marker of the unit's batch; None if its rows are not written. Raises ``Conflict`` as :func:`send_once`."""
    found = read_marker(options, unit)
    if found is not None and found.batch > unit.batch:
        raise Conflict(f"batch {found.batch} of write {unit.write} is written already; batch {unit.batch} comes before it")
    if found is not None and found.batch == unit.batch:
        return found
    if not options.trusts_markers:
        _check_batch_before(options, unit, found)
    return None


def _check_batch_before(options: WriteOptions, unit: Unit, own: Marker | None) -> None:
    """Raise ``Conflict`` if markers were lost: then it is unknown which tasks of this batch were written by an earlier run."""
    wanted = (unit.batch - 1, unit.batch)
    if unit.batch == 0 or (own is not None and own.batch in wanted):
        return
    # A task that had no rows has no marker. Task 0 always has one.
    first = read_marker(options, Unit(write=unit.write, batch=unit.batch, task=0)) if unit.task else own
    if first is None or first.batch not in wanted:
        raise Conflict(
            f"there is no marker of batch {unit.batch - 1} of write {unit.write} with topic {options.topic}: it expired "
            "(offsets.retention.minutes of the brokers), the topic was recreated, or earlier batches were written elsewhere "
            f"or with delivery=at-least-once. Batch {unit.batch} may be partly written. If it is not, or if duplicates "
            "are acceptable, continue with the option markers=trusted"
        )


def read_marker(options: WriteOptions, unit: Unit) -> Marker | None:
    """Return the unit's newest marker. Raises ``Unavailable``, and ``Corrupt`` if something else uses its group."""
    consumer = _consumer(options, unit)
    try:
        place = TopicPartition(_topic(options), 0)
        found = retried(lambda: _committed(consumer, place), DECIDE_S)
    finally:
        consumer.close()
    if found.offset < 0:
        return None
    try:
        stored = msgspec.json.decode(found.metadata or "", type=_Metadata)
    except MALFORMED as bad:
        raise Corrupt(f"the offset in group {unit.name} is not a marker: {found.metadata!r}") from bad
    return Marker(batch=found.offset, rows=stored.rows, checksum=stored.checksum)


def _committed(consumer: Consumer, place: TopicPartition) -> TopicPartition:
    [found] = consumer.committed([place], REQUEST_S_MAX)
    if found.error is not None:
        # Not the same as no offset: then the rows would be written again.
        raise KafkaException(found.error)
    return found


def _consumer(options: WriteOptions, unit: Unit) -> Consumer:
    """Return a consumer that never joins its group. Reading committed data, it waits until offsets are decided."""
    fixed = {"group.id": unit.name, "isolation.level": "read_committed", "enable.auto.commit": False, "log_level": 0}
    with options_checked():
        return Consumer({**options.client, **fixed})


def _topic(options: WriteOptions) -> str:
    assert options.topic is not None, "parse_write_options checks it"
    return options.topic


def _write(producer: Producer, options: WriteOptions, unit: Unit, rows: Iterable[Row], total: RowsSum) -> None:
    began = time.monotonic()
    with translated():
        producer.begin_transaction()
    try:
        try:
            send_rows(producer, rows, options.rows_per_s)
            _send_marker(producer, options, unit, total)
        except BaseException:
            _abort(producer)
            raise
        is_committed = _commit(producer, unit)
    except Fenced as fenced:
        raise _explained(fenced, unit, began) from fenced
    if not is_committed:
        _resolve(options, unit)


def _send_marker(producer: Producer, options: WriteOptions, unit: Unit, total: RowsSum) -> None:
    metadata = msgspec.json.encode(_Metadata(rows=total.rows, checksum=total.checksum)).decode()
    place = TopicPartition(_topic(options), 0, unit.batch, metadata=metadata)
    consumer = _consumer(options, unit)
    try:
        group = consumer.consumer_group_metadata()
    finally:
        consumer.close()
    retried(lambda: producer.send_offsets_to_transaction([place], group, REQUEST_S_MAX), DECIDE_S)


def _commit(producer: Producer, unit: Unit) -> bool:
    """Commit. Return False if it is unknown whether the transaction is committed.

    Raises ``Unavailable`` if it was aborted, ``Fenced`` if another attempt has decided it.
    """
    deadline = time.monotonic() + DECIDE_S
    while True:
        try:
            producer.commit_transaction(REQUEST_S_MAX)
        except KafkaException as failure:
            error: KafkaError = failure.args[0]
            if error.txn_requires_abort():
                _abort(producer)
                raise Unavailable(f"the transaction of {unit.name} was aborted: {error.str()}") from failure
            if isinstance(as_ours(error), Fenced):
                raise as_ours(error) from failure
            if not error.retriable() or time.monotonic() > deadline:
                return False
        else:
            return True


def _resolve(options: WriteOptions, unit: Unit) -> None:
    """Determine the outcome of a commit. Raises ``Unavailable`` if nothing is written, ``OutcomeUnknown`` if it is unknown."""
    try:
        _begin(options, unit)
        found = written_marker(options, unit)
    except Unavailable as unavailable:
        raise OutcomeUnknown(f"the transaction of {unit.name} may be committed: {unavailable.message}") from unavailable
    if found is None:
        raise Unavailable(f"the transaction of {unit.name} was aborted before its commit was answered")


def _explained(fenced: Fenced, unit: Unit, began: float) -> Fenced:
    return Fenced(
        f"another attempt of {unit.name} took over, or its transaction, open for {time.monotonic() - began:.0f} s, exceeded "
        f"its timeout: use more tasks, or raise kafka.transaction.timeout.ms ({fenced.message})"
    )


def _abort(producer: Producer) -> None:
    """Abort. If that fails, the next attempt's producer does it, or the coordinator after the transaction's timeout."""
    try:
        producer.purge()
        producer.abort_transaction(REQUEST_S_MAX)
    except KafkaException:
        return
