"""Record batches that lost some of their records: what compaction and erasure put in their place. No I/O.

Such a batch keeps its base and last offset, leader epoch, producer, sequence and codec, so that offsets and the sequences of
producers are never lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stratalog_core.batches import record_kernels as kernels
from stratalog_core.batches.batch import COMPRESSION_MASK, DELETE_HORIZON_BIT, HEADER_BYTES, BatchHeader, write_header
from stratalog_core.batches.checkpoint import ProducerEntry
from stratalog_core.batches.compression import compress
from stratalog_core.batches.record_spans import RecordSpans
from stratalog_core.compiled.jit import Bools
from stratalog_core.ports import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """A batch after the filter: None if it is gone. ``fingerprint`` is over the records that must be in it."""

    batch: Buffer | None
    fingerprint: int


class LastBatches:
    """Recognizes the last batch of each producer that is known at the end of a history: it stays, for the sake of sequences."""

    def __init__(self, producers: Sequence[ProducerEntry]) -> None:
        self._last_of: Mapping[int, tuple[int, int]] = {
            each.producer_id: (each.batches[-1].last_offset if each.batches else -1, each.producer_epoch) for each in producers
        }

    def has(self, header: BatchHeader) -> bool:
        last = self._last_of.get(header.producer_id) if header.producer_id >= 0 else None
        if last is None:
            return False
        offset, epoch = last
        return header.last_offset == offset if offset >= 0 else header.is_control and header.producer_epoch == epoch


def emptied(header: BatchHeader) -> bytes:
    """The batch without records: offsets, epoch, producer and sequence stay, as in Kafka's ``writeEmptyHeader``."""
    attributes = header.attributes & ~(COMPRESSION_MASK | DELETE_HORIZON_BIT)
    return _packed(header, attributes, -1, header.max_timestamp_ms, 0, b"")


def rebuilt(header: BatchHeader, spans: RecordSpans, kept: Bools, horizon_ms: int | None) -> bytes:
    """The batch with the records ``kept``. ``horizon_ms`` becomes its delete horizon; None: that stays as it is."""
    base_ms, max_ms, attributes = header.base_timestamp_ms, header.max_timestamp_ms, header.attributes
    if not header.is_log_append_time:
        max_ms = _int64(base_ms + int(spans.rows[kept, kernels.TIMESTAMP_DELTA].max()))
    if horizon_ms is None:
        records = np.empty(len(spans.body), np.uint8)
        size = int(kernels.copy_records(spans.content, spans.rows, kept, records))
    else:
        records = np.empty(len(spans.body) + kernels.HEAD_BYTES_MAX * len(spans), np.uint8)
        size = int(kernels.copy_moved(spans.content, spans.rows, kept, _int64(base_ms - horizon_ms), records))
        base_ms, attributes = horizon_ms, attributes | DELETE_HORIZON_BIT
    assert size != kernels.NO_ROOM, "each record has room for its longest head"
    count = int(np.count_nonzero(kept))
    return _packed(header, attributes, base_ms, max_ms, count, compress(header.compression, records[:size].data))


def _int64(value: int) -> int:
    """The value as 64 bits hold it: timestamps of a hostile batch overflow, here as in Java's clients."""
    return (value + 2**63) % 2**64 - 2**63


def _packed(header: BatchHeader, attributes: int, base_ms: int, max_ms: int, record_count: int, content: bytes) -> bytes:
    batch = bytearray(HEADER_BYTES) + content
    changed = header._replace(
        attributes=attributes, base_timestamp_ms=base_ms, max_timestamp_ms=max_ms, record_count=record_count
    )
    write_header(batch, changed)
    return bytes(batch)
