"""Which cold segments retention lets go, and why. Pure.

Only whole segments go, oldest first, and the first that must stay ends it: offsets stay contiguous. Rules are Kafka's:
``retention.ms`` counts from the greatest timestamp of a segment's records (from when they came to the store, where they have
none), ``retention.bytes`` is what may remain of the partition, and whatever lies below the log's start (DeleteRecords) goes.
"""

from __future__ import annotations

from stratalog_tiering.core.policy import UNLIMITED, TierPolicy
from stratalog_tiering.format.manifest import Reason, SegmentEntry


def expiry_reason(
    entry: SegmentEntry, policy: TierPolicy, *, total_bytes: int, log_start_offset: int, now_ms: int
) -> str | None:
    """Why the oldest segment may go, or None if it stays.

    ``total_bytes`` is all there is of the partition from this segment on, once: cold, and hot beyond the manifest's end.
    """
    if entry.end_offset <= log_start_offset:
        return Reason.LOG_START
    if policy.retention_ms != UNLIMITED and newest_ms(entry) < now_ms - policy.retention_ms:
        return Reason.RETENTION_MS
    if policy.retention_bytes != UNLIMITED and total_bytes - entry.object_bytes >= policy.retention_bytes:
        return Reason.RETENTION_BYTES
    return None


def newest_ms(entry: SegmentEntry) -> int:
    """Time of a segment's newest record."""
    return entry.max_timestamp_ms if entry.max_timestamp_ms >= 0 else entry.created_at_ms


def oldest_ms(entry: SegmentEntry) -> int:
    """Time of a segment's oldest record, as far as the first of each batch tells."""
    return entry.first_timestamp_min_ms if entry.first_timestamp_min_ms >= 0 else newest_ms(entry)
