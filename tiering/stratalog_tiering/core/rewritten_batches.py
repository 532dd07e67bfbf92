"""Record batches that lost some of their records: what compaction and erasure put in their place. No I/O.

Such a batch keeps its base and last offset, leader epoch, producer, sequence and codec, so that offsets and the sequences of
producers are never lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stratalog_core.batches.batch import COMPRESSION_MASK, DELETE_HORIZON_BIT, HEADER_BYTES, BatchHeader, write_header
from stratalog_core.batches.compression import compress
from stratalog_core.batches.record_spans import RecordSpan
from stratalog_core.batches.records import encode_varint
from stratalog_core.ports import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """A batch after the filter: None if it is gone. ``fingerprint`` is over the records that must be in it."""

    batch: Buffer | None
    fingerprint: int


def emptied(header: BatchHeader) -> bytes:
    """The batch without records: offsets, epoch, producer and sequence stay, as in Kafka's ``writeEmptyHeader``."""
    attributes = header.attributes & ~(COMPRESSION_MASK | DELETE_HORIZON_BIT)
    return _packed(header, attributes, -1, header.max_timestamp_ms, 0, b"")


def rebuilt(header: BatchHeader, body: bytes, kept: Sequence[RecordSpan], horizon_ms: int | None) -> bytes:
    """The batch with the records ``kept``. ``horizon_ms`` becomes its delete horizon; None: that stays as it is."""
    base_ms, max_ms = header.base_timestamp_ms, header.max_timestamp_ms
    if not header.is_log_append_time:
        max_ms = base_ms + max(span.timestamp_delta for span in kept)
    if horizon_ms is None:
        records = b"".join([body[span.start : span.end] for span in kept])
        attributes = header.attributes
    else:
        records = b"".join([_moved(body, span, base_ms - horizon_ms) for span in kept])
        base_ms, attributes = horizon_ms, header.attributes | DELETE_HORIZON_BIT
    return _packed(header, attributes, base_ms, max_ms, len(kept), compress(header.compression, records))


def _moved(body: bytes, span: RecordSpan, delta_ms: int) -> bytes:
    """The record with another timestamp delta, so that its timestamp stays when the base timestamp changes."""
    content = b"\x00" + encode_varint(span.timestamp_delta + delta_ms) + body[span.offset_position : span.end]
    return encode_varint(len(content)) + content


def _packed(header: BatchHeader, attributes: int, base_ms: int, max_ms: int, record_count: int, content: bytes) -> bytes:
    batch = bytearray(HEADER_BYTES) + content
    changed = header._replace(
        attributes=attributes, base_timestamp_ms=base_ms, max_timestamp_ms=max_ms, record_count=record_count
    )
    write_header(batch, changed)
    return bytes(batch)
