"""The driver's half of a read: turns its options into splits, with the manifest of each partition pinned.

Planning reads descriptors and manifests, and one block per partition for bounds by time; never footers, so that its cost grows
only with a history's index pages. Manifests are pinned before the brokers are asked for their limits: offload may go on, and
each offset is still read exactly once, from the bucket if the pinned manifest holds it, else from the brokers. Independent of
Spark, and imports no kernel: the planner never decodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Invalid, NotFound
from stratalog_pipeline.brokers import Brokers
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.catalog import History, load_segments, load_wanted
from stratalog_pipeline.options import (
    LATEST,
    AllAt,
    Assigned,
    AtOffsets,
    AtTimestamp,
    AtTimestamps,
    Bound,
    PerPartition,
    ReadOptions,
)
from stratalog_pipeline.planning import (
    BrokerSplit,
    ColdEnd,
    Cut,
    OffsetRange,
    PartitionName,
    Split,
    check_all_named,
    chosen_topics,
    cut_ranges,
    existing,
    nearest,
    outside,
    plan_repeatable_tasks,
    plan_splits,
    plan_tasks,
    position,
    resolve_topics,
    still_existing,
    whole_segments,
    with_live_topics,
    within,
)
from stratalog_pipeline.pruning import ANY_TIME, EVERYTHING, Pruning, TimeRange
from stratalog_tiering.format.descriptor import TopicDescriptor
from stratalog_tiering.format.manifest import SegmentEntry

REQUESTS_MAX: Final = 64
"""Requests to the store at a time while planning."""
SURVEY_S_MAX: Final = 10.0
SURVEY_PAUSE_S: Final = 0.2
"""Time to plan a read while topics are deleted and created, and the pause between attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanPlan:
    """The tasks of one read, and those of their splits that are read from the bucket.

    ``cold_ends``: partitions that are read up to the end of the bucket, beyond which newer records may exist.
    """

    splits: list[Split]
    tasks: list[tuple[Split | BrokerSplit, ...]]
    cold_ends: list[ColdEnd]


def plan_scan(bucket: Bucket, options: ReadOptions, pruning: Pruning = EVERYTHING) -> ScanPlan:
    """Plan a read. Raises ``Invalid``, ``NotFound``, ``Corrupt``, ``Unavailable``."""
    topics, histories, bounds = _survey(bucket, options, pruning)
    if not options.client and options.missing_tail != "ignore":
        _check_offloaded(topics, histories)
    return _planned(bucket, options, pruning, histories, bounds)


def plan_repeatable_scan(bucket: Bucket, options: ReadOptions, stored: Sequence[TopicDescriptor] | None = None) -> ScanPlan:
    """Plan a read between two offsets whose tasks have the same records whenever it is planned.

    Offload and merging may continue. Without ``failOnDataLoss``, partitions that were deleted meanwhile are left out.
    ``stored`` are the bucket's topics if they were just read. Raises as :func:`plan_scan`.
    """
    _, histories, bounds = _survey(bucket, options, EVERYTHING, stored, is_repeatable=True)
    ordered = sorted(histories, key=lambda history: (history.name.topic, history.name.partition))
    requested = [BrokerSplit(name=history.name, offsets=bounds.requested(history)) for history in ordered]
    wanted = [(history, bounds.wanted(history)) for history in ordered]
    loaded = bucket.run(bounded_map(partial(_cold_segments, bucket, ANY_TIME), wanted, REQUESTS_MAX))
    segments = {name: entries for name, _, entries in loaded}
    held = {history.name: (history, offsets) for history, offsets in wanted}

    def resolved(piece: BrokerSplit) -> Iterator[Split | BrokerSplit]:
        history, available = held[piece.name]
        offsets = within(piece.name, piece.offsets, available, fail_on_data_loss=False)
        cold = within(piece.name, offsets, history.offsets, fail_on_data_loss=False)
        if slices := whole_segments(segments[piece.name], cold):
            yield Split(name=piece.name, offsets=cold, slices=slices)
        if history.name in bounds.live:
            yield from (BrokerSplit(name=piece.name, offsets=hot) for hot in outside(offsets, history.offsets))

    tasks = [
        tuple(chain.from_iterable(resolved(piece) for piece in task))
        for task in plan_repeatable_tasks(requested, _cut(options))
    ]
    splits = [split for split in chain.from_iterable(tasks) if isinstance(split, Split)]
    return ScanPlan(splits=splits, tasks=tasks, cold_ends=[])


def partition_limits(
    bucket: Bucket, options: ReadOptions, stored: Sequence[TopicDescriptor] | None = None, *, must_exist: bool = True
) -> dict[PartitionName, tuple[OffsetRange, OffsetRange]]:
    """Return two ranges per selected partition: what the brokers, or else the bucket, have, and what the options select.

    ``stored`` are the bucket's topics if they were just read. Unless they ``must_exist``, topics and partitions that are named
    and missing are left out. Raises as :func:`plan_scan`.
    """
    _, histories, bounds = _survey(bucket, options, EVERYTHING, stored, must_exist=must_exist)
    return {history.name: (bounds.available(history), bounds.wanted(history)) for history in histories}


def _survey(
    bucket: Bucket,
    options: ReadOptions,
    pruning: Pruning,
    stored: Sequence[TopicDescriptor] | None = None,
    *,
    is_repeatable: bool = False,
    must_exist: bool = True,
) -> tuple[dict[str, TopicDescriptor], list[History], _Bounds]:
    """Return the topics, the pinned histories of the selected partitions, and the bounds of the read."""
    brokers = Brokers(options) if options.client else None
    deadline = time.monotonic() + SURVEY_S_MAX
    while True:
        live = brokers.topics(options.wanted) if brokers is not None else []
        topics = _topics(bucket.topics() if stored is None else stored, options, live)
        if is_repeatable:
            assert isinstance(options.wanted, Assigned), "a batch of a stream names its partitions"
            wanted = still_existing(options.wanted, _counts(topics), fail_on_data_loss=options.fail_on_data_loss)
        else:
            counts = _counts(topics)
            wanted = resolve_topics(options.wanted if must_exist else existing(options.wanted, counts), counts)
            _check_bounds(options, wanted)
        names = [name for name in _names(topics, wanted) if pruning.allows(name.topic, name.partition)]
        histories = bucket.run(bounded_map(partial(load_wanted, bucket, options), names, REQUESTS_MAX))
        try:
            return topics, histories, _bounds(bucket, options, brokers, live, histories)
        except NotFound:
            # A topic was deleted since the brokers listed it, and a pattern goes on without it; or it is new, and its leader
            # does not know it yet.
            if brokers is None or time.monotonic() >= deadline:
                raise
            time.sleep(SURVEY_PAUSE_S)


def wanted_partitions(bucket: Bucket, options: ReadOptions) -> list[PartitionName]:
    """Return the partitions that the options select. Raises ``Invalid``, ``NotFound``, ``Unavailable``."""
    live = Brokers(options).topics(options.wanted) if options.client else []
    topics = _topics(bucket.topics(), options, live)
    return _names(topics, resolve_topics(options.wanted, _counts(topics)))


def wanted_topics(options: ReadOptions) -> list[str]:
    """Return the names of the topics that the options select. Raises as :func:`wanted_partitions`."""
    with Bucket(options.store, options.second_store) as bucket:
        return list(dict.fromkeys(name.topic for name in wanted_partitions(bucket, options)))


def _topics(
    stored: Sequence[TopicDescriptor], options: ReadOptions, live: Sequence[TopicDescriptor]
) -> dict[str, TopicDescriptor]:
    return chosen_topics(with_live_topics(stored, live, options.topic_ids), options.wanted, options.topic_ids)


def _counts(topics: Mapping[str, TopicDescriptor]) -> dict[str, int]:
    return {name: topic.partition_count for name, topic in topics.items()}


def _names(topics: Mapping[str, TopicDescriptor], wanted: Mapping[str, Sequence[int]]) -> list[PartitionName]:
    return [
        PartitionName(topic=topic, topic_id=topics[topic].topic_id, partition=number)
        for topic, numbers in wanted.items()
        for number in numbers
    ]


def _planned(bucket: Bucket, options: ReadOptions, pruning: Pruning, histories: Sequence[History], bounds: _Bounds) -> ScanPlan:
    from_brokers: list[BrokerSplit] = []
    in_bucket: list[tuple[History, OffsetRange]] = []
    for history in histories:
        offsets = pruning.narrowed(bounds.wanted(history))
        if history.name in bounds.live:
            from_brokers += [BrokerSplit(name=history.name, offsets=piece) for piece in outside(offsets, history.offsets)]
            offsets = within(history.name, offsets, history.offsets, fail_on_data_loss=False)
        in_bucket.append((history, offsets))
    cold = bucket.run(bounded_map(partial(_cold_segments, bucket, pruning.times), in_bucket, REQUESTS_MAX))
    cut = _cut(options)
    ends = [
        ColdEnd(name=history.name, end=history.offsets.end, committed_at_ms=history.committed_at_ms)
        for history in histories
        if history.name not in bounds.live and bounds.ends_at_latest(history)
    ]
    splits = plan_splits(cold, cut)
    tasks = plan_tasks([*splits, *cut_ranges(from_brokers, splits, cut)], cut)
    return ScanPlan(splits=splits, tasks=tasks, cold_ends=ends)


async def _cold_segments(
    bucket: Bucket, times: TimeRange, of: tuple[History, OffsetRange]
) -> tuple[PartitionName, OffsetRange, list[SegmentEntry]]:
    history, offsets = of
    return history.name, offsets, await load_segments(bucket, history, offsets, times)


def _cut(options: ReadOptions) -> Cut:
    return Cut(split_bytes=options.split_bytes, records_max=options.records_per_split_max, splits_min=options.min_partitions)


def _check_offloaded(topics: Mapping[str, TopicDescriptor], histories: Sequence[History]) -> None:
    """Raise ``NotFound`` for a topic without history, if all of its partitions were looked up."""
    for name, topic in topics.items():
        looked_at = [history for history in histories if history.name.topic == name]
        if len(looked_at) == topic.partition_count > 0 and all(history.pointer is None for history in looked_at):
            raise NotFound(
                f"topic {name!r} has no history in the bucket yet: nothing was offloaded. Set kafka.bootstrap.servers to read "
                "it from the brokers, offload it (`stratalog tier offload`), or set missingTail to ignore",
                topic=name,
            )


def _check_bounds(options: ReadOptions, wanted: Mapping[str, Sequence[int]]) -> None:
    if options.manifest_versions:
        check_all_named("manifestVersion", options.manifest_versions, wanted)
    for side, bound in (("starting", options.start), ("ending", options.end)):
        if isinstance(bound, AtOffsets):
            check_all_named(f"{side}Offsets", bound.offsets, wanted)
        elif isinstance(bound, AtTimestamps):
            check_all_named(f"{side}OffsetsByTimestamp", bound.timestamps_ms, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """Both bounds of a read as offsets; None if no record is that recent. ``live``: limits of partitions that brokers serve."""

    options: ReadOptions
    live: Mapping[PartitionName, OffsetRange]
    firsts: Mapping[PartitionName, int | None]
    ends: Mapping[PartitionName, int | None]

    def available(self, history: History) -> OffsetRange:
        return self.live.get(history.name, history.offsets)

    def requested(self, history: History) -> OffsetRange:
        """Return the bounds of a read between two offsets, whatever is available.

        Raises ``Invalid``, with ``failOnDataLoss``, if the read begins at the first record and that is beyond its end by now.
        """
        first, end = self.firsts[history.name], self.ends[history.name]
        assert first is not None, "only a time may have no offset"
        assert end is not None, "only a time may have no offset"
        if first > end > 0:
            # The end was chosen while the partition, of which nothing was read, still had the record before it.
            self._within(history, OffsetRange(first=end - 1, end=end))
        return OffsetRange(first=first, end=max(first, end))

    def wanted(self, history: History) -> OffsetRange:
        name, available = history.name, self.available(history)
        first, end = self.firsts[name], self.ends[name]
        if first is None and not self.options.missing_timestamp_is_latest:
            raise Invalid(
                f"{name}: there is no record at or after the requested start time; "
                "set startingOffsetsByTimestampStrategy to latest to read nothing of such partitions"
            )
        if first is not None and end is not None and first > end and self._is_given(history):
            raise Invalid(
                f"{name}: the read starts at offset {first}, which is after its end, {end}: exchange or correct the bounds",
                topic=name.topic,
                partition=name.partition,
            )
        found = OffsetRange(first=available.end if first is None else first, end=available.end if end is None else end)
        return self._within(history, found)

    def _within(self, history: History, wanted: OffsetRange) -> OffsetRange:
        name, fails = history.name, self.options.fail_on_data_loss
        return within(name, wanted, self.available(history), is_live=name in self.live, fail_on_data_loss=fails)

    def ends_at_latest(self, history: History) -> bool:
        bound = self.options.end
        offset = _of(bound.offsets, history.name) if isinstance(bound, AtOffsets) else LATEST
        return offset == LATEST and self.ends[history.name] in (None, history.offsets.end)

    def _is_given(self, history: History) -> bool:
        """Return whether both bounds are explicit offsets or times: only then is a start after the end the user's mistake."""
        return not any(
            isinstance(bound, AllAt) or (isinstance(bound, AtOffsets) and _of(bound.offsets, history.name) < 0)
            for bound in (self.options.start, self.options.end)
        )


def _bounds(
    bucket: Bucket, options: ReadOptions, brokers: Brokers | None, live: Sequence[TopicDescriptor], histories: Sequence[History]
) -> _Bounds:
    live_ids = {topic.topic_id for topic in live}
    names = [history.name for history in histories if history.name.topic_id in live_ids]
    limits = brokers.limits(names) if brokers is not None else {}
    sides = [_resolved(bucket, brokers, bound, histories, limits) for bound in (options.start, options.end)]
    return _Bounds(options=options, live=limits, firsts=sides[0], ends=sides[1])


def _resolved(
    bucket: Bucket,
    brokers: Brokers | None,
    bound: Bound,
    histories: Iterable[History],
    live: Mapping[PartitionName, OffsetRange],
) -> dict[PartitionName, int | None]:
    """Return the bound as offsets. The brokers resolve times of the partitions that they serve, the bucket those of others."""
    if isinstance(bound, AllAt | AtOffsets):
        return {
            history.name: position(
                bound.position if isinstance(bound, AllAt) else _of(bound.offsets, history.name),
                live.get(history.name, history.offsets),
            )
            for history in histories
        }
    times = {
        history: bound.timestamp_ms if isinstance(bound, AtTimestamp) else _of(bound.timestamps_ms, history.name)
        for history in histories
    }
    asked = {history.name: time_ms for history, time_ms in times.items() if history.name in live}
    at_brokers = brokers.offsets_at(asked) if brokers is not None else {}
    found = {name: None if offset is None else nearest(offset, live[name]) for name, offset in at_brokers.items()}

    async def cold_offset(of: tuple[History, int]) -> int | None:
        history, time_ms = of
        return None if history.pointer is None else await bucket.offset_at(history.pointer, time_ms)

    in_bucket = [(history, time_ms) for history, time_ms in times.items() if history.name not in live]
    offsets = bucket.run(bounded_map(cold_offset, in_bucket, REQUESTS_MAX))
    return found | {history.name: offset for (history, _), offset in zip(in_bucket, offsets, strict=True)}


def _of(values: PerPartition, name: PartitionName) -> int:
    return values[name.topic][name.partition]
