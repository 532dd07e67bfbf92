"""Reads and writes the 61-byte header of a Kafka record batch (format v2). No record is decoded here.

Layout, big-endian (Kafka documentation, "Record Batch")::

    0  i64 base offset            21 i16 attributes          43 i64 producer id
    8  i32 batch length           23 i32 last offset delta   51 i16 producer epoch
    12 i32 partition leader epoch 27 i64 base timestamp ms   53 i32 base sequence
    16 i8  magic (2)              35 i64 max timestamp ms    57 i32 record count
    17 u32 CRC32C over byte 21 to the end

``batch length`` counts from byte 12 on. The CRC covers neither base offset nor leader epoch: a broker sets both
without changing the bytes that the producer's checksum covers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.ports import Buffer

HEADER: Final = struct.Struct(">qiibIhiqqqhii")
HEADER_BYTES: Final = HEADER.size
LENGTH_PREFIX_BYTES: Final = 12
CRC_START: Final = 21
MAGIC: Final = 2

COMPRESSION_MASK: Final = 0x07
TIMESTAMP_TYPE_BIT: Final = 0x08
TRANSACTIONAL_BIT: Final = 0x10
CONTROL_BIT: Final = 0x20
DELETE_HORIZON_BIT: Final = 0x40
"""Set by compaction (KIP-534): the base timestamp is the time from which the batch's tombstones may be deleted."""
BROKER_BITS: Final = TIMESTAMP_TYPE_BIT | DELETE_HORIZON_BIT
"""Attributes that are not the producer's to set."""

LOCATED_RECORDS_MAX: Final = 1_000_000
"""Records of a batch that compaction and erasure take apart at most: a row has 64 bytes, few KB can expand to 20 million."""

NO_PRODUCER_ID: Final = -1
NO_SEQUENCE: Final = -1

_BASE_OFFSET = struct.Struct(">q")
_LEADER_EPOCH = struct.Struct(">i")
_CRC = struct.Struct(">I")
_ATTRIBUTES = struct.Struct(">h")
_MAX_TIMESTAMP = struct.Struct(">q")
_ATTRIBUTES_LOW_BYTE: Final = 22


class BatchHeader(NamedTuple):
    """The header's fields in wire order. A tuple, because it is made for every batch on the hot path."""

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size_bytes(self) -> int:
        """Size of the whole batch, its first twelve bytes included."""
        return LENGTH_PREFIX_BYTES + self.batch_length

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def min_timestamp_ms(self) -> int | None:
        """The minimum timestamp of all records; None if the header does not tell, because records need not be in time order."""
        is_told = self.record_count == 1 or self.attributes & TIMESTAMP_TYPE_BIT
        return self.max_timestamp_ms if is_told else None

    @property
    def compression(self) -> int:
        """0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd."""
        return self.attributes & COMPRESSION_MASK

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL_BIT)

    @property
    def is_log_append_time(self) -> bool:
        return bool(self.attributes & TIMESTAMP_TYPE_BIT)

    @property
    def delete_horizon_ms(self) -> int | None:
        """Wall time from which compaction may delete the batch's tombstones, or its transaction marker; None: not set yet."""
        return self.base_timestamp_ms if self.attributes & DELETE_HORIZON_BIT else None

    @property
    def last_sequence(self) -> int:
        """Sequence of the last record; wraps from 2**31 - 1 to 0 as Kafka's does."""
        if self.base_sequence < 0:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) & 0x7FFF_FFFF


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Return the header at ``position`` without validating it. Raises ``Corrupt`` if fewer than 61 bytes follow."""
    try:
        return BatchHeader._make(HEADER.unpack_from(buffer, position))
    except struct.error:
        raise Corrupt(f"record batch header is cut short: {len(buffer) - position} of {HEADER_BYTES} bytes") from None


def write_header(batch: bytearray, header: BatchHeader) -> None:
    """Write the header of a whole batch; length and CRC are those of ``batch``, whatever ``header`` says."""
    HEADER.pack_into(batch, 0, *header._replace(batch_length=len(batch) - LENGTH_PREFIX_BYTES))
    _CRC.pack_into(batch, 17, crc32c(memoryview(batch)[CRC_START:]))


def base_offset_of(head: Buffer) -> int:
    """Return the base offset of the batch that begins with ``head``."""
    offset: int = _BASE_OFFSET.unpack_from(head)[0]
    return offset


def is_control(head: Buffer) -> bool:
    """Whether a batch, or its first bytes, has the control bit; False if they are fewer than a header."""
    return len(head) >= HEADER_BYTES and bool(head[_ATTRIBUTES_LOW_BYTE] & CONTROL_BIT)


def is_transactional(head: Buffer) -> bool:
    """Whether a batch, or its first bytes, has the transactional bit; False if they are fewer than a header."""
    return len(head) >= HEADER_BYTES and bool(head[_ATTRIBUTES_LOW_BYTE] & TRANSACTIONAL_BIT)


def iterate_headers(buffer: Buffer) -> Iterator[tuple[int, BatchHeader]]:
    """Yield ``(position, header)`` of each batch in a run of whole batches. Raises ``Corrupt`` at a truncated or bad length."""
    position, end = 0, len(buffer)
    while position < end:
        header = read_header(buffer, position)
        next_position = position + header.size_bytes
        if header.size_bytes < HEADER_BYTES or next_position > end:
            raise Corrupt(f"record batch at byte {position} claims {header.size_bytes} bytes of {end - position} left")
        yield position, header
        position = next_position


def crc_matches(batch: Buffer, header: BatchHeader) -> bool:
    """Whether the bytes of one whole batch match the CRC32C in its header."""
    return bool(crc32c(memoryview(batch)[CRC_START : header.size_bytes]) == header.crc)


def check_batch(batch: Buffer) -> BatchHeader:
    """Return the header of a buffer that is exactly one valid batch. Raises ``Corrupt``, or ``Invalid`` for a magic other
    than 2.
    """
    header = read_header(batch)
    if header.magic != MAGIC:
        raise Invalid(f"record batch has magic {header.magic}; only format v2 (magic 2) is supported")
    if header.size_bytes != len(batch):
        raise Corrupt(f"record batch claims {header.size_bytes} bytes and has {len(batch)}")
    if not crc_matches(batch, header):
        raise Corrupt(f"record batch at base offset {header.base_offset} does not match its CRC")
    return header


def assign_offset(batch: bytearray | memoryview, base_offset: int, leader_epoch: int) -> None:
    """Write base offset and leader epoch in place. The CRC stays valid because it covers neither."""
    _BASE_OFFSET.pack_into(batch, 0, base_offset)
    _LEADER_EPOCH.pack_into(batch, 12, leader_epoch)


def clear_broker_bits(batch: bytearray | memoryview) -> BatchHeader:
    """Remove ``BROKER_BITS`` of one batch, recompute its CRC, and return its header. Records have their own timestamps then."""
    (attributes,) = _ATTRIBUTES.unpack_from(batch, 21)
    _ATTRIBUTES.pack_into(batch, 21, attributes & ~BROKER_BITS)
    _CRC.pack_into(batch, 17, crc32c(memoryview(batch)[CRC_START:]))
    return read_header(batch)


def assign_log_append_time(batch: bytearray | memoryview, timestamp_ms: int) -> None:
    """Set the timestamps of one batch to the broker's time (``message.timestamp.type=LogAppendTime``) and recompute its CRC."""
    (attributes,) = _ATTRIBUTES.unpack_from(batch, 21)
    _ATTRIBUTES.pack_into(batch, 21, attributes | TIMESTAMP_TYPE_BIT)
    _MAX_TIMESTAMP.pack_into(batch, 35, timestamp_ms)
    _CRC.pack_into(batch, 17, crc32c(memoryview(batch)[CRC_START:]))
