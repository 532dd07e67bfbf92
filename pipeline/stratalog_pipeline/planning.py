"""Selects the offsets of each partition to read and cuts them into splits. Pure: no store or broker is accessed here.

A split is a run of neighbouring segments, or a part of one, of one partition. Segments are cut by offsets, and each part owns
the blocks that *begin* within it: so every block is read by exactly one split, and the planner needs no footer. Splits of a
partition follow each other in offset order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from itertools import groupby, pairwise
from typing import Final, TypeVar, cast
from uuid import UUID

from stratalog_core.errors import Invalid, NotFound
from stratalog_pipeline.options import EARLIEST, LATEST, Assigned, Matching, PerPartition, Subscribed, Wanted
from stratalog_tiering.cold.archive import ambiguous_name
from stratalog_tiering.format.descriptor import TopicDescriptor
from stratalog_tiering.format.manifest import SegmentEntry

Item = TypeVar("Item")
OPEN_BYTES: Final = 4 * 1024 * 1024
"""Cost of opening a segment or a client, in bytes that could be read in the same time, as Spark's files.openCostInBytes."""
RECORD_BYTES: Final = 256
"""Assumed stored bytes of a record where only offsets are known. Records of 1 KB take about this much in zstd batches."""
PARTITIONS_LISTED: Final = 20
READ_THE_REST: Final = "Set failOnDataLoss to false to read what is there"
"""The remedy of a read by Spark for offsets that are missing."""
LOSS_REMEDY: Final = "set failOnDataLoss to false to continue with what is available, or start with a new checkpoint"
"""For streams."""
INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state"})
"""Not matched by a pattern (as by Kafka's consumers), only by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionName:
    """A partition of a topic, with the topic's id and its name."""

    topic: str
    topic_id: UUID
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetRange:
    """Offsets of one partition: first inclusive, end exclusive."""

    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSlice:
    """The blocks of a segment that begin from ``blocks_from`` (inclusive) to ``blocks_end`` (exclusive)."""

    segment: SegmentEntry
    blocks_from: int
    blocks_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The work of one task: ``slices`` in offset order. Records outside ``offsets`` are left out."""

    name: PartitionName
    offsets: OffsetRange
    slices: tuple[SegmentSlice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSplit:
    """The work of one task that reads from the brokers, because the bucket does not hold these offsets yet."""

    name: PartitionName
    offsets: OffsetRange


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdEnd:
    """The end of a partition in the bucket: ``end`` is exclusive, ``committed_at_ms`` 0 if nothing was ever offloaded."""

    name: PartitionName
    end: int
    committed_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Limits for cutting: stored bytes per split, records per split (0: no bound), and the minimum number of splits."""

    split_bytes: int
    records_max: int = 0
    splits_min: int = 1


def chosen_topics(topics: Sequence[TopicDescriptor], wanted: Wanted, topic_ids: frozenset[UUID]) -> dict[str, TopicDescriptor]:
    """Return the topics by name. ``topic_ids`` choose among topics that share a name.

    Raises ``Invalid`` if a wanted name has several topics and no id chooses one of them, or if the bucket has no topic with a
    given id. Names that are not wanted may be ambiguous.
    """
    unknown = topic_ids - {topic.topic_id for topic in topics}
    if unknown:
        raise Invalid(f"option 'topicIds' names {min(unknown)}, which is not in the bucket; it may have been deleted")
    chosen: dict[str, TopicDescriptor] = {}
    for name, group in groupby(topics, key=lambda topic: topic.name):
        namesakes = list(group)
        left = [topic for topic in namesakes if topic.topic_id in topic_ids] or namesakes
        if len(left) > 1 and is_wanted(wanted, name):
            raise Invalid(f"{ambiguous_name(name, left)}; set option 'topicIds' to one of them", topic=name)
        chosen[name] = left[0]
    return chosen


def is_wanted(wanted: Wanted, topic: str) -> bool:
    """Return whether the options select this topic. A pattern never matches internal topics."""
    if isinstance(wanted, Matching):
        return topic not in INTERNAL_TOPICS and wanted.matches(topic)
    return topic in (wanted.topics if isinstance(wanted, Subscribed) else wanted.partitions)


def with_live_topics(
    cold: Sequence[TopicDescriptor], live: Sequence[TopicDescriptor], topic_ids: frozenset[UUID]
) -> list[TopicDescriptor]:
    """Return the topics of the bucket and those of the brokers, sorted by name.

    A topic that the brokers serve hides older topics of the same name in the bucket, except those in ``topic_ids``.
    """
    by_name = {topic.name: topic for topic in live}
    live_ids = {topic.topic_id for topic in live}
    hidden = {topic.topic_id for topic in cold if topic.name in by_name} - topic_ids
    only_cold = [topic for topic in cold if topic.topic_id not in hidden | live_ids]
    return sorted([*only_cold, *live], key=lambda topic: topic.name)


def resolve_topics(wanted: Wanted, partition_counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the partitions to read, by topic.

    Raises ``NotFound`` for a requested topic that the bucket lacks, ``Invalid`` for a partition that the topic lacks.
    """
    if isinstance(wanted, Matching):
        matching = (topic for topic in partition_counts if is_wanted(wanted, topic))
        return {topic: tuple(range(partition_counts[topic])) for topic in matching}
    names = wanted.topics if isinstance(wanted, Subscribed) else tuple(wanted.partitions)
    for name in names:
        if name not in partition_counts:
            near = get_close_matches(name, partition_counts, 1)
            known = ", ".join(sorted(partition_counts)[:20]) or "none at all"
            hint = f"did you mean {near[0]!r}?" if near else f"it has {known}"
            raise NotFound(f"topic {name!r} is not in this bucket; {hint}", topic=name)
    if isinstance(wanted, Subscribed):
        return {topic: tuple(range(partition_counts[topic])) for topic in names}
    return {topic: _assigned(wanted, topic, partition_counts[topic]) for topic in names}


def _assigned(wanted: Assigned, topic: str, partition_count: int) -> tuple[int, ...]:
    for number in wanted.partitions[topic]:
        if number >= partition_count:
            raise Invalid(f"topic {topic!r} has {partition_count} partitions; option 'assign' names partition {number}")
    return wanted.partitions[topic]


def still_existing(
    wanted: Assigned, partition_counts: Mapping[str, int], *, fail_on_data_loss: bool
) -> dict[str, tuple[int, ...]]:
    """Return the partitions of ``wanted`` that exist. With ``fail_on_data_loss`` raises ``Invalid`` if one does not."""
    kept: dict[str, tuple[int, ...]] = {}
    for topic, numbers in wanted.partitions.items():
        count = partition_counts.get(topic, 0)
        if numbers and max(numbers) >= count and fail_on_data_loss:
            lost = next(number for number in numbers if number >= count)
            raise Invalid(f"{topic}-{lost} does not exist any more, but the stream has yet to read it; {LOSS_REMEDY}")
        kept[topic] = tuple(number for number in numbers if number < count)
    return {topic: numbers for topic, numbers in kept.items() if numbers}


def existing(wanted: Wanted, partition_counts: Mapping[str, int]) -> Wanted:
    """Return ``wanted`` without what it names and the bucket lacks."""
    if isinstance(wanted, Subscribed):
        return Subscribed(topics=tuple(topic for topic in wanted.topics if topic in partition_counts))
    if isinstance(wanted, Assigned):
        return Assigned(partitions=still_existing(wanted, partition_counts, fail_on_data_loss=False))
    return wanted


def check_all_named(option: str, values: PerPartition, wanted: Mapping[str, Sequence[int]]) -> None:
    """Raise ``Invalid`` unless ``values`` names exactly the wanted partitions, as Spark's Kafka source requires."""
    named = {(topic, number) for topic, numbers in values.items() for number in numbers}
    expected = {(topic, number) for topic, numbers in wanted.items() for number in numbers}
    if named != expected:
        topic, number = sorted(named ^ expected)[0]
        problem = "names" if (topic, number) in named else "does not name"
        raise Invalid(f"option {option!r} {problem} {topic}-{number}: it must name exactly the partitions that are read")


def position(offset: int, available: OffsetRange) -> int:
    """Return ``offset``, with ``EARLIEST`` and ``LATEST`` replaced by the limits of ``available``."""
    return {EARLIEST: available.first, LATEST: available.end}.get(offset, offset)


def nearest(offset: int, available: OffsetRange) -> int:
    """Clamp the offset of a time to ``available``: the brokers may have found a record that was added or removed since."""
    return min(max(offset, available.first), available.end)


def within(
    name: PartitionName, wanted: OffsetRange, available: OffsetRange, *, is_live: bool = False, fail_on_data_loss: bool
) -> OffsetRange:
    """Return ``wanted`` cut to ``available``. With ``fail_on_data_loss`` raises ``Invalid`` if anything is cut off.

    ``is_live``: the brokers were asked what is available; otherwise it is what the bucket holds.
    """
    if fail_on_data_loss and (wanted.first < available.first or max(wanted.first, wanted.end) > available.end):
        holder = "the topic" if is_live else "the bucket"
        beyond = "nothing is committed" if is_live else "nothing is offloaded, and kafka.bootstrap.servers is not set"
        raise Invalid(
            f"{name}: offsets {wanted.first}..{wanted.end} are requested; {holder} holds {available.first}..{available.end}. "
            f"Retention removed the records below; beyond the end {beyond}. {READ_THE_REST}",
            topic=name.topic,
            partition=name.partition,
        )
    first = min(max(wanted.first, available.first), available.end)
    return OffsetRange(first=first, end=max(first, min(wanted.end, available.end)))


def outside(wanted: OffsetRange, cold: OffsetRange) -> list[OffsetRange]:
    """Return the offsets of ``wanted`` that ``cold`` lacks, in order: those before it and those after it."""
    before = OffsetRange(first=wanted.first, end=min(wanted.end, cold.first))
    after = OffsetRange(first=max(wanted.first, cold.end), end=wanted.end)
    pieces = (before, after) if cold.first < cold.end else (wanted,)
    return [piece for piece in pieces if piece.first < piece.end]


def describe_missing_tail(ends: Sequence[ColdEnd]) -> str:
    """Return the message that says where a read without brokers ended."""
    listed = ", ".join(_described(end) for end in ends[:PARTITIONS_LISTED])
    more = f" and {len(ends) - PARTITIONS_LISTED} more partitions" if len(ends) > PARTITIONS_LISTED else ""
    return (
        f"only the bucket is read, which ends at {listed}{more}; newer records are not read. Set kafka.bootstrap.servers "
        "to read them from the brokers, or missingTail to ignore if the bucket is all you want"
    )


def _described(end: ColdEnd) -> str:
    if not end.committed_at_ms:
        return f"{end.name} (nothing offloaded)"
    committed_at = datetime.fromtimestamp(end.committed_at_ms / 1000, UTC).isoformat(timespec="seconds")
    return f"{end.name} offset {end.end} (manifest of {committed_at})"


def plan_splits(partitions: Sequence[tuple[PartitionName, OffsetRange, Sequence[SegmentEntry]]], cut: Cut) -> list[Split]:
    """Return the splits of all partitions. ``segments`` of each must cover its offsets; segments outside them are ignored."""
    wanted = [(name, offsets, _overlapping(segments, offsets)) for name, offsets, segments in partitions]
    split_bytes = _split_bytes(wanted, cut)
    splits: list[Split] = []
    for name, offsets, segments in wanted:
        slices = _pieces(segments, offsets, split_bytes, cut.records_max)
        splits.extend(Split(name=name, offsets=offsets, slices=run) for run in grouped(slices, split_bytes, cut.records_max))
    return splits


def _overlapping(segments: Sequence[SegmentEntry], offsets: OffsetRange) -> list[SegmentEntry]:
    if offsets.first >= offsets.end:
        return []
    return [entry for entry in segments if entry.end_offset > offsets.first and entry.base_offset < offsets.end]


def whole_segments(segments: Sequence[SegmentEntry], offsets: OffsetRange) -> tuple[SegmentSlice, ...]:
    """Return the segments that have some of ``offsets``, each as a whole."""
    return tuple(
        SegmentSlice(segment=entry, blocks_from=entry.base_offset, blocks_end=entry.end_offset)
        for entry in _overlapping(segments, offsets)
    )


def _split_bytes(wanted: Sequence[tuple[PartitionName, OffsetRange, Sequence[SegmentEntry]]], cut: Cut) -> int:
    """Return the bytes per split: at most ``split_bytes``, and few enough for ``splits_min`` splits.

    Approximate, because bytes are spread unevenly over offsets and blocks are not cut.
    """
    total = sum(_bytes_within(entry, offsets) for _, offsets, segments in wanted for entry in segments)
    return max(1, min(cut.split_bytes, total // max(cut.splits_min, 1)))


def _bytes_within(entry: SegmentEntry, offsets: OffsetRange) -> int:
    inside = min(entry.end_offset, offsets.end) - max(entry.base_offset, offsets.first)
    return entry.data_bytes * inside // (entry.end_offset - entry.base_offset)


def _pieces(
    segments: Sequence[SegmentEntry], offsets: OffsetRange, split_bytes: int, records_max: int
) -> Iterator[tuple[SegmentSlice, int, int]]:
    """Yield ``(slice, its bytes, its records)`` in offset order; bytes and records are approximate."""
    for entry in segments:
        first, end = max(entry.base_offset, offsets.first), min(entry.end_offset, offsets.end)
        stored = _bytes_within(entry, offsets)
        count = max(1, math.ceil(stored / split_bytes), math.ceil((end - first) / records_max) if records_max else 1)
        count = min(count, end - first)
        borders = [first + (end - first) * number // count for number in range(count + 1)]
        # The outer borders are the segment's own: its first block may begin before the first wanted record.
        borders[0], borders[-1] = entry.base_offset, entry.end_offset
        for blocks_from, blocks_end in pairwise(borders):
            piece = SegmentSlice(segment=entry, blocks_from=blocks_from, blocks_end=blocks_end)
            yield piece, stored // count, (end - first) // count


def plan_tasks(splits: Sequence[Split | BrokerSplit], cut: Cut) -> list[tuple[Split | BrokerSplit, ...]]:
    """Join neighbouring splits into tasks of at most ``split_bytes``: a thousand small partitions are not a thousand tasks.

    Every segment counts ``OPEN_BYTES`` more than its bytes: it costs requests of its own. Limits on records per split and on
    the number of splits hold for tasks.
    """
    weights = [_weight(split) for split in splits]
    bytes_max = min(cut.split_bytes, sum(weights) // max(cut.splits_min, 1))
    return grouped(zip(splits, weights, map(_records, splits), strict=True), bytes_max, cut.records_max)


def grouped(items: Iterable[tuple[Item, int, int]], bytes_max: int, count_max: int = 0) -> list[tuple[Item, ...]]:
    """Join neighbouring items, each with its bytes and its count, into groups within both limits.

    An item that exceeds a limit is a group of its own. ``count_max`` limits the sum of counts, such as records; 0: no limit.
    """
    groups: list[list[Item]] = []
    group_bytes = group_count = 0
    for item, size, count in items:
        if not groups or group_bytes + size > bytes_max or (count_max and group_count + count > count_max):
            groups.append([])
            group_bytes = group_count = 0
        groups[-1].append(item)
        group_bytes, group_count = group_bytes + size, group_count + count
    return [tuple(group) for group in groups]


def cut_ranges(ranges: Sequence[BrokerSplit], beside: Sequence[Split], cut: Cut) -> list[BrokerSplit]:
    """Cut the brokers' ranges to the limits of tasks. Their sizes are not known: a record counts ``RECORD_BYTES``.

    The minimum number of splits is one for these ranges and ``beside``, the splits in the bucket, together.
    """
    total_bytes = sum(map(_stored_bytes, beside)) + sum(map(_records, ranges)) * RECORD_BYTES
    records_max = max(1, min(cut.split_bytes, total_bytes // max(cut.splits_min, 1)) // RECORD_BYTES)
    records_max = min(records_max, cut.records_max) if cut.records_max else records_max
    return [piece for one in ranges for piece in _equal_pieces(one, records_max)]


def plan_repeatable_tasks(ranges: Sequence[BrokerSplit], cut: Cut) -> list[tuple[BrokerSplit, ...]]:
    """Cut ranges of offsets into tasks by the offsets alone: the same ranges and limits always make the same tasks."""
    return cast("list[tuple[BrokerSplit, ...]]", plan_tasks(cut_ranges(ranges, (), cut), cut))


def _equal_pieces(split: BrokerSplit, records_max: int) -> Iterator[BrokerSplit]:
    first, records = split.offsets.first, _records(split)
    count = math.ceil(records / records_max)
    borders = [first + records * number // count for number in range(count + 1)] if count else []
    for begin, end in pairwise(borders):
        yield BrokerSplit(name=split.name, offsets=OffsetRange(first=begin, end=end))


def _weight(split: Split | BrokerSplit) -> int:
    if isinstance(split, BrokerSplit):
        return OPEN_BYTES + _records(split) * RECORD_BYTES
    return OPEN_BYTES * len(split.slices) + _stored_bytes(split)


def _stored_bytes(split: Split) -> int:
    return sum(_bytes_within(piece.segment, _range_of(piece)) for piece in split.slices)


def _records(split: Split | BrokerSplit) -> int:
    ranges = [split.offsets] if isinstance(split, BrokerSplit) else [_range_of(piece) for piece in split.slices]
    return sum(one.end - one.first for one in ranges)


def _range_of(piece: SegmentSlice) -> OffsetRange:
    return OffsetRange(first=piece.blocks_from, end=piece.blocks_end)
