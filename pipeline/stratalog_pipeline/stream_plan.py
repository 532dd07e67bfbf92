"""Offsets of a stream: where it begins, how far its next batch goes, and which splits that batch has. Independent of Spark.

Offsets are those of Spark's Kafka source, ``{"topic": {"0": next offset}}``, so that a checkpoint looks the same. Partitions
that appear later are read from their first record.

The end of a query's first batch also has the offsets at which that batch begins, those of each topic under ``start:topic``.
Spark does not record them: whenever it plans the first batch, it asks again where the query begins, and "latest" is
elsewhere by then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Final, TypeAlias
from uuid import UUID

from stratalog_core.errors import Invalid
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import EARLIEST, AllAt, Assigned, AtOffsets, PerPartition, ReadOptions
from stratalog_pipeline.planning import LOSS_REMEDY, OffsetRange, PartitionName
from stratalog_pipeline.scan_plan import ScanPlan, partition_limits, plan_repeatable_scan
from stratalog_tiering.format.descriptor import TopicDescriptor

Offsets: TypeAlias = dict[str, dict[str, int]]
_START: Final = "start:"
"""No topic's name has a colon. Alone it says that offsets have a start, perhaps of no topic."""
Available: TypeAlias = Mapping[tuple[str, str], OffsetRange]
"""The available offsets by topic and partition; partitions are text, as in the checkpoint."""


class KnownTopics:
    """The ids of a query's topics. The offsets of a topic that was created again with the same name begin anew."""

    def __init__(self) -> None:
        self._ids: dict[str, UUID] = {}

    @property
    def ids(self) -> Mapping[str, UUID]:
        """The id of each topic, by name."""
        return self._ids

    def check(self, names: Iterable[PartitionName]) -> None:
        """Remember new topics. Raise ``Invalid`` if a known one has another id."""
        for name in names:
            known = self._ids.setdefault(name.topic, name.topic_id)
            if known != name.topic_id:
                raise Invalid(
                    f"topic {name.topic!r} was deleted and created again while it was read: its id was {known}, and is "
                    f"{name.topic_id}. Start with a new checkpoint, which reads the new topic from its first record",
                    topic=name.topic,
                )

    def created_again(self, names: Iterable[PartitionName]) -> set[str]:
        """Remember all topics. Return the names of those that had another id before."""
        found = {name.topic: name.topic_id for name in names}
        again = {topic for topic, topic_id in found.items() if self._ids.get(topic, topic_id) != topic_id}
        self._ids |= found
        return again


class StoredTopics:
    """The topics of the bucket as the current trigger has read them: for its offsets, and once more for its batch."""

    def __init__(self) -> None:
        self._read: list[TopicDescriptor] | None = None

    def read(self, bucket: Bucket) -> list[TopicDescriptor]:
        """Read the topics, and keep them for the batch of this trigger. Raises ``Corrupt``, ``Unavailable``."""
        self._read = bucket.topics()
        return self._read

    def take(self, bucket: Bucket) -> list[TopicDescriptor]:
        """Return the topics that are kept, once; read them if there are none, as for a batch that is planned again."""
        kept, self._read = self._read, None
        return bucket.topics() if kept is None else kept


def with_start(end: Offsets, start: Offsets) -> Offsets:
    """Return the end of a batch with the offsets at which it begins."""
    return {**end, _START: {}, **{_START + topic: numbers for topic, numbers in start.items()}}


def without_start(end: Offsets) -> tuple[Offsets, Offsets | None]:
    """Return the end of a batch, and the offsets at which it begins, if it has them. The inverse of :func:`with_start`."""
    own = {topic: numbers for topic, numbers in end.items() if not topic.startswith(_START)}
    if _START not in end:
        return own, None
    starts = {topic.removeprefix(_START): numbers for topic, numbers in end.items() if topic.startswith(_START)}
    del starts[""]
    return own, starts


def first_offsets(options: ReadOptions) -> Offsets:
    """Return the offsets at which a new stream begins. Raises ``Invalid``, ``NotFound``, ``Corrupt``, ``Unavailable``."""
    with Bucket(options.store, options.second_store) as bucket:
        limits = partition_limits(bucket, options)
    return _offsets({(name.topic, str(name.partition)): wanted.first for name, (_, wanted) in limits.items()})


def wanted_ranges(options: ReadOptions, topics: KnownTopics | None = None) -> Available:
    """Return what the options select of what can be read now; ``topics`` learns the ids. Raises as :func:`first_offsets`."""
    with Bucket(options.store, options.second_store) as bucket:
        limits = partition_limits(bucket, options)
    if topics is not None:
        topics.check(limits)
    return {(name.topic, str(name.partition)): wanted for name, (_, wanted) in limits.items()}


def available(options: ReadOptions, topics: KnownTopics | None = None, stored: StoredTopics | None = None) -> Available:
    """Return what can be read now. Raises as :func:`first_offsets`.

    Without ``failOnDataLoss``, topics and partitions that are named and missing are left out. If ``topics`` are given: raises
    as ``KnownTopics.check``; without ``failOnDataLoss`` a topic that was created again has nothing this time, which sets a
    stream back to its first record. ``stored`` keeps the topics for the batch.
    """
    everything = replace(options, start=AllAt(position=EARLIEST))
    with Bucket(options.store, options.second_store) as bucket:
        read = None if stored is None else stored.read(bucket)
        limits = partition_limits(bucket, everything, read, must_exist=options.fail_on_data_loss)
    again: set[str] = set()
    if topics is not None and options.fail_on_data_loss:
        topics.check(limits)
    elif topics is not None:
        again = topics.created_again(limits)
    return {
        (name.topic, str(name.partition)): OffsetRange(first=found.first, end=found.first) if name.topic in again else found
        for name, (found, _) in limits.items()
    }


def check_no_loss(start: Offsets, found: Available) -> None:
    """Raise ``Invalid`` if a stream stopped at an offset that does not exist any more."""
    for topic, partitions in start.items():
        for number, offset in partitions.items():
            held = found.get((topic, number))
            if held is None:
                raise Invalid(
                    f"{topic}-{number} does not exist any more, but the stream stopped at its offset {offset}; {LOSS_REMEDY}"
                )
            if not held.first <= offset <= held.end:
                raise Invalid(
                    f"{topic}-{number} has offsets {held.first}..{held.end}, but the stream stopped at {offset}: retention "
                    f"removed records, or the topic was created again; {LOSS_REMEDY}"
                )


def next_end(start: Offsets, found: Available, rows_max: int | None) -> Offsets:
    """Return the end of the next batch: all that is available, or about ``rows_max`` offsets of it, shared by size. Pure.

    Each partition that has something gets at least one offset, as in Spark's Kafka source.
    """
    begins = {place: _begin(start, place, held) for place, held in found.items()}
    sizes = {place: held.end - begins[place] for place, held in found.items()}
    total = sum(sizes.values())
    if rows_max is None or total <= rows_max:
        return _offsets({place: held.end for place, held in found.items()})
    shares = {place: rows_max * size / total for place, size in sizes.items()}
    return _offsets(
        {
            place: min(found[place].end, begins[place] + (math.ceil(share) if share < 1 else math.floor(share)))
            for place, share in shares.items()
        }
    )


def new_offsets(start: Offsets, found: Available) -> int:
    """Return the number of offsets after ``start``."""
    return sum(held.end - _begin(start, place, held) for place, held in found.items())


def is_set_back(start: Offsets, found: Available) -> bool:
    """Whether a partition ends before ``start``. The end of the next batch is lower then, so that later records are read."""
    return any(start.get(topic, {}).get(number, 0) > held.end for (topic, number), held in found.items())


def cut_at(found: Available, target: Offsets, start: Offsets) -> Available:
    """Return ``found`` up to ``target``. Partitions that ``target`` lacks have nothing after ``start``, if they are in it."""

    return {
        (topic, number): OffsetRange(first=held.first, end=max(held.first, min(held.end, end)))
        for (topic, number), held in found.items()
        if (end := target.get(topic, {}).get(number, start.get(topic, {}).get(number))) is not None
    }


def plan_batch(
    options: ReadOptions,
    start: Offsets,
    end: Offsets,
    topics: KnownTopics | None = None,
    stored: StoredTopics | None = None,
) -> ScanPlan:
    """Plan the batch from ``start`` to ``end``, whose tasks are the same whenever it is planned: a sink may rely on that.

    Reads only partitions with new offsets. Raises ``Invalid`` if some are lost, and as ``KnownTopics.check``.
    """
    firsts, ends = batch_bounds(start, end)
    if not ends:
        return ScanPlan(splits=[], tasks=[], cold_ends=[])
    batch = replace(
        options,
        wanted=Assigned(partitions={topic: tuple(sorted(numbers)) for topic, numbers in ends.items()}),
        start=AtOffsets(offsets=firsts),
        end=AtOffsets(offsets=ends),
        missing_tail="ignore",
    )
    with Bucket(options.store, options.second_store) as bucket:
        plan = plan_repeatable_scan(bucket, batch, None if stored is None else stored.take(bucket))
    if topics is not None:
        topics.check(split.name for split in chain.from_iterable(plan.tasks))
    return plan


def batch_bounds(start: Offsets, end: Offsets) -> tuple[PerPartition, PerPartition]:
    """Return first and end offsets of the partitions that have new ones; one that ``start`` lacks begins at its first."""
    firsts: PerPartition = {}
    ends: PerPartition = {}
    for topic, partitions in end.items():
        for number, offset in partitions.items():
            first = start.get(topic, {}).get(number, EARLIEST)
            if first < offset:
                firsts.setdefault(topic, {})[int(number)] = first
                ends.setdefault(topic, {})[int(number)] = offset
    return firsts, ends


def _begin(start: Offsets, place: tuple[str, str], held: OffsetRange) -> int:
    """Return the offset where a partition's read starts, clamped to the available range."""
    topic, number = place
    return min(max(start.get(topic, {}).get(number, held.first), held.first), held.end)


def _offsets(by_place: Mapping[tuple[str, str], int]) -> Offsets:
    offsets: Offsets = {}
    for (topic, number), offset in sorted(by_place.items()):
        offsets.setdefault(topic, {})[number] = offset
    return offsets
