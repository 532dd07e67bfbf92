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


def test_times_are_rounded_to_the_wider_range() -> None:
    time = datetime(2013, 7, 4, 12, 0, 0, 999, UTC)
    milliseconds = int(datetime(2013, 7, 4, 12, 0, 0, 0, UTC).timestamp() * 1000)

    def times(*filters: Filter) -> tuple[int | None, int | None]:
        found = pruning_of(filters).times
        return found.first_ms, found.end_ms

    assert times(GreaterThan(("timestamp",), time)) == (milliseconds, None)
    assert times(LessThan(("timestamp",), time)) == (None, milliseconds + 1)
    assert times(LessThanOrEqual(("timestamp",), time), LessThan(("timestamp",), time + timedelta(1))) == (
        None,
        milliseconds + 1,
    )
    elsewhere = time.astimezone(timezone(timedelta(hours=-5)))
    assert times(EqualTo(("timestamp",), elsewhere)) == (milliseconds, milliseconds + 1)
    later = GreaterThanOrEqual(("timestamp",), time + timedelta(seconds=1))
    assert times(GreaterThan(("timestamp",), elsewhere), later) == (milliseconds + 1000, None)
    assert times(EqualTo(("timestamp",), datetime(1969, 12, 31, 23, 59, 59, 999_500, UTC))) == (-1, 0)


def test_what_is_not_understood_prunes_nothing() -> None:
    filters: list[Filter] = [
        EqualTo(("key",), b"k"),
        StringStartsWith(("topic",), "a"),
        EqualTo(("headers", "key"), "x"),
        GreaterThan(("partition",), 3),
        EqualTo(("topic",), None),
    ]
    assert pruning_of(filters) == EVERYTHING
