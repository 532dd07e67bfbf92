"""Converts Spark's pushed-down filters to bounds on partitions, offsets and times, so that splits and blocks are skipped.

Spark pushes down only conjunctions of simple comparisons. No filter is reported as handled: blocks are coarser than rows, so
Spark applies every filter again. An unsupported filter prunes nothing, which is always correct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual

from stratalog_pipeline.planning import OffsetRange
from stratalog_pipeline.pruning import EVERYTHING, OFFSET_END, Pruning, TimeRange


def pruning_of(filters: Iterable[Filter]) -> Pruning:
    """Return the conjunction of the supported filters; unsupported ones are ignored."""
    pruning = EVERYTHING
    for one in filters:
        column: tuple[str, ...] = getattr(one, "attribute", ())
        value = getattr(one, "value", None)
        if len(column) == 1 and column[0] in _COLUMNS and value is not None:
            pruning = _COLUMNS[column[0]](pruning, one, value)
    return pruning


def _by_topic(pruning: Pruning, one: Filter, value: Any) -> Pruning:
    names = _listed(one, value, str)
    return pruning if names is None else replace(pruning, topics=_both(pruning.topics, names))


def _by_partition(pruning: Pruning, one: Filter, value: Any) -> Pruning:
    numbers = _listed(one, value, int)
    return pruning if numbers is None else replace(pruning, partitions=_both(pruning.partitions, numbers))


def _by_offset(pruning: Pruning, one: Filter, value: Any) -> Pruning:
    allowed = _range_of(one, value) if isinstance(value, int) else None
    return pruning if allowed is None else replace(pruning, offsets=pruning.narrowed(allowed))


def _range_of(one: Filter, value: int) -> OffsetRange | None:
    first = {EqualTo: value, GreaterThanOrEqual: value, GreaterThan: value + 1}.get(type(one), 0)
    end = {EqualTo: value + 1, LessThan: value, LessThanOrEqual: value + 1}.get(type(one), OFFSET_END)
    return OffsetRange(first=max(first, 0), end=max(end, 0))


def _by_timestamp(pruning: Pruning, one: Filter, value: Any) -> Pruning:
    if not isinstance(value, datetime):
        return pruning
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    # Whole milliseconds, rounded to the wider range: a block that begins or ends within the same millisecond is still read.
    floor_ms = (aware - _EPOCH) // timedelta(milliseconds=1)
    first_ms, end_ms = pruning.times.first_ms, pruning.times.end_ms
    if isinstance(one, EqualTo | GreaterThan | GreaterThanOrEqual):
        first_ms = floor_ms if first_ms is None else max(first_ms, floor_ms)
    if isinstance(one, EqualTo | LessThan | LessThanOrEqual):
        end_ms = floor_ms + 1 if end_ms is None else min(end_ms, floor_ms + 1)
    return replace(pruning, times=TimeRange(first_ms=first_ms, end_ms=end_ms))


def _listed(one: Filter, value: Any, kind: type) -> frozenset[Any] | None:
    if isinstance(one, EqualTo) and isinstance(value, kind):
        return frozenset((value,))
    if isinstance(one, In):
        return frozenset(value)
    return None


def _both(allowed: frozenset[Any] | None, more: frozenset[Any]) -> frozenset[Any]:
    return more if allowed is None else allowed & more


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMNS: Final[dict[str, Callable[[Pruning, Filter, Any], Pruning]]] = {
    "topic": _by_topic,
    "partition": _by_partition,
    "offset": _by_offset,
    "timestamp": _by_timestamp,
}
