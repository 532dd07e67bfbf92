"""Names and checksums of units; brokers are met in ``tests/integration/test_exactly_once.py``."""

from __future__ import annotations

from random import Random

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.errors import Invalid
from stratalog_pipeline import sink_markers
from stratalog_pipeline.kafka_sink import Row, parse_write_options
from stratalog_pipeline.sink_markers import Markers, Unit
from stratalog_pipeline.sink_transactions import RowsSum

ROWS = st.lists(
    st.fixed_dictionaries(
        {"topic": st.just("t"), "key": st.none() | st.binary(max_size=3), "value": st.none() | st.binary(max_size=3)},
        optional={"timestamp": st.integers(1, 9), "partition": st.integers(0, 2)},
    ),
    max_size=8,
)


def summed(rows: list[Row]) -> tuple[int, int]:
    total = RowsSum("t")
    assert list(total.counted(rows)) == rows
    return total.rows, total.checksum


@given(rows=ROWS, shuffler=st.randoms())
def test_the_order_of_rows_does_not_matter(rows: list[Row], shuffler: Random) -> None:
    shuffled = list(rows)
    shuffler.shuffle(shuffled)
    assert summed(shuffled) == summed(rows)


def test_other_rows_have_another_checksum() -> None:
    fields = (None, b"", b"a", b"b", b"ab")
    rows: list[Row] = [{"topic": "t", "key": key, "value": value} for key in fields for value in fields]
    assert len({summed([row]) for row in rows}) == len(rows)
    assert summed(rows[:1] * 2) != summed(rows[:1])
    text, binary = {"topic": "t", "key": "k", "value": "é"}, {"topic": "t", "key": b"k", "value": "é".encode()}
    assert summed([text]) == summed([binary]), "text is sent as UTF-8"


def test_rows_that_differ_beside_key_and_value_have_another_checksum() -> None:
    row: Row = {"topic": "t", "key": b"k", "value": b"v"}
    others: list[Row] = [
        {**row, "topic": "u"},
        {**row, "timestamp": 1},
        {**row, "timestamp": 2},
        {**row, "partition": 1},
        {**row, "headers": [("h", b"v")]},
        {**row, "headers": [("h", None)]},
    ]
    assert len({summed([one]) for one in (row, *others)}) == 7


def test_all_batches_of_a_task_share_one_transactional_id() -> None:
    names = {Unit(write="w", batch=batch, task=task).name for batch in range(3) for task in range(2)}
    assert names == {"stratalog-sink-w-0", "stratalog-sink-w-1"}


class Refused(Consumer):
    """The brokers refuse to tell one partition's offset, which the client reports beside the partition."""

    def committed(self, partitions: list[TopicPartition], timeout: float | None = None) -> list[TopicPartition]:
        return [RefusedPartition(partitions[0].topic, 0)]


class RefusedPartition(TopicPartition):
    error = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)


def test_a_marker_that_cannot_be_read_is_not_taken_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_markers, "Consumer", Refused)
    options = parse_write_options({"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "a"})
    with pytest.raises(Invalid, match="authorization failed"):
        Markers(options).read(Unit(write="w", batch=0, task=0))
