"""The driver's half of a read: turns its options into splits, with the manifest of each partition pinned.

Planning reads descriptors and manifests, and one block per partition for bounds by time; never footers, so that its cost grows
only with a history's index pages. Independent of Spark, and imports no kernel: the planner never decodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stratalog_core.errors import Invalid
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.catalog import History, load_history, load_segments
from stratalog_pipeline.options import AllAt, AtOffsets, AtTimestamp, AtTimestamps, Bound, PerPartition, ReadOptions
from stratalog_pipeline.planning import (
    Cut,
    OffsetRange,
    PartitionName,
    Split,
    check_all_named,
    chosen_topics,
    plan_splits,
    position,
    resolve_topics,
    within,
)
from stratalog_pipeline.pruning import EVERYTHING, Pruning


def plan_scan(bucket: Bucket, options: ReadOptions, pruning: Pruning = EVERYTHING) -> list[Split]:
    """Return the splits of a read, with the manifest of each partition pinned. Raises ``Invalid`` or ``Corrupt``."""
    topics = chosen_topics(bucket.topics(), options.wanted, options.topic_ids)
    wanted = resolve_topics(options.wanted, {name: topic.partition_count for name, topic in topics.items()})
    _check_bounds(options, wanted)
    planned = []
    for topic, numbers in wanted.items():
        for number in numbers:
            name = PartitionName(topic=topic, topic_id=topics[topic].topic_id, partition=number)
            if pruning.allows(topic, number):
                history = load_history(bucket, name)
                offsets = pruning.narrowed(_wanted_offsets(bucket, options, history))
                planned.append((name, offsets, load_segments(bucket, history, offsets)))
    cut = Cut(split_bytes=options.split_bytes, records_max=options.records_per_split_max, splits_min=options.min_partitions)
    return plan_splits(planned, cut)


def _check_bounds(options: ReadOptions, wanted: Mapping[str, Sequence[int]]) -> None:
    for side, bound in (("starting", options.start), ("ending", options.end)):
        if isinstance(bound, AtOffsets):
            check_all_named(f"{side}Offsets", bound.offsets, wanted)
        elif isinstance(bound, AtTimestamps):
            check_all_named(f"{side}OffsetsByTimestamp", bound.timestamps_ms, wanted)


def _wanted_offsets(bucket: Bucket, options: ReadOptions, history: History) -> OffsetRange:
    cold = history.offsets
    first = _resolve(bucket, options.start, history)
    end = _resolve(bucket, options.end, history)
    if first is None and not options.missing_timestamp_is_latest:
        raise Invalid(
            f"{history.name}: no record is as late as the wanted start; "
            "set startingOffsetsByTimestampStrategy to latest to read nothing of such partitions"
        )
    found = OffsetRange(first=cold.end if first is None else first, end=cold.end if end is None else end)
    return within(history.name, found, cold, fail_on_data_loss=options.fail_on_data_loss)


def _resolve(bucket: Bucket, bound: Bound, history: History) -> int | None:
    """Return the bound as an offset; None if no record is at or after its time."""
    if isinstance(bound, AllAt):
        return position(bound.position, history.offsets)
    if isinstance(bound, AtOffsets):
        return position(_of(bound.offsets, history.name), history.offsets)
    timestamp_ms = bound.timestamp_ms if isinstance(bound, AtTimestamp) else _of(bound.timestamps_ms, history.name)
    return None if history.pointer is None else bucket.offset_at(history.pointer, timestamp_ms)


def _of(values: PerPartition, name: PartitionName) -> int:
    return values[name.topic][name.partition]
