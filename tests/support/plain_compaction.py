"""The rules of compaction for one record after the other, in plain Python: the compiled code must come to the same bytes.

Transactions, and what becomes of a batch without records, are the product's: they work on headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stratalog_core.batches.batch import DELETE_HORIZON_BIT, HEADER_BYTES, BatchHeader, write_header
from stratalog_core.batches.compression import compress, decompress
from stratalog_core.batches.record_expiry import expiry_of
from stratalog_core.batches.records import decode_varint, encode_varint
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer
from stratalog_tiering.core.compaction import CompactionCounts, TransactionFilter
from stratalog_tiering.core.rewritten_batches import emptied


class Span(NamedTuple):
    """One record of a body: its bytes from ``start`` to ``end``, with its length; from ``offset_at`` on, all but its time."""

    start: int
    end: int
    timestamp_delta: int
    offset_at: int
    offset_delta: int
    key: bytes | None
    has_value: bool


def plain_body(batch: Buffer, header: BatchHeader) -> bytes:
    return bytes(decompress(header.compression, memoryview(batch)[HEADER_BYTES : header.size_bytes]))


def plain_spans(body: bytes, header: BatchHeader) -> list[Span]:
    """The spans of a batch's records. Raises ``Corrupt`` unless they are exactly its records."""
    spans, position, earlier = list[Span](), 0, -1
    for _ in range(header.record_count):
        start = position
        length, position = decode_varint(body, position)
        end = position + length
        if length < 1 or end > len(body):
            raise Corrupt("a record exceeds its batch")
        timestamp_delta, offset_at = decode_varint(body, position + 1)
        offset_delta, position = decode_varint(body, offset_at)
        key_bytes, position = decode_varint(body, position)
        key = body[position : position + key_bytes] if key_bytes >= 0 else None
        value_bytes, position = decode_varint(body, position + max(key_bytes, 0))
        if position + max(value_bytes, 0) > end or not earlier < offset_delta <= header.last_offset_delta:
            raise Corrupt("a record is malformed")
        spans.append(Span(start, end, timestamp_delta, offset_at, offset_delta, key, value_bytes >= 0))
        earlier, position = offset_delta, end
    if position != len(body):
        raise Corrupt("bytes follow the last record")
    return spans


def plain_headers(body: bytes, span: Span) -> list[tuple[bytes, bytes | None]]:
    """The headers of a record. Raises ``Corrupt`` unless they end with it."""
    _, position = decode_varint(body, span.offset_at)
    fields, left = list[bytes | None](), 2
    while left:
        length, position = decode_varint(body, position)
        end = position + max(length, 0)
        if end > span.end:
            raise Corrupt("a field exceeds its record")
        fields.append(body[position:end] if length >= 0 else None)
        position, left = end, left - 1
        if len(fields) == 2:
            count, position = decode_varint(body, position)
            if not 0 <= count <= span.end - position:
                raise Corrupt("more headers than bytes")
            left = 2 * count
    if position != span.end:
        raise Corrupt("the headers do not end with their record")
    return [(name or b"", content) for name, content in zip(fields[2::2], fields[3::2], strict=True)]


def plain_expiry_ms(body: bytes, span: Span, header_name: bytes) -> int | None:
    """When a record expires; None if it does not, or its headers cannot be read."""
    try:
        values = [value for name, value in plain_headers(body, span) if name == header_name]
    except Corrupt:
        return None
    return expiry_of(values[-1]) if values else None


class PlainMap:
    """The newest offsets of keys, for one pass. ``end_offset``: the map is complete below it."""

    def __init__(self, keys_max: int, dirty_from: int) -> None:
        self.newest: dict[bytes, int] = {}
        self.end_offset = dirty_from
        self.transactions = TransactionFilter()
        self._keys_max = keys_max
        self._dirty_from = dirty_from

    def add(self, batch: Buffer, header: BatchHeader) -> bool:
        """Note the batch's keys. False if the map was full before it ended."""
        spans = plain_spans(plain_body(batch, header), header)
        if header.is_control:
            self.transactions.is_marker_done(header, spans[0].key if spans else None)
        elif not self.transactions.is_aborted(header):
            for span in spans:
                offset = header.base_offset + span.offset_delta
                if span.key is None or offset < self._dirty_from:
                    continue
                if span.key not in self.newest and len(self.newest) == self._keys_max:
                    self.end_offset = max(self.end_offset, offset)
                    return False
                self.newest[span.key] = offset
        self.end_offset = max(self.end_offset, header.next_offset)
        return True


class PlainFilter:
    """What is left of each batch."""

    def __init__(self, found: PlainMap, now_ms: int, delete_retention_ms: int, expiry_header: bytes) -> None:
        self._newest, self._map_end = found.newest, found.end_offset
        self._now_ms, self._horizon_ms = now_ms, now_ms + delete_retention_ms
        self._expiry_header = expiry_header
        self.transactions = TransactionFilter()
        self.counts = CompactionCounts()

    def filter(self, batch: Buffer, header: BatchHeader, *, is_last: bool) -> Buffer | None:
        """The batch without the records that are to go."""
        self.counts.records_read += header.record_count
        gone = emptied(header) if is_last else None
        if not header.is_control and self.transactions.is_aborted(header):
            return gone
        if not header.is_control and not header.record_count:
            return batch if is_last else None
        body = plain_body(batch, header)
        spans = plain_spans(body, header)
        if header.is_control:
            return self._marker(batch, header, body, spans, gone)
        if header.base_offset >= self._map_end:
            self.counts.records_kept += header.record_count
            return batch
        spans = [self._expired(body, span) for span in spans]
        kept = [span for span in spans if self._keeps(header, span)]
        tombstones = self._count(spans, kept)
        if not kept:
            return gone
        sets_horizon = bool(tombstones) and header.delete_horizon_ms is None
        if len(kept) == len(spans) and not sets_horizon:
            return batch
        return plain_rebuilt(header, body, kept, self._horizon_ms if sets_horizon else None)

    def _marker(
        self, batch: Buffer, header: BatchHeader, body: bytes, spans: Sequence[Span], gone: Buffer | None
    ) -> Buffer | None:
        is_done = self.transactions.is_marker_done(header, spans[0].key if spans else None)
        horizon_ms = header.delete_horizon_ms
        if not spans or (is_done and horizon_ms is not None and horizon_ms <= self._now_ms):
            return gone
        self.counts.records_kept += len(spans)
        return plain_rebuilt(header, body, spans, self._horizon_ms) if is_done and horizon_ms is None else batch

    def _expired(self, body: bytes, span: Span) -> Span:
        at_ms = plain_expiry_ms(body, span, self._expiry_header) if self._expiry_header else None
        return span if at_ms is None or at_ms > self._now_ms else span._replace(has_value=False)

    def _keeps(self, header: BatchHeader, span: Span) -> bool:
        offset = header.base_offset + span.offset_delta
        if offset >= self._map_end:
            return True
        if span.key is None or offset < self._newest.get(span.key, -1):
            return False
        horizon_ms = header.delete_horizon_ms
        return span.has_value or horizon_ms is None or self._now_ms < horizon_ms

    def _count(self, spans: Sequence[Span], kept: Sequence[Span]) -> int:
        tombstones = sum(not span.has_value for span in kept)
        self.counts.records_kept += len(kept)
        self.counts.tombstones_kept += tombstones
        self.counts.tombstones_deleted += sum(not span.has_value for span in spans) - tombstones
        self.counts.keyless_deleted += sum(span.key is None for span in spans) - sum(span.key is None for span in kept)
        return tombstones


def plain_rebuilt(header: BatchHeader, body: bytes, kept: Sequence[Span], horizon_ms: int | None) -> bytes:
    """The batch with the records ``kept``, whose timestamps stay although its base timestamp becomes ``horizon_ms``."""
    base_ms, max_ms, attributes = header.base_timestamp_ms, header.max_timestamp_ms, header.attributes
    if not header.is_log_append_time:
        max_ms = base_ms + max(span.timestamp_delta for span in kept)
    records = [body[span.start : span.end] for span in kept]
    if horizon_ms is not None:
        deltas = [encode_varint(span.timestamp_delta + base_ms - horizon_ms) for span in kept]
        contents = [b"\x00" + delta + body[span.offset_at : span.end] for delta, span in zip(deltas, kept, strict=True)]
        records = [encode_varint(len(content)) + content for content in contents]
        base_ms, attributes = horizon_ms, attributes | DELETE_HORIZON_BIT
    batch = bytearray(HEADER_BYTES) + compress(header.compression, b"".join(records))
    changed = header._replace(attributes=attributes, base_timestamp_ms=base_ms, max_timestamp_ms=max_ms, record_count=len(kept))
    write_header(batch, changed)
    return bytes(batch)
