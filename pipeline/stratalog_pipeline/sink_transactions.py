"""Sends the rows of a task exactly once: its rows and its marker are committed in one transaction. Independent of Spark.

These steps, in this order, write each row of a unit (``sink_markers.py``) exactly once:

1. Initialize the unit's producer. This fences every earlier attempt that may still run, and ends its transaction.
2. Read the marker. If it names this batch, send nothing.
3. If an earlier run wrote some of the batch, wait until what it wrote is compared with the rows of this run.
4. Send the rows, and commit them in one transaction with the marker.

If the reply to the commit is lost, steps 1 and 2 are repeated, and the marker shows the outcome. Invariant: read_committed
consumers see the rows of exactly those units that have markers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Final
from zlib import crc32

import msgspec
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Producer

from stratalog_core.errors import Conflict, Fenced, Invalid, OutcomeUnknown, Unavailable
from stratalog_core.kafka_clients import as_ours, retried, translated
from stratalog_pipeline.brokers import options_checked
from stratalog_pipeline.kafka_sink import CLIENT_DEFAULTS, REQUEST_S_MAX, Row, WriteOptions, rows_of, send_rows
from stratalog_pipeline.sink_markers import DECIDE_S, REMEDY, Marker, Markers, Unit, consumer_of, marker_offset

_LOGGER: Final = logging.getLogger(__name__)
TRANSACTION_TIMEOUT_MS: Final = 900_000
"""The maximum that brokers allow by default. A task must write its rows in this time."""
END_S: Final = 30.0
"""Time limit for ending the transactions of a write that failed."""
_ENDED_AT_ONCE: Final = 16
_SUM_MASK: Final = 2**64 - 1


class RowsSum:
    """Counts rows and sums the CRCs of all that is sent of them. ``topic`` is the one of rows that need not name theirs."""

    def __init__(self, topic: str | None = None) -> None:
        self._topic = topic
        self.rows = 0
        self.checksum = 0

    def counted(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows, and count them."""
        for row in rows:
            self.rows += 1
            self.checksum = (self.checksum + self._crc(row)) & _SUM_MASK
            yield row

    def _crc(self, row: Row) -> int:
        crc = _crc(row["value"], _crc(row["key"], 0))
        rest = (
            row["topic"] if row["topic"] != self._topic else None,
            row.get("headers"),
            row.get("partition"),
            row.get("timestamp"),
        )
        # Most rows have none of these.
        return crc if rest == _NOTHING_ELSE else crc32(msgspec.msgpack.encode(rest), crc)


_NOTHING_ELSE: Final = (None, None, None, None)


def _crc(field: bytes | str | None, before: int) -> int:
    if field is None:
        return crc32(b"none", before)
    return crc32(field.encode() if isinstance(field, str) else field, crc32(b"some", before))


def send_once(batches: Iterable[pa.RecordBatch], options: WriteOptions, unit: Unit) -> int:
    """Write the unit's rows unless they are written; return their number.

    A unit without rows needs no marker, except task 0, which begins a batch of which no task has rows. Raises ``Fenced`` if
    another attempt took over, ``Conflict`` if the rows are not those that were written, markers may have expired, an
    earlier run split the batch into other tasks, or a later batch is written; ``OutcomeUnknown``; and as
    ``kafka_sink.send``. After any of them the unit may be run again.
    """
    total = RowsSum(options.topic)
    rows = total.counted(rows_of(batches, options.topic))
    first = next(rows, None)
    markers = Markers(options)
    if first is None and unit.task:
        _check_unwritten(markers, options, unit)
        return 0
    all_rows = rows if first is None else chain([first], rows)
    producer = _begin(options, unit)
    written = written_marker(markers, unit)
    if written is None:
        if unit.run and markers.begin(unit) and not options.trusts_markers:
            markers.wait_until_compared(unit)
        _write(producer, markers, options, unit, all_rows, total)
        return total.rows
    if options.trusts_markers:
        return written.rows
    if written.run != unit.run:
        _mark(producer, options, unit, msgspec.structs.replace(written, comparing=unit.run))
    _compare(unit, written, all_rows, total)
    if written.run != unit.run:
        _mark(producer, options, unit, msgspec.structs.replace(written, run=unit.run))
    return written.rows


def end_transactions(options: WriteOptions, units: Sequence[Unit]) -> None:
    """End the transactions that the tasks of a failed write left open when Spark killed them, as far as ``END_S`` allows.

    Readers of committed data would wait behind them until they time out. Units are fenced in order: Spark starts tasks so. A
    failure is logged.
    """
    deadline = time.monotonic() + END_S

    def end(unit: Unit) -> None:
        left_s = deadline - time.monotonic()
        if left_s > 0:
            _producer(options, unit).init_transactions(left_s)

    with ThreadPoolExecutor(_ENDED_AT_ONCE) as pool:
        for ended in [pool.submit(end, unit) for unit in units]:
            try:
                ended.result()
            except (KafkaException, Invalid) as failure:
                _LOGGER.info("a transaction of the write may be open until its timeout: %s", failure)


def _check_unwritten(markers: Markers, options: WriteOptions, unit: Unit) -> None:
    """Raise ``Conflict`` if a unit that has no rows now has written some."""
    written = markers.read(unit)
    if written is not None and written.batch == unit.batch and not options.trusts_markers:
        _compare(unit, written, (), RowsSum())


def _compare(unit: Unit, written: Marker, rows: Iterable[Row], total: RowsSum) -> None:
    """Raise ``Conflict`` unless the rows are those that were written; otherwise rows could be written twice, or never."""
    for _ in rows:
        pass
    if (total.rows, total.checksum) != (written.rows, written.checksum):
        raise Conflict(
            f"task {unit.task} of batch {unit.batch} of write {unit.write} has {total.rows} rows that are not the "
            f"{written.rows} that it wrote before: the batch is split into other tasks now, or its rows changed. {REMEDY}"
        )


def _begin(options: WriteOptions, unit: Unit) -> Producer:
    """Return a producer that has fenced the unit's earlier attempts and ended their transactions."""
    producer = _producer(options, unit)
    retried(lambda: producer.init_transactions(REQUEST_S_MAX), DECIDE_S)
    return producer


def _producer(options: WriteOptions, unit: Unit) -> Producer:
    timeout = {"transaction.timeout.ms": TRANSACTION_TIMEOUT_MS}
    with options_checked():
        return Producer({**CLIENT_DEFAULTS, **timeout, **options.client, "transactional.id": unit.name})


def written_marker(markers: Markers, unit: Unit) -> Marker | None:
    """Return the marker of the unit's batch; None if its rows are not written. Raises ``Conflict`` as :func:`send_once`."""
    found = markers.read(unit)
    if found is not None and found.batch > unit.batch:
        raise Conflict(f"batch {found.batch} of write {unit.write} is written already; batch {unit.batch} comes before it")
    return found if found is not None and found.batch == unit.batch else None


def _write(
    producer: Producer, markers: Markers, options: WriteOptions, unit: Unit, rows: Iterable[Row], total: RowsSum
) -> None:
    def send() -> None:
        send_rows(producer, rows, options.rows_per_s)
        written = Marker(batch=unit.batch, rows=total.rows, checksum=total.checksum, run=unit.run)
        _send_marker(producer, options, unit, written)

    if not _in_transaction(producer, unit, send):
        _resolve(markers, options, unit)


def _mark(producer: Producer, options: WriteOptions, unit: Unit, marker: Marker) -> None:
    """Replace the unit's marker of this batch, unless another attempt took over."""
    if not _in_transaction(producer, unit, lambda: _send_marker(producer, options, unit, marker)):
        raise Unavailable(f"it is unknown whether {unit.name} has recorded that it compares its rows")


def _in_transaction(producer: Producer, unit: Unit, send: Callable[[], None]) -> bool:
    """Commit what ``send`` sends, or abort it if that fails. Return False if it is unknown whether it is committed."""
    began = time.monotonic()
    with translated():
        producer.begin_transaction()
    try:
        try:
            send()
        except BaseException:
            _abort(producer)
            raise
        return _commit(producer, unit)
    except Fenced as fenced:
        raise _explained(fenced, unit, began) from fenced


def _send_marker(producer: Producer, options: WriteOptions, unit: Unit, marker: Marker) -> None:
    assert options.topic is not None, "parse_write_options checks it"
    place = marker_offset(options.topic, marker)
    with consumer_of(options, unit.name) as consumer:
        group = consumer.consumer_group_metadata()
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


def _resolve(markers: Markers, options: WriteOptions, unit: Unit) -> None:
    """Determine the outcome of a commit. Raises ``Unavailable`` if nothing is written, ``OutcomeUnknown`` if it is unknown."""
    try:
        _begin(options, unit)
        found = written_marker(markers, unit)
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
