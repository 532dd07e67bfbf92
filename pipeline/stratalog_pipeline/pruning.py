"""Bounds on the rows of a read, by which partitions, segments and blocks are skipped. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stratalog_pipeline.planning import OffsetRange

OFFSET_END: Final = 2**63 - 1
ALL_OFFSETS: Final = OffsetRange(first=0, end=OFFSET_END)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """Bounds on the rows to read. ``None`` means any. Blocks with no record from ``timestamp_from_ms`` on are not read."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    offsets: OffsetRange = ALL_OFFSETS
    timestamp_from_ms: int | None = None

    def allows(self, topic: str, partition: int) -> bool:
        return (self.topics is None or topic in self.topics) and (self.partitions is None or partition in self.partitions)

    def narrowed(self, offsets: OffsetRange) -> OffsetRange:
        first = max(offsets.first, self.offsets.first)
        return OffsetRange(first=first, end=max(first, min(offsets.end, self.offsets.end)))


EVERYTHING: Final = Pruning()
