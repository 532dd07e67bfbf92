"""Sizes that a topic's configs bound: the bytes that retention keeps of a partition, and the bytes of a segment.

They are counted from the manifest's segments and the log's ledgers, not from the running totals that workers keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simulation.world.object_store import Bucket
from stratalog_metadata.records import Ledger, Log, ManifestPointer, Record, ledger_key, manifest_pointer_key
from stratalog_tiering.core.policy import SEGMENT_BYTES
from stratalog_tiering.format.manifest import SegmentEntry, SegmentKind, decode_manifest


def kept_sizes(log: Log, records: Mapping[str, Record], bucket: Bucket) -> list[int]:
    """Return the bytes of each segment and of each ledger that is not cold from the log's start on, oldest first."""
    pointer = records.get(manifest_pointer_key(log.topic_id, log.index))
    sizes: list[int] = []
    hot_from = log.log_start_offset
    if isinstance(pointer, ManifestPointer):
        manifest = decode_manifest(bucket.manifest_content(pointer))
        assert not manifest.pages, f"the segments of {log.key()} are no longer all in its manifest"
        sizes = [entry.stored_bytes for entry in manifest.segments if entry.end_offset > log.log_start_offset]
        hot_from = max(hot_from, pointer.end_offset)
    ledgers = (records.get(ledger_key(ref.ledger_id)) for ref in log.ledgers)
    sizes += [each.payload_bytes for each in ledgers if isinstance(each, Ledger) and each.base_offset >= hot_from]
    return sizes


def excess(sizes: Sequence[int], limit_bytes: int) -> str:
    """Return why the oldest part should be gone already, or an empty string. The newest part always stays."""
    without_oldest = sum(sizes[1:])
    if len(sizes) < 2 or without_oldest < limit_bytes:
        return ""
    return f"{sum(sizes)} bytes are kept, and {without_oldest} without the oldest part; retention.bytes is {limit_bytes}"


def too_large(entry: SegmentEntry, ledger_bytes: Sequence[int], configs: Mapping[str, str]) -> str:
    """Return how a new segment of ledgers of these sizes exceeds its topic's limit, or an empty string."""
    made_bytes = sum(ledger_bytes) if entry.kind is SegmentKind.RAW else entry.stored_bytes
    if SEGMENT_BYTES not in configs or len(ledger_bytes) == 1 or made_bytes <= int(configs[SEGMENT_BYTES]):
        return ""
    return f"{len(ledger_bytes)} ledgers make a segment of {made_bytes} bytes; {SEGMENT_BYTES} is {configs[SEGMENT_BYTES]}"
