"""Manifest entries of segments that do not exist, for tests of what decides from entries alone."""

from __future__ import annotations

import hashlib

import msgspec

from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.format.merkle import leaf_hash

_DIGEST = hashlib.sha256(b"").digest()


def entry_of(key: str, base_offset: int, end_offset: int, object_bytes: int = 100, **others: object) -> SegmentEntry:
    """The entry of a segment of one batch for each offset, without a footer; ``others`` replace its other members."""
    entry = SegmentEntry(
        key=key, base_offset=base_offset, end_offset=end_offset, data_bytes=object_bytes, footer_position=object_bytes,
        footer_bytes=0, object_bytes=object_bytes, object_sha256=_DIGEST, footer_sha256=_DIGEST,
        record_count=end_offset - base_offset, leaf_count=end_offset - base_offset, min_timestamp_ms=None, max_timestamp_ms=0,
        first_timestamp_min_ms=0, leader_epochs=(), created_at_ms=0,
    )  # fmt: skip
    return msgspec.structs.replace(entry, **others)


def leaves_of(entry: SegmentEntry) -> bytes:
    """The leaves of the entry's batches, one for each offset that it covers."""
    return b"".join(leaf_hash((b"%d" % offset,)) for offset in range(entry.base_offset, entry.base_offset + entry.leaf_count))
