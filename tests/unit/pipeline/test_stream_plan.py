"""The offsets and batches of a stream, without Spark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Invalid
from stratalog_pipeline.arrow.schema import COLUMNS
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import ReadOptions, parse_options
from stratalog_pipeline.planning import OffsetRange, Split
from stratalog_pipeline.scan import scan_split
from stratalog_pipeline.stream_plan import (
    Offsets,
    available,
    check_no_loss,
    cut_at,
    first_offsets,
    new_offsets,
    next_end,
    plan_batch,
)

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket


def found(**ranges: tuple[int, int]) -> Mapping[tuple[str, str], OffsetRange]:
    return {("t", name[1:]): OffsetRange(first=first, end=end) for name, (first, end) in ranges.items()}


def batches(first: int, count: int) -> list[bytes]:
    return [
        bytes(build_batch([Record(offset=o, timestamp_ms=1000 + o, key=None, value=b"v")])) for o in range(first, first + count)
    ]


def options_for(bucket: ColdBucket, **more: str) -> ReadOptions:
    return parse_options({"path": bucket.url, "subscribe": "flights", "missingTail": "ignore", **more}, "stream")


def read(options: ReadOptions, start: Offsets, end: Offsets) -> list[tuple[int, int]]:
    """Return partition and offset of each row of a batch."""
    rows = []
    with Bucket(options.store) as bucket:
        for split in plan_batch(options, start, end).splits:
            for batch in scan_split(bucket, split, COLUMNS, read_committed=True):
                rows += [(row["partition"], row["offset"]) for row in batch.to_pylist()]
    return rows


def test_without_a_limit_a_batch_takes_everything() -> None:
    assert next_end({"t": {"0": 5}}, found(p0=(0, 10), p1=(3, 4)), None) == {"t": {"0": 10, "1": 4}}


def test_a_limit_is_shared_by_size_and_starves_nobody() -> None:
    assert next_end({}, found(p0=(0, 900), p1=(0, 99), p2=(0, 1), p3=(7, 7)), 100) == {"t": {"0": 90, "1": 9, "2": 1, "3": 7}}


@given(
    ranges=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 200)), min_size=1, max_size=5),
    limit=st.integers(1, 60),
)
def test_limited_batches_reach_the_end_in_bounded_steps(ranges: list[tuple[int, int]], limit: int) -> None:
    held = {("t", str(number)): OffsetRange(first=first, end=first + size) for number, (first, size) in enumerate(ranges)}
    position: Offsets = {}
    taken = 0
    while left := new_offsets(position, held):
        after = next_end(position, held, limit)
        moved = left - new_offsets(after, held)
        assert 0 < moved <= limit + len(held)
        position, taken = after, taken + moved
    assert taken == sum(size for _, size in ranges)


def test_what_is_behind_the_target_is_left_for_the_next_query() -> None:
    held, target = found(p0=(0, 10), p1=(0, 5), p2=(0, 7)), {"t": {"0": 4, "1": 9}}
    assert next_end({}, cut_at(held, target, {}), None) == {"t": {"0": 4, "1": 5}}
    # A position that is left out of a checkpoint is read again from the first record.
    start: Offsets = {"t": {"2": 3}}
    assert next_end(start, cut_at(held, target, start), None) == {"t": {"0": 4, "1": 5, "2": 3}}


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"t": {"0": 4}}, "t-0 has offsets 5..10, but the stream stopped at 4"),
        ({"t": {"0": 11}}, "but the stream stopped at 11"),
        ({"t": {"0": 7, "1": 3}}, "t-1 does not exist any more"),
        ({"u": {"0": 0}}, "u-0 does not exist any more"),
    ],
)
def test_lost_offsets_are_an_error_with_its_remedy(start: Offsets, message: str) -> None:
    with pytest.raises(Invalid, match="failOnDataLoss") as lost:
        check_no_loss(start, found(p0=(5, 10)))
    assert message in lost.value.message
    check_no_loss({"t": {"0": 5}}, found(p0=(5, 10), p1=(0, 3)))


def test_a_stream_reads_each_record_once_while_history_grows(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 30)], [batches(5, 10)], []])
    options = options_for(cold_bucket, startingOffsets="earliest")
    position = first_offsets(options)
    assert position == {"flights": {"0": 0, "1": 5, "2": 0}}
    rows: list[tuple[int, int]] = []
    for step in range(12):
        if step == 2:
            cold_bucket.extend("flights", 0, batches(30, 20))
        end = next_end(position, available(options), 7)
        rows += read(options, position, end)
        position = end
    assert position == {"flights": {"0": 50, "1": 15, "2": 0}}
    assert sorted(rows) == [(0, offset) for offset in range(50)] + [(1, offset) for offset in range(5, 15)]


def test_streams_start_where_their_options_say(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 30)], [batches(0, 10)]])
    assert first_offsets(options_for(cold_bucket)) == {"flights": {"0": 30, "1": 10}}
    offsets = options_for(cold_bucket, startingOffsets='{"flights": {"0": 7, "1": -1}}')
    assert first_offsets(offsets) == {"flights": {"0": 7, "1": 10}}
    late = options_for(cold_bucket, startingTimestamp="1012", startingOffsetsByTimestampStrategy="latest")
    assert first_offsets(late) == {"flights": {"0": 12, "1": 10}}


def test_a_partition_that_is_new_is_read_from_its_first_record(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 5)], [batches(3, 5)]])
    options = options_for(cold_bucket)
    start: Offsets = {"flights": {"0": 5}}
    end = next_end(start, available(options), None)
    assert read(options, start, end) == [(1, offset) for offset in range(3, 8)]
    assert plan_batch(options, end, end).tasks == []


def test_a_batch_has_the_same_tasks_whenever_it_is_planned(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 10), batches(10, 10)], [batches(0, 5)]])
    options = options_for(cold_bucket, maxRecordsPerPartition="8")
    start, end = {"flights": {"0": 3, "1": 0}}, {"flights": {"0": 20, "1": 5}}

    def rows_by_task() -> list[list[tuple[int, int]]]:
        with Bucket(options.store) as bucket:
            return [
                [
                    (row["partition"], row["offset"])
                    for split in task
                    if isinstance(split, Split)
                    for batch in scan_split(bucket, split, COLUMNS, read_committed=True)
                    for row in batch.to_pylist()
                ]
                for task in plan_batch(options, start, end).tasks
            ]

    before = rows_by_task()
    assert sorted(row for task in before for row in task) == [(0, o) for o in range(3, 20)] + [(1, o) for o in range(5)]
    assert len(before) > 2
    cold_bucket.extend("flights", 0, batches(20, 30))
    assert rows_by_task() == before, "offload adds records beyond the end"
    cold_bucket.merge("flights", 0, batches(0, 50))
    assert rows_by_task() == before, "merging moves the borders of segments"


def test_retention_between_plan_and_batch_is_an_error_or_left_out(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 10), batches(10, 10)]])
    options = options_for(cold_bucket)
    cold_bucket.extend("flights", 0, batches(20, 5), drop_below=10)
    with pytest.raises(Invalid, match="failOnDataLoss"):
        plan_batch(options, {"flights": {"0": 4}}, {"flights": {"0": 25}})
    rows = read(replace(options, fail_on_data_loss=False), {"flights": {"0": 4}}, {"flights": {"0": 25}})
    assert rows == [(0, offset) for offset in range(10, 25)]
