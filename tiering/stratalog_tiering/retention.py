"""Which cold segments retention lets go. Pure.

Only whole segments go, oldest first, and the first that must stay ends it: offsets stay contiguous. Rules are Kafka's:
``retention.ms`` counts from a segment's greatest timestamp (from its creation, where it has none), ``retention.bytes`` is
what may remain of the partition, and whatever lies below the log's start (DeleteRecords) goes.
"""

from __future__ import annotations

from collections.abc import Iterable

from stratalog_tiering.manifest import SegmentEntry
from stratalog_tiering.policy import UNLIMITED, TierPolicy


def drop_below_offset(
    segments: Iterable[SegmentEntry], policy: TierPolicy, *, total_bytes: int, log_start_offset: int, now_ms: int
) -> int | None:
    """End of the last segment that may go, or None if all stay.

    ``total_bytes`` is all there is of the partition, once: cold, and hot beyond the manifest's end.
    """
    end: int | None = None
    for entry in segments:
        below_start = entry.end_offset <= log_start_offset
        if not (below_start or _too_old(entry, policy, now_ms) or _too_much(entry, policy, total_bytes)):
            break
        total_bytes -= entry.object_bytes
        end = entry.end_offset
    return end


def _too_old(entry: SegmentEntry, policy: TierPolicy, now_ms: int) -> bool:
    last_ms = entry.max_timestamp_ms if entry.max_timestamp_ms >= 0 else entry.created_at_ms
    return policy.retention_ms != UNLIMITED and last_ms < now_ms - policy.retention_ms


def _too_much(entry: SegmentEntry, policy: TierPolicy, total_bytes: int) -> bool:
    return policy.retention_bytes != UNLIMITED and total_bytes - entry.object_bytes >= policy.retention_bytes
