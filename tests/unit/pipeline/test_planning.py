"""Planning: every wanted block is read by exactly one split, whatever the bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.segment_entries import entry_of

from stratalog_core.errors import Invalid, NotFound
from stratalog_pipeline.options import EARLIEST, LATEST, SPLIT_BYTES, Assigned, Matching, Subscribed
from stratalog_pipeline.planning import (
    OPEN_BYTES,
    RECORD_BYTES,
    BrokerSplit,
    Cut,
    OffsetRange,
    PartitionName,
    SegmentSlice,
    Split,
    check_all_named,
    nearest,
    plan_repeatable_tasks,
    plan_splits,
    plan_tasks,
    position,
    resolve_topics,
    within,
)
from stratalog_tiering.format.manifest import SegmentEntry

NAME = PartitionName(topic="flights", topic_id=UUID(int=1), partition=0)


def segment(base: int, end: int, data_bytes: int) -> SegmentEntry:
    return entry_of(f"segments/{base}", base, end, data_bytes)


@st.composite
def histories(draw: st.DrawFn) -> list[SegmentEntry]:
    offset, entries = draw(st.integers(0, 50)), []
    for count, data_bytes in draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5000)), min_size=1, max_size=8)):
        entries.append(segment(offset, offset + count, data_bytes))
        offset += count
    return entries


@settings(max_examples=300)
@given(histories(), st.integers(0, 400), st.integers(0, 400), st.integers(1, 4000), st.integers(0, 30), st.integers(1, 40))
def test_each_wanted_offset_belongs_to_one_split(
    entries: list[SegmentEntry], first: int, length: int, split_bytes: int, records_max: int, splits_min: int
) -> None:
    offsets = OffsetRange(first=first, end=first + length)
    cut = Cut(split_bytes=split_bytes, records_max=records_max, splits_min=splits_min)
    splits = plan_splits([(NAME, offsets, entries)], cut)
    # A block may begin at any offset of a segment: count who would own it.
    for entry in entries:
        touched = entry.end_offset > offsets.first and entry.base_offset < offsets.end and length > 0
        for offset in range(entry.base_offset, entry.end_offset):
            owners = [
                piece
                for split in splits
                for piece in split.slices
                if piece.segment is entry and piece.blocks_from <= offset < piece.blocks_end
            ]
            assert len(owners) == (1 if touched else 0)
    borders = [piece.blocks_from for split in splits for piece in split.slices]
    assert borders == sorted(borders)


def test_neighbouring_small_segments_share_a_split() -> None:
    entries = [segment(number * 10, number * 10 + 10, 100) for number in range(10)]
    splits = plan_splits([(NAME, OffsetRange(first=0, end=100), entries)], Cut(split_bytes=300))
    assert [len(split.slices) for split in splits] == [3, 3, 3, 1]


def test_a_large_segment_is_cut_and_the_least_number_of_splits_reached() -> None:
    everything = OffsetRange(first=0, end=1000)
    by_bytes = plan_splits([(NAME, everything, [segment(0, 1000, 10_000)])], Cut(split_bytes=2500))
    assert [(s.slices[0].blocks_from, s.slices[0].blocks_end) for s in by_bytes] == [
        (0, 250), (250, 500), (500, 750), (750, 1000),
    ]  # fmt: skip
    assert len(plan_splits([(NAME, everything, [segment(0, 1000, 10_000)])], Cut(split_bytes=10**9, splits_min=8))) == 8
    assert len(plan_splits([(NAME, everything, [segment(0, 1000, 10_000)])], Cut(split_bytes=10**9, records_max=100))) == 10


def test_topics_are_found_by_name_pattern_and_assignment() -> None:
    counts = {"flights": 2, "flights-old": 1, "weather": 3}
    assert resolve_topics(Matching(pattern="fl.*"), counts) == {"flights": (0, 1), "flights-old": (0,)}
    assert resolve_topics(Matching(pattern="light"), counts) == {}
    internal = {"__consumer_offsets": 1, "__mine": 1}
    assert resolve_topics(Matching(pattern=".*"), internal) == {"__mine": (0,)}
    assert resolve_topics(Subscribed(topics=("__consumer_offsets",)), internal) == {"__consumer_offsets": (0,)}
    assert resolve_topics(Subscribed(topics=("weather",)), counts) == {"weather": (0, 1, 2)}
    assert resolve_topics(Assigned(partitions={"weather": (2,)}), counts) == {"weather": (2,)}
    with pytest.raises(NotFound, match=r"'birds' is not in this bucket; it has flights, flights-old, weather$"):
        resolve_topics(Subscribed(topics=("birds",)), counts)
    with pytest.raises(NotFound, match=r"'wether' is not in this bucket; did you mean 'weather'\?$"):
        resolve_topics(Subscribed(topics=("wether",)), counts)
    with pytest.raises(NotFound, match=r"'birds' is not in this bucket; it has none at all$"):
        resolve_topics(Assigned(partitions={"birds": (0,)}), {})
    with pytest.raises(Invalid, match="'flights' has 2 partitions; option 'assign' names partition 2"):
        resolve_topics(Assigned(partitions={"flights": (2,)}), counts)


def test_offsets_must_name_exactly_what_is_read() -> None:
    wanted = {"a": (0, 1)}
    check_all_named("startingOffsets", {"a": {0: 1, 1: 2}}, wanted)
    with pytest.raises(Invalid, match="'startingOffsets' does not name a-1"):
        check_all_named("startingOffsets", {"a": {0: 1}}, wanted)
    with pytest.raises(Invalid, match="'startingOffsets' names b-0"):
        check_all_named("startingOffsets", {"a": {0: 1, 1: 2}, "b": {0: 1}}, wanted)


def test_offsets_that_are_not_there_fail_or_are_left_out() -> None:
    cold = OffsetRange(first=10, end=20)
    assert (position(EARLIEST, cold), position(LATEST, cold), position(15, cold)) == (10, 20, 15)
    assert within(NAME, OffsetRange(first=12, end=18), cold, fail_on_data_loss=True) == OffsetRange(first=12, end=18)
    for first, end in ((9, 15), (15, 21), (21, 15)):
        with pytest.raises(Invalid, match=r"flights-0: offsets .* the bucket holds 10\.\.20"):
            within(NAME, OffsetRange(first=first, end=end), cold, fail_on_data_loss=True)
    assert within(NAME, OffsetRange(first=0, end=99), cold, fail_on_data_loss=False) == cold
    assert within(NAME, OffsetRange(first=30, end=40), cold, fail_on_data_loss=False) == OffsetRange(first=20, end=20)
    assert within(NAME, OffsetRange(first=15, end=12), cold, fail_on_data_loss=True) == OffsetRange(first=15, end=15)


def test_offsets_of_times_stay_within_what_was_available_when_the_plan_was_made() -> None:
    available = OffsetRange(first=10, end=20)
    assert [nearest(offset, available) for offset in (3, 10, 15, 20, 27)] == [10, 10, 15, 20, 20]


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 50 * 1024 * 1024)), max_size=40),
    st.integers(1, 128 * 1024 * 1024),
    st.sampled_from([0, 1, 100]),
    st.integers(1, 10),
)
def test_tasks_hold_every_split_once_and_in_order(
    sizes: list[tuple[int, int]], split_bytes: int, records_max: int, splits_min: int
) -> None:
    cut = Cut(split_bytes=split_bytes, records_max=records_max, splits_min=splits_min)
    splits: list[Split | BrokerSplit] = []
    for number, (records, stored) in enumerate(sizes):
        name = PartitionName(topic="t", topic_id=UUID(int=1), partition=number)
        offsets = OffsetRange(first=0, end=records)
        entry = segment(0, records, stored)
        piece = SegmentSlice(segment=entry, blocks_from=0, blocks_end=records)
        is_cold = number % 3 > 0
        splits.append(
            Split(name=name, offsets=offsets, slices=(piece,)) if is_cold else BrokerSplit(name=name, offsets=offsets)
        )
    tasks = plan_tasks(splits, cut)
    assert [split for task in tasks for split in task] == splits
    for task in tasks:
        assert len(task) == 1 or len(task) * OPEN_BYTES <= split_bytes
        assert len(task) == 1 or not records_max or sum(split.offsets.end for split in task) <= records_max


def test_a_thousand_quiet_partitions_are_read_by_a_few_tasks() -> None:
    name = partial(PartitionName, topic="t", topic_id=UUID(int=1))
    piece = SegmentSlice(segment=segment(0, 10, 1000), blocks_from=0, blocks_end=10)
    offsets = OffsetRange(first=0, end=10)
    splits = [Split(name=name(partition=number), offsets=offsets, slices=(piece,)) for number in range(1000)]
    assert len(plan_tasks(splits, Cut(split_bytes=SPLIT_BYTES))) == math.ceil(1000 / (SPLIT_BYTES // OPEN_BYTES - 1))


@given(
    ranges=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 300)), max_size=5),
    split_bytes=st.integers(1, 400_000),
    records_max=st.integers(0, 50),
    splits_min=st.integers(1, 20),
)
def test_repeatable_tasks_have_each_offset_once_and_few_records(
    ranges: list[tuple[int, int]], split_bytes: int, records_max: int, splits_min: int
) -> None:
    cut = Cut(split_bytes=split_bytes, records_max=records_max, splits_min=splits_min)
    wanted = [
        BrokerSplit(name=replace(NAME, partition=number), offsets=OffsetRange(first=first, end=first + length))
        for number, (first, length) in enumerate(ranges)
    ]
    tasks = plan_repeatable_tasks(wanted, cut)
    places = [(one.name, o) for task in tasks for one in task for o in range(one.offsets.first, one.offsets.end)]
    assert places == [(one.name, o) for one in wanted for o in range(one.offsets.first, one.offsets.end)]
    for task in tasks:
        records = sum(one.offsets.end - one.offsets.first for one in task)
        assert 0 < records <= (records_max or records)
        assert records * RECORD_BYTES <= max(split_bytes, RECORD_BYTES)
    assert len(tasks) >= min(splits_min, len(places))


def test_tasks_of_a_stream_are_as_large_as_those_of_a_batch_scan() -> None:
    """1.4 M records of 1 KB, which zstd stores in 260 bytes each: see ``make bench-spark``."""
    names = [replace(NAME, partition=number) for number in range(4)]
    offsets, cut = OffsetRange(first=0, end=350_000), Cut(split_bytes=SPLIT_BYTES)
    stored = [segment(first, first + 50_000, 50_000 * 260) for first in range(0, 350_000, 50_000)]
    scanned = plan_tasks(plan_splits([(name, offsets, stored) for name in names], cut), cut)
    streamed = plan_repeatable_tasks([BrokerSplit(name=name, offsets=offsets) for name in names], cut)
    assert len(scanned) / 1.5 <= len(streamed) <= len(scanned) * 1.5
