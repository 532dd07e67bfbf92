"""Turns a Kafka client's messages into Arrow record batches with the columns of Spark's Kafka source.

For records that come from brokers, which are few compared with the bucket's: a client has decoded them already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import pyarrow as pa

from stratalog_core.errors import Corrupt
from stratalog_core.message_headers import MessageWithHeaders, headers_of
from stratalog_pipeline.arrow.decode import BOUNDS
from stratalog_pipeline.arrow.kernels import BAD_TIMESTAMP, MESSAGES, TIMESTAMP_MS_MAX, Room
from stratalog_pipeline.arrow.schema import arrow_schema

_WITHOUT_HEADERS: Final = "leave out includeHeaders, or read the record once it is offloaded"


class KafkaMessage(MessageWithHeaders, Protocol):
    """The part of confluent-kafka's ``Message`` that is read here."""

    def key(self) -> bytes | None: ...
    def value(self) -> bytes | None: ...
    def topic(self) -> str: ...
    def partition(self) -> int: ...
    def offset(self) -> int: ...
    def timestamp(self) -> tuple[int, int]: ...


def to_arrow(runs: Iterable[Sequence[Any]], columns: Sequence[str], bounds: Room = BOUNDS) -> Iterator[pa.RecordBatch]:
    """Yield the messages of ``runs``, in order, as record batches of about ``bounds``.

    Raises ``Corrupt`` for a timestamp that a row cannot hold, and for a header whose name the client cannot read.
    """
    rows: list[KafkaMessage] = []
    data_bytes = 0
    wants_headers = "headers" in columns
    for run in runs:
        for message in run:
            rows.append(message)
            data_bytes += len(message.key() or b"") + len(message.value() or b"")
            data_bytes += _headers_bytes(message) if wants_headers else 0
            if len(rows) >= bounds.rows or data_bytes >= bounds.data_bytes:
                yield _batch(rows, columns)
                rows, data_bytes = [], 0
    if rows:
        yield _batch(rows, columns)


def _batch(rows: Sequence[KafkaMessage], columns: Sequence[str]) -> pa.RecordBatch:
    schema = arrow_schema(columns)
    made = [pa.array([_CELLS[name](row) for row in rows], schema.field(name).type) for name in columns]
    return pa.RecordBatch.from_arrays(made, schema=schema)


def _headers(row: KafkaMessage) -> list[dict[str, Any]] | None:
    return [{"key": key, "value": value} for key, value in headers_of(row, _WITHOUT_HEADERS)] or None


def _headers_bytes(row: KafkaMessage) -> int:
    return sum(len(key) + len(value or b"") for key, value in headers_of(row, _WITHOUT_HEADERS))


def _timestamp_us(row: KafkaMessage) -> int:
    timestamp_ms = row.timestamp()[1]
    if abs(timestamp_ms) > TIMESTAMP_MS_MAX:
        raise Corrupt(f"{row.topic()}-{row.partition()}, offset {row.offset()}: {MESSAGES[BAD_TIMESTAMP]}")
    return timestamp_ms * 1000


_CELLS: Final[dict[str, Callable[[KafkaMessage], Any]]] = {
    "key": lambda row: row.key(),
    "value": lambda row: row.value(),
    "topic": lambda row: row.topic(),
    "partition": lambda row: row.partition(),
    "offset": lambda row: row.offset(),
    "timestamp": _timestamp_us,
    # The client counts from 1 (0: no timestamp), Spark's source from 0.
    "timestampType": lambda row: max(0, row.timestamp()[0] - 1),
    "headers": _headers,
}
