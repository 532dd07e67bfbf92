"""When a partition's cold history is compacted, and which segments become one. No I/O.

The segments that are compacted come first: in them, each key occurs once. The rest is dirty, from the first segment that
was never compacted, or from where the map of the last pass was full. As in Kafka, a pass begins when the dirty bytes are more
than ``min.cleanable.dirty.ratio`` of all, or the oldest dirty record is older than ``max.compaction.lag.ms``. So a byte is
rewritten about 1 / ratio times for each byte that is written.

Never compacted are records whose hot copies are still there, locked segments, segments with a record younger than
``min.compaction.lag.ms``, and all that follow them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from stratalog_tiering.core.policy import CompactionPolicy
from stratalog_tiering.core.retention import newest_ms, oldest_ms
from stratalog_tiering.format.manifest import SegmentEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleanable:
    """The part of a history that a pass may compact. It is compacted below ``dirty_from``, and a pass ends at ``end_offset``.

    ``due_at_ms`` is the wall time from which a pass is due if nothing changes; None: only a change makes it due.
    """

    dirty_from: int
    end_offset: int
    clean_bytes: int
    dirty_bytes: int
    due_at_ms: int | None

    @property
    def dirty_ratio(self) -> float:
        return self.dirty_bytes / max(1, self.clean_bytes + self.dirty_bytes)


def cleanable(segments: Iterable[SegmentEntry], policy: CompactionPolicy, hot_offset: int, now_ms: int) -> Cleanable:
    """Measure the live segments of a manifest. ``hot_offset`` is the first offset with a hot copy, ``now_ms`` wall time."""
    dirty_from, end_offset, clean_bytes, dirty_bytes = -1, -1, 0, 0
    oldest_dirty_ms: int | None = None
    until_ms: int | None = None
    for entry in segments:
        end_offset = entry.base_offset if end_offset < 0 else end_offset
        is_dirty = dirty_from >= 0 or not entry.is_compacted or entry.options.dirty_from is not None
        # Without a lag nothing is too young, whatever its timestamp: producers' clocks may be ahead, as in Kafka.
        young_until_ms = newest_ms(entry) + policy.lag_ms_min if is_dirty and policy.lag_ms_min else 0
        free_at_ms = max(entry.options.lock_until_ms, young_until_ms)
        if entry.end_offset > hot_offset or free_at_ms > now_ms:
            until_ms = free_at_ms if entry.end_offset <= hot_offset else None
            break
        if is_dirty:
            if dirty_from < 0:
                dirty_from = entry.options.dirty_from if entry.options.dirty_from is not None else entry.base_offset
            dirty_bytes += entry.stored_bytes
            oldest_dirty_ms = oldest_ms(entry) if oldest_dirty_ms is None else min(oldest_dirty_ms, oldest_ms(entry))
        else:
            clean_bytes += entry.stored_bytes
        end_offset = entry.end_offset
    found = Cleanable(
        dirty_from=dirty_from if dirty_from >= 0 else end_offset, end_offset=end_offset, clean_bytes=clean_bytes,
        dirty_bytes=dirty_bytes, due_at_ms=until_ms,
    )  # fmt: skip
    return _with_due_time(found, policy, oldest_dirty_ms, now_ms)


def superseded_until(segments: Iterable[SegmentEntry], policy: CompactionPolicy, hot_offset: int, now_ms: int) -> int | None:
    """The end of what ``job compact`` looks at: all segments before the first that is young or has hot copies.

    Locked segments are within it: their records supersede others, and stay. None without such a segment.
    """
    end_offset: int | None = None
    for entry in segments:
        if entry.end_offset > hot_offset or is_young(entry, policy, now_ms):
            break
        end_offset = entry.end_offset
    return end_offset


def is_young(entry: SegmentEntry, policy: CompactionPolicy, now_ms: int) -> bool:
    """Whether ``min.compaction.lag.ms`` keeps a segment as it is at ``now_ms``."""
    return policy.lag_ms_min > 0 and newest_ms(entry) + policy.lag_ms_min > now_ms


def _with_due_time(found: Cleanable, policy: CompactionPolicy, oldest_dirty_ms: int | None, now_ms: int) -> Cleanable:
    if oldest_dirty_ms is None:
        return found
    times = [] if found.due_at_ms is None else [found.due_at_ms]
    if found.dirty_ratio > policy.dirty_ratio_min:
        times.append(now_ms)
    if policy.lag_ms_max is not None:
        times.append(oldest_dirty_ms + policy.lag_ms_max + 1)
    return replace(found, due_at_ms=min(times, default=None))


def next_group(
    segments: Sequence[SegmentEntry], position: int, end_offset: int, segment_bytes: int, span_ms: int | None
) -> tuple[SegmentEntry, ...]:
    """The segments from ``position`` on that become one, in the first page or root that has any; empty at ``end_offset``.

    ``segments`` are those of one page, or of the root: what becomes one must be listed in one place. The group has at most
    ``segment_bytes`` and spans at most ``span_ms``, or is a single segment.
    """
    group: list[SegmentEntry] = []
    total_bytes = 0
    for entry in segments:
        if entry.end_offset <= position:
            continue
        if entry.base_offset >= end_offset:
            break
        total_bytes += entry.stored_bytes
        oldest = min(oldest_ms(each) for each in (*group, entry))
        newest = max(newest_ms(each) for each in (*group, entry))
        is_too_long = span_ms is not None and newest - oldest > span_ms
        if group and (total_bytes > segment_bytes or is_too_long):
            break
        group.append(entry)
    return tuple(group)
