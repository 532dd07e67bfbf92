"""Sends rows to brokers by an unmodified Kafka client: the part of the sink that runs in the tasks. Independent of Spark.

Columns and options are those of Spark's Kafka sink, and a column ``timestamp``. ``send`` sends each record at least once: a
task that is run again sends its rows again. ``sink_transactions`` sends them exactly once. Partitions are chosen as Java's
client does, so both kinds of writers agree on a key's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final, TypeAlias

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient

from stratalog_core.errors import Invalid, NotFound, StratalogError
from stratalog_core.kafka_clients import as_ours, retried, translated
from stratalog_pipeline.brokers import options_checked
from stratalog_pipeline.option_values import choice
from stratalog_pipeline.options import BOOTSTRAP, CLIENT, check_known, client_options

COLUMN_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "headers": ("array<struct<key:string,value:binary>>",),
    "topic": ("string",),
    "partition": ("int",),
    "timestamp": ("timestamp",),
}
"""The types of each column, as Spark prints them. Only ``value`` is required, and ``topic`` unless the option names one."""
KNOWN: Final = ("topic", "rowsPerSecond", "delivery", "writeId", "writeBatch", "markers", "checkpointLocation")
"""The last one is Spark's own. Spark passes it on with the options of a stream."""
WAIT_S: Final = 0.1
FLUSH_S: Final = 30.0
REQUEST_S_MAX: Final = 30.0
PACE_ROWS: Final = 50
NO_TIMESTAMP: Final = -1
"""The timestamp in milliseconds of a record without one. The client sends the current time for it, and for 0."""
WRITE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")

Row: TypeAlias = dict[str, Any]
"""The arguments of ``Producer.produce`` for one row."""
_Failure: TypeAlias = tuple[KafkaError, Message]

CLIENT_DEFAULTS: Final[Mapping[str, Any]] = {
    "acks": "all",
    "allow.auto.create.topics": False,
    "enable.idempotence": True,
    "compression.type": "zstd",
    "linger.ms": 20,
    "partitioner": "murmur2_random",
    "queue.buffering.max.messages": 100_000,
    "queue.buffering.max.kbytes": 64 * 1024,
    "log_level": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The parsed options of one write. ``topic`` is for rows without one; ``rows_per_s`` (0: no limit) is for each task.

    ``write_id`` and ``write_batch`` name a batch write, so that running it again continues it; a stream has ids of its own.
    ``trusts_markers``: see ``sink_transactions``.
    """

    topic: str | None
    client: Mapping[str, str] = field(repr=False)
    rows_per_s: float = 0.0
    is_exactly_once: bool = False
    write_id: str | None = None
    write_batch: int = 0
    trusts_markers: bool = False


def parse_write_options(given: Mapping[str, str], *, is_stream: bool = False) -> WriteOptions:
    """Parse the options of a write. Raises ``Invalid`` that names the option and the remedy."""
    options = {name.lower(): text for name, text in given.items()}
    for name in ("path", "store"):
        if name in options:
            raise Invalid(f"option {name!r}: rows are written to brokers, not to the bucket; give kafka.bootstrap.servers")
    for name in given:
        check_known(name, KNOWN, (CLIENT,))
    if is_stream and (useless := [name for name in ("writeId", "writeBatch") if name.lower() in options]):
        raise Invalid(
            f"option '{useless[0]}' has no effect in a stream, whose batches are named by its checkpoint: leave it out"
        )
    client = client_options(options)
    if not client:
        raise Invalid(f"option '{CLIENT}{BOOTSTRAP}' is missing: the brokers to write to, as HOST:PORT,…")
    try:
        rows_per_s = float(options.get("rowspersecond", "0"))
    except ValueError:
        rows_per_s = -1.0
    if not 0 <= rows_per_s < float("inf"):
        raise Invalid("option 'rowsPerSecond' must be a number of at least 0")
    parsed = WriteOptions(
        topic=options.get("topic", "").strip() or None,
        client=client,
        rows_per_s=rows_per_s,
        is_exactly_once=choice(options, "delivery", ("exactly-once", "at-least-once")) == "exactly-once",
        write_id=options.get("writeid"),
        write_batch=_batch_number(options.get("writebatch", "0")),
        trusts_markers=choice(options, "markers", ("strict", "trusted")) == "trusted",
    )
    _check_delivery(parsed, options)
    return parsed


def _batch_number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) >= 2**63:
        raise Invalid(f"option 'writeBatch' is {text!r}; give the number of the batch, from 0 on")
    return int(text)


def _check_delivery(options: WriteOptions, given: Mapping[str, str]) -> None:
    if "transactional.id" in options.client:
        raise Invalid(f"option '{CLIENT}transactional.id' cannot be set: each task has its own; option 'writeId' names a write")
    if not options.is_exactly_once:
        for name in ("writeId", "writeBatch", "markers"):
            if name.lower() in given:
                raise Invalid(f"option '{name}' has no effect with delivery=at-least-once: leave out one of them")
        return
    if options.topic is None:
        raise Invalid(
            "option 'topic' is missing: an exactly-once write keeps its markers with that topic, even if rows name "
            "their topics in a column; give it, or delivery=at-least-once"
        )
    if options.write_batch and options.write_id is None:
        raise Invalid("option 'writeBatch' needs option 'writeId', the name of the series of writes")
    if options.write_id is not None and not WRITE_ID.fullmatch(options.write_id):
        raise Invalid("option 'writeId' must be 1 to 100 letters, digits, dots, dashes or underscores")


def check_written_columns(columns: Sequence[tuple[str, str]], topic: str | None) -> tuple[str, ...]:
    """Return the names of the columns of ``(name, Spark type)``. Raises ``Invalid`` for one that the sink cannot write."""
    for name, spark_type in columns:
        kinds = COLUMN_TYPES.get(name)
        if kinds is None:
            raise Invalid(f"column {name!r} cannot be written; the sink takes {', '.join(COLUMN_TYPES)}: select those")
        if spark_type not in kinds:
            raise Invalid(f"column {name!r} is {spark_type}; the sink takes {' or '.join(kinds)}: cast it")
    names = tuple(name for name, _ in columns)
    if "value" not in names:
        raise Invalid("there is no column 'value'; select one, such as to_json(struct(*)) as value")
    if topic is None and "topic" not in names:
        raise Invalid("there is no column 'topic'; add one, or set option 'topic'")
    return names


def check_topic(options: WriteOptions) -> int:
    """Return the number of partitions of the options' topic; 0 if they name none.

    Raises ``NotFound`` if it does not exist: a client would create it with the brokers' defaults.
    """
    if options.topic is None:
        return 0
    with options_checked():
        admin = AdminClient({"log_level": 0, **options.client})
    # Lists all topics, because asking for one by name would create it.
    found = retried(lambda: admin.list_topics(timeout=REQUEST_S_MAX), REQUEST_S_MAX).topics.get(options.topic)
    if found is None:
        problem = f"topic {options.topic!r} does not exist; create it first (`stratalog topic create`)"
        raise NotFound(problem, topic=options.topic)
    return len(found.partitions)


def send(batches: Iterable[pa.RecordBatch], options: WriteOptions) -> int:
    """Send all rows and return their number when each is acknowledged.

    Raises the first failure: ``NotFound``, ``Invalid``, ``Unavailable``. Some rows are written then, in any order.
    """
    with options_checked():
        producer = Producer({**CLIENT_DEFAULTS, **options.client})
    return send_rows(producer, rows_of(batches, options.topic), options.rows_per_s)


def send_rows(producer: Producer, rows: Iterable[Row], rows_per_s: float) -> int:
    """Send all rows by ``producer``, and return their number when each is acknowledged. Raises as :func:`send`."""
    failures: list[_Failure] = []

    def on_delivery(failure: KafkaError | None, message: Message) -> None:
        # The client calls this with an exception set after a fatal error: no method of it may be called here.
        if failure is not None and not failures:
            failures.append((failure, message))

    count, began = 0, time.monotonic()
    at_once = min(PACE_ROWS, max(1, int(rows_per_s)))
    try:
        with translated():
            for row in rows:
                _produce(producer, row, on_delivery, failures)
                count += 1
                if rows_per_s and count % at_once == 0:
                    _pace(producer, began + count / rows_per_s)
            if rows_per_s:
                # The next write begins at once, and each may have few rows.
                _pace(producer, began + count / rows_per_s)
            while producer.flush(FLUSH_S) and not failures:
                # Every record fails by itself after delivery.timeout.ms.
                continue
    finally:
        if failures:
            producer.purge()
    _raise_first(failures)
    return count


def _produce(producer: Producer, row: Row, on_delivery: Any, failures: Sequence[_Failure]) -> None:
    is_empty = False
    while True:
        _raise_first(failures)
        try:
            producer.produce(**row, on_delivery=on_delivery)
        except BufferError:
            if is_empty:
                raise Invalid(
                    f"a row of {len(row['value'] or '')} bytes does not fit into the client's queue: raise "
                    f"{CLIENT}queue.buffering.max.kbytes above its size"
                ) from None
            producer.poll(WAIT_S)
            is_empty = not len(producer)
        except KafkaException as failure:
            # After a fatal error, produce does not say which; poll raises it.
            producer.poll(WAIT_S)
            raise _of_topic(failure.args[0], row["topic"]) from failure
        else:
            producer.poll(0)
            return


def _pace(producer: Producer, due_s: float) -> None:
    while (left := due_s - time.monotonic()) > 0:
        producer.poll(min(left, WAIT_S))


def _raise_first(failures: Sequence[_Failure]) -> None:
    if failures:
        failure, message = failures[0]
        raise _of_topic(failure, message.topic())


def _of_topic(failure: KafkaError, topic: str | None) -> StratalogError:
    ours = as_ours(failure)
    remedy = "; create it first, or correct the topic or partition of the rows" if isinstance(ours, NotFound) else ""
    return type(ours)(f"topic {topic!r}: {ours.message}{remedy}")


def rows_of(batches: Iterable[pa.RecordBatch], topic: str | None) -> Iterator[Row]:
    """Yield each row as the arguments of ``Producer.produce``."""
    for batch in batches:
        names = batch.schema.names
        values = [_column(batch, name) for name in names]
        for row in zip(*values, strict=True) if values else repeat((), batch.num_rows):
            yield _arguments(dict(zip(names, row, strict=True)), topic)


def _column(batch: pa.RecordBatch, name: str) -> list[Any]:
    column = batch.column(name)
    if name == "timestamp":
        microseconds = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_pylist()
        return [None if one is None else one // 1000 for one in microseconds]
    return list(column.to_pylist())


def _arguments(row: dict[str, Any], topic: str | None) -> Row:
    found: Row = {"topic": row.get("topic") or topic, "value": row["value"], "key": row.get("key")}
    if found["topic"] is None:
        raise Invalid("a row has no topic; fill column 'topic', or set option 'topic' for rows without one")
    if row.get("headers"):
        found["headers"] = [_header(header) for header in row["headers"]]
    if (partition := row.get("partition")) is not None:
        if partition < 0:
            raise Invalid(f"a row has partition {partition}; minimum is 0, and null for the one of its key")
        found["partition"] = partition
    if (timestamp := row.get("timestamp")) is not None:
        if timestamp < NO_TIMESTAMP:
            raise Invalid(f"a row has timestamp {timestamp} ms; Kafka has none before 1970: correct or drop column 'timestamp'")
        if timestamp > 0:
            found["timestamp"] = timestamp
    return found


def _header(header: dict[str, Any] | None) -> tuple[str, bytes | None]:
    if header is None or header["key"] is None:
        raise Invalid("a header has no key; give each header one")
    if "\0" in header["key"]:
        raise Invalid(f"the key of a header has a NUL character, where the brokers' client would cut it off: {header['key']!r}")
    return header["key"], header["value"]
