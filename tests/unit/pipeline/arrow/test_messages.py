"""Rows of a client's messages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from stratalog_core.errors import Corrupt
from stratalog_pipeline.arrow.kernels import Room
from stratalog_pipeline.arrow.messages import to_arrow


@dataclass(frozen=True, slots=True)
class Received:
    """A message as confluent-kafka returns it."""

    at: int
    pairs: tuple[tuple[str, bytes | None], ...] = ()
    time_ms: int = -1

    def key(self) -> bytes | None:
        return None

    def value(self) -> bytes | None:
        return None

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 3

    def offset(self) -> int:
        return self.at

    def timestamp(self) -> tuple[int, int]:
        return 1, self.time_ms

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return list(self.pairs) or None


def test_large_headers_fill_a_batch_as_values_do() -> None:
    runs = [[Received(number, (("name", b"x" * 96), ("none", None)))] for number in range(10)]
    wide, narrow = Room(rows=100, data_bytes=300, headers=100), ("offset",)
    assert [batch.num_rows for batch in to_arrow(runs, ("offset", "headers"), wide)] == [3, 3, 3, 1]
    assert [batch.num_rows for batch in to_arrow(runs, narrow, wide)] == [10], "they are not copied"


def test_large_messages_of_one_run_are_batches_of_their_own() -> None:
    """Together they may be more than one column of Arrow can hold."""
    run = [Received(number, (("name", b"x" * 296),)) for number in range(3)]
    bounds = Room(rows=100, data_bytes=300, headers=100)
    assert [batch.num_rows for batch in to_arrow([run], ("offset", "headers"), bounds)] == [1, 1, 1]


def test_a_message_without_key_value_headers_and_time() -> None:
    columns = ("key", "value", "partition", "offset", "timestampType", "headers")
    [batch] = to_arrow([[Received(7)]], columns)
    assert batch.to_pylist() == [{"key": None, "value": None, "partition": 3, "offset": 7, "timestampType": 0, "headers": None}]
    [times] = to_arrow([[Received(7)]], ("timestamp",))
    assert times.column(0).cast("int64").to_pylist() == [-1000], "as the same record has in the bucket"


def test_times_from_before_1970_to_the_end_of_64_bits() -> None:
    for time_ms in (-62_135_596_800_000, 0, 9_223_372_036_854_775):
        [batch] = to_arrow([[Received(7, time_ms=time_ms)]], ("timestamp",))
        assert batch.column(0).cast("int64").to_pylist() == [time_ms * 1000]
    with pytest.raises(Corrupt, match="t-3, offset 7: a record's timestamp is beyond"):
        list(to_arrow([[Received(7, time_ms=9_223_372_036_854_776)]], ("timestamp",)))
