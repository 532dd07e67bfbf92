"""Finds the parts of a replay's windows that retention removed before the replay came to them. Pure.

The windows stay as they were planned, so that one that was interrupted is the same batch to the sink when it is sent again.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stratalog_pipeline.options import PerPartition
from stratalog_pipeline.stream_plan import Available, Offsets, batch_bounds


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets that retention removed before the replay came to them. ``end_offset`` is exclusive."""

    topic: str
    partition: int
    start_offset: int
    end_offset: int


def readable(held: Available, start: Offsets, end: Offsets) -> tuple[PerPartition, PerPartition, list[Gap]]:
    """Return the bounds of the offsets that are left of the window from ``start`` to ``end``, and the gaps.

    ``held`` are the offsets that exist now. If nothing is left, the bounds are an empty range of each partition: the window is
    a batch all the same.
    """
    firsts, ends = batch_bounds(start, end)
    gaps = list[Gap]()
    for topic, numbers in ends.items():
        for number, until in numbers.items():
            first, lowest = firsts[topic][number], min(held[topic, str(number)].first, until)
            if lowest > first:
                gaps.append(Gap(topic=topic, partition=number, start_offset=first, end_offset=lowest))
                firsts[topic][number] = lowest
    left = {
        topic: kept
        for topic, numbers in ends.items()
        if (kept := {number: until for number, until in numbers.items() if firsts[topic][number] < until})
    }
    if left:
        return {topic: {number: firsts[topic][number] for number in numbers} for topic, numbers in left.items()}, left, gaps
    empty = {topic: {number: held[topic, str(number)].first for number in numbers} for topic, numbers in ends.items()}
    return empty, empty, gaps


def joined(gaps: Iterable[Gap]) -> list[Gap]:
    """Return the gaps in order; neighbours are one."""
    found = list[Gap]()
    for gap in sorted(gaps, key=lambda each: (each.topic, each.partition, each.start_offset)):
        before = found[-1] if found else None
        if before and (before.topic, before.partition, before.end_offset) == (gap.topic, gap.partition, gap.start_offset):
            found[-1] = msgspec.structs.replace(before, end_offset=gap.end_offset)
        else:
            found.append(gap)
    return found
