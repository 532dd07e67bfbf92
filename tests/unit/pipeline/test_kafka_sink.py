"""Options, columns and rows of the sink; brokers are met in the integration tests."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from stratalog_core.errors import Invalid
from stratalog_pipeline.arrow.schema import HEADERS_TYPE
from stratalog_pipeline.kafka_sink import check_written_columns, parse_write_options, rows_of, send, send_rows

SERVERS = {"kafka.bootstrap.servers": "127.0.0.1:1"}


def test_options_of_a_write() -> None:
    options = parse_write_options({**SERVERS, "Topic": " a ", "kafka.linger.ms": "5", "rowsPerSecond": "2.5"})
    assert (options.topic, options.rows_per_s) == ("a", 2.5)
    assert options.client == {"bootstrap.servers": "127.0.0.1:1", "linger.ms": "5"}
    assert "linger" not in repr(options), "options of the client may be secrets"


def test_a_write_is_exactly_once_unless_it_says_otherwise() -> None:
    once = parse_write_options({**SERVERS, "topic": "a"})
    assert (once.is_exactly_once, once.write_id, once.write_batch, once.trusts_markers) == (True, None, 0, False)
    named = parse_write_options({**SERVERS, "topic": "a", "writeId": "load-1", "writeBatch": "7", "markers": "trusted"})
    assert (named.write_id, named.write_batch, named.trusts_markers) == ("load-1", 7, True)
    assert not parse_write_options({**SERVERS, "delivery": "at-least-once"}).is_exactly_once


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"topic": "a"}, "option 'kafka.bootstrap.servers' is missing"),
        ({**SERVERS, "path": "/bucket"}, "rows are written to brokers"),
        ({**SERVERS, "topik": "a"}, "did you mean 'topic'"),
        ({**SERVERS, "rowsPerSecond": "fast"}, "a number of at least 0"),
        ({**SERVERS, "rowsPerSecond": "-1"}, "a number of at least 0"),
        ({**SERVERS, "rowsPerSecond": "nan"}, "a number of at least 0"),
        ({**SERVERS, "rowsPerSecond": "inf"}, "a number of at least 0"),
        (SERVERS, "or delivery=at-least-once"),
        (
            {**SERVERS, "topic": "a", "delivery": "once"},
            "option 'delivery' must be one of exactly-once, at-least-once, not 'once'",
        ),
        ({**SERVERS, "topic": "a", "markers": "lost"}, "must be one of strict, trusted, not 'lost'"),
        ({**SERVERS, "topic": "a", "writeId": "a/b"}, "option 'writeId' must be"),
        ({**SERVERS, "topic": "a", "writeId": "a", "writeBatch": "-1"}, "option 'writeBatch' is '-1'"),
        ({**SERVERS, "topic": "a", "writeId": "a", "writeBatch": "²"}, "option 'writeBatch' is '²'"),
        ({**SERVERS, "topic": "a", "groupIdPrefix": "g"}, "option 'groupIdPrefix' is unknown"),
        ({**SERVERS, "topic": "a", "writeBatch": "1"}, "'writeBatch' needs option 'writeId'"),
        ({**SERVERS, "topic": "a", "writeId": "a", "delivery": "at-least-once"}, "'writeId' has no effect"),
        ({**SERVERS, "topic": "a", "writeBatch": "3", "delivery": "at-least-once"}, "'writeBatch' has no effect"),
        ({**SERVERS, "topic": "a", "markers": "trusted", "delivery": "at-least-once"}, "'markers' has no effect"),
        ({**SERVERS, "topic": "a", "kafka.transactional.id": "mine"}, "'kafka.transactional.id' cannot be set"),
    ],
)
def test_what_is_wrong_is_refused_by_name(given: dict[str, str], message: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_write_options(given)
    assert message in refused.value.message


@pytest.mark.parametrize("name", ["writeId", "WRITEID", "writeBatch"])
def test_a_stream_takes_no_name_of_a_batch_write(name: str) -> None:
    given = {**SERVERS, "topic": "a", "checkpointLocation": "/c", "markers": "trusted"}
    assert parse_write_options(given, is_stream=True).trusts_markers
    with pytest.raises(Invalid, match="has no effect in a stream"):
        parse_write_options({**given, name: "1"}, is_stream=True)


@pytest.mark.parametrize(
    ("columns", "topic", "message"),
    [
        ([("key", "string")], "a", "no column 'value'"),
        ([("value", "string")], None, "no column 'topic'"),
        ([("value", "bigint")], "a", "column 'value' is bigint; the sink takes binary or string"),
        ([("value", "string"), ("offset", "bigint")], "a", "column 'offset' cannot be written"),
        ([("value", "string"), ("headers", "array<string>")], "a", "column 'headers' is array<string>"),
    ],
)
def test_columns_that_cannot_be_written_are_named(columns: list[tuple[str, str]], topic: str | None, message: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_written_columns(columns, topic)
    assert message in refused.value.message


def test_rows_become_the_arguments_of_the_client() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)
    batch = pa.RecordBatch.from_pydict(
        {
            "value": pa.array([b"a", None], pa.binary()),
            "key": pa.array([None, "k"], pa.string()),
            "headers": pa.array([[{"key": "h", "value": b"1"}, {"key": "n", "value": None}], None], HEADERS_TYPE),
            "topic": pa.array(["other", None], pa.string()),
            "partition": pa.array([3, None], pa.int32()),
            "timestamp": pa.array([moment, None], pa.timestamp("us", tz="Europe/Berlin")),
        }
    )
    assert list(rows_of([batch], "t")) == [
        {
            "topic": "other",
            "value": b"a",
            "key": None,
            "headers": [("h", b"1"), ("n", None)],
            "partition": 3,
            "timestamp": int(moment.timestamp() * 1000),
        },
        {"topic": "t", "value": None, "key": "k"},
    ]
    with pytest.raises(Invalid, match="a row has no topic"):
        list(rows_of([batch], None))


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("headers", pa.array([[None]], HEADERS_TYPE), "a header has no key"),
        ("headers", pa.array([[{"key": None, "value": b"1"}]], HEADERS_TYPE), "a header has no key"),
        ("headers", pa.array([[{"key": "a\0b", "value": b"1"}]], HEADERS_TYPE), "key of a header has a NUL character"),
        ("partition", pa.array([-1], pa.int32()), "a row has partition -1; minimum is 0"),
        ("timestamp", pa.array([-2000], pa.timestamp("us", tz="UTC")), "a row has timestamp -2 ms; Kafka has none before 1970"),
    ],
)
def test_rows_that_kafka_cannot_hold_are_refused(column: str, values: pa.Array, message: str) -> None:
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"a"], pa.binary()), column: values})
    with pytest.raises(Invalid, match=message):
        list(rows_of([batch], "t"))


def test_a_row_without_a_time_of_its_own_gets_that_of_sending() -> None:
    times = pa.array([None, -1000, 0, 1000], pa.timestamp("us", tz="UTC"))
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"a"] * 4, pa.binary()), "timestamp": times})
    assert [row.get("timestamp") for row in rows_of([batch], "t")] == [None, None, None, 1]


def test_a_row_that_the_clients_queue_can_never_hold_is_refused() -> None:
    options = parse_write_options({**SERVERS, "topic": "a", "kafka.queue.buffering.max.kbytes": "1"})
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"v" * 5000], pa.binary())})
    with pytest.raises(Invalid, match=r"a row of 5000 bytes does not fit .* raise kafka\.queue\.buffering\.max\.kbytes"):
        send([batch], options)


@pytest.mark.parametrize(("count", "rows_per_s"), [(10, 20.0), (70, 100.0)])
def test_all_rows_take_the_time_of_their_rate(count: int, rows_per_s: float) -> None:
    """A replay writes window by window: one that is sent in less time is followed by the next."""
    producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0, "linger.ms": 0})
    began = time.monotonic()
    assert send_rows(producer, ({"topic": "a", "value": b"v"} for _ in range(count)), rows_per_s) == count
    assert time.monotonic() - began >= count / rows_per_s
