"""From a finished segment to its line in the manifest."""

from __future__ import annotations

from stratalog_core.batches.checkpoint import EpochStart
from stratalog_core.ports import Buffer
from stratalog_tiering.format.manifest import SegmentEntry, object_sha256
from stratalog_tiering.format.segment import SegmentFooter


def segment_entry(key: str, footer: SegmentFooter, tail: Buffer, leader_epochs: tuple[EpochStart, ...]) -> SegmentEntry:
    """The manifest's line for a segment whose footer and trailer are the bytes ``tail``."""
    return SegmentEntry(
        key=key,
        base_offset=footer.base_offset,
        end_offset=footer.end_offset,
        object_bytes=footer.data_bytes + len(tail),
        data_bytes=footer.data_bytes,
        record_count=footer.record_count,
        max_timestamp_ms=footer.max_timestamp_ms,
        first_timestamp_min_ms=footer.first_timestamp_min_ms,
        merkle_root=footer.merkle_root,
        footer_sha256=object_sha256(tail),
        leader_epochs=leader_epochs,
        created_at_ms=footer.created_at_ms,
    )
