"""Filters narrow what is read, never more than they say; what is not understood narrows nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from stratalog_pipeline.planning import OffsetRange
from stratalog_pipeline.pruning import EVERYTHING, OFFSET_END
from stratalog_pipeline.spark.filters import pruning_of


@pytest.mark.parametrize(
    ("filters", "first", "end"),
    [
        ([EqualTo(("offset",), 7)], 7, 8),
        ([GreaterThan(("offset",), 7)], 8, OFFSET_END),
        ([GreaterThanOrEqual(("offset",), 7), LessThan(("offset",), 9)], 7, 9),
        ([LessThanOrEqual(("offset",), 9)], 0, 10),
        ([GreaterThan(("offset",), 9), LessThan(("offset",), 5)], 10, 10),
        ([LessThan(("offset",), -3)], 0, 0),
        ([In(("offset",), (1, 2))], 0, OFFSET_END),
        ([Not(EqualTo(("offset",), 7))], 0, OFFSET_END),
    ],
)
def test_offsets(filters: list[Filter], first: int, end: int) -> None:
    assert pruning_of(filters).offsets == OffsetRange(first=first, end=end)


def test_topics_and_partitions_intersect() -> None:
    pruning = pruning_of(
        [In(("topic",), ("a", "b")), EqualTo(("topic",), "b"), In(("partition",), (1, 2, 3)), IsNotNull(("partition",))]
    )
    assert pruning.allows("b", 2)
    assert not pruning.allows("a", 2)
    assert not pruning.allows("b", 0)
    assert not pruning_of([EqualTo(("topic",), "a"), EqualTo(("topic",), "b")]).allows("a", 0)


def test_times_only_bound_from_below_and_round_down() -> None:
    time = datetime(2013, 7, 4, 12, 0, 0, 999, UTC)
    milliseconds = int(datetime(2013, 7, 4, 12, 0, 0, 0, UTC).timestamp() * 1000)
    assert pruning_of([GreaterThan(("timestamp",), time)]).timestamp_from_ms == milliseconds
    elsewhere = time.astimezone(timezone(timedelta(hours=-5)))
    later = GreaterThanOrEqual(("timestamp",), time + timedelta(seconds=1))
    assert pruning_of([EqualTo(("timestamp",), elsewhere), later]).timestamp_from_ms == milliseconds + 1000
    assert pruning_of([LessThan(("timestamp",), time)]) == EVERYTHING
    assert pruning_of([EqualTo(("timestamp",), datetime(1969, 12, 31, 23, 59, 59, 999_500, UTC))]).timestamp_from_ms == -1


def test_what_is_not_understood_prunes_nothing() -> None:
    filters: list[Filter] = [
        EqualTo(("key",), b"k"),
        StringStartsWith(("topic",), "a"),
        EqualTo(("headers", "key"), "x"),
        GreaterThan(("partition",), 3),
        EqualTo(("topic",), None),
    ]
    assert pruning_of(filters) == EVERYTHING
