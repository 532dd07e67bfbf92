"""Bounds on the rows of a read, by which partitions, segments and blocks are skipped. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stratalog_pipeline.planning import OffsetRange

OFFSET_END: Final = 2**63 - 1
ALL_OFFSETS: Final = OffsetRange(first=0, end=OFFSET_END)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """Timestamps in milliseconds: ``first_ms`` inclusive, ``end_ms`` exclusive. ``None`` means unbounded."""

    first_ms: int | None = None
    end_ms: int | None = None

    def may_hold(self, min_ms: int | None, max_ms: int) -> bool:
        """Whether records with timestamps from ``min_ms`` (None: unknown) to ``max_ms`` may be within the range."""
        is_before = self.first_ms is not None and max_ms < self.first_ms
        is_after = self.end_ms is not None and min_ms is not None and min_ms >= self.end_ms
        return not is_before and not is_after


ANY_TIME: Final = TimeRange()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """Bounds on the rows to read. ``None`` means any. Segments and blocks without a record within ``times`` are not read."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    offsets: OffsetRange = ALL_OFFSETS
    times: TimeRange = ANY_TIME

    def allows(self, topic: str, partition: int) -> bool:
        return (self.topics is None or topic in self.topics) and (self.partitions is None or partition in self.partitions)

    def narrowed(self, offsets: OffsetRange) -> OffsetRange:
        first = max(offsets.first, self.offsets.first)
        return OffsetRange(first=first, end=max(first, min(offsets.end, self.offsets.end)))


EVERYTHING: Final = Pruning()
