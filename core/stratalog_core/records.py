"""Build and decode the records inside a batch, in plain Python.

For what is rare or small: internal topics, searches by time inside one batch, the command line, tests. The hot path
never comes here, and bulk reading has compiled kernels. Layout of a record (Kafka documentation, "Record"): varint
length, i8 attributes, varlong timestamp delta, varint offset delta, then key, value and headers, each length-prefixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from stratalog_core.batch import (
    CRC_START,
    HEADER,
    HEADER_BYTES,
    LENGTH_PREFIX_BYTES,
    MAGIC,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    TIMESTAMP_TYPE_BIT,
    BatchHeader,
    read_header,
)
from stratalog_core.compression import compress, decompress
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer

Header = tuple[str, bytes | None]
_VARINT_BYTES_MAX: Final = 10
RECORDS_PER_TURN: Final = 2_000
"""Records to read before an event loop gets its turn: some kilobytes of zeros, packed, are millions of records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record. ``offset`` is absolute; ``timestamp_ms`` is -1 where there is none."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


def build_batch(
    records: Sequence[Record],
    *,
    compression: int = 0,
    attributes: int = 0,
    leader_epoch: int = 0,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = NO_SEQUENCE,
) -> bytearray:
    """One batch of ``records`` (at least one), whose offsets must rise; gaps are kept."""
    first, last = records[0], records[-1]
    body = bytearray()
    for record in records:
        _append_record(body, record, first.offset, first.timestamp_ms)
    packed = compress(compression, body)
    batch = bytearray(HEADER_BYTES) + packed
    HEADER.pack_into(
        batch, 0, first.offset, len(batch) - LENGTH_PREFIX_BYTES, leader_epoch, MAGIC, 0, attributes | compression,
        last.offset - first.offset, first.timestamp_ms, max(record.timestamp_ms for record in records),
        producer_id, producer_epoch, base_sequence, len(records),
    )  # fmt: skip
    batch[17:21] = crc32c(memoryview(batch)[CRC_START:]).to_bytes(4, "big")
    return batch


def iterate_records(batch: Buffer, header: BatchHeader | None = None) -> Iterator[Record]:
    """Records of one batch in order. Raises ``Corrupt``. The CRC is not checked here."""
    header = header or read_header(batch)
    body = memoryview(decompress(header.compression, memoryview(batch)[HEADER_BYTES : header.size_bytes]))
    position, earlier = 0, header.base_offset - 1
    for _ in range(header.record_count):
        record, position = _read_record(body, position, header)
        if not earlier < record.offset <= header.last_offset:
            raise Corrupt(f"record offset {record.offset} does not rise from {earlier} to {header.last_offset} at the most")
        earlier = record.offset
        yield record
    if position != len(body):
        raise Corrupt(f"{len(body) - position} bytes follow the last record of the batch at {header.base_offset}")


def encode_varint(value: int) -> bytes:
    """Zig-zag variable-length integer."""
    if -64 <= value < 64:  # most lengths and deltas: one byte, made beforehand
        return _ONE_BYTE[value]
    remaining = (value << 1) ^ (value >> 63)
    out = bytearray()
    while remaining > 0x7F:
        out.append(0x80 | (remaining & 0x7F))
        remaining >>= 7
    out.append(remaining)
    return bytes(out)


def decode_varint(buffer: memoryview, position: int) -> tuple[int, int]:
    """``(value, next position)``. Raises ``Corrupt`` past the end, beyond ten bytes or beyond 64 bits."""
    result = shift = 0
    for index in range(position, position + _VARINT_BYTES_MAX):
        if index >= len(buffer):
            break
        byte = buffer[index]
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            if result >> 64:
                raise Corrupt(f"variable-length integer at byte {position} exceeds 64 bits")
            return (result >> 1) ^ -(result & 1), index + 1
        shift += 7
    raise Corrupt(f"variable-length integer at byte {position} does not end")


_ONE_BYTE: Final = tuple(bytes(((value << 1) ^ (value >> 63),)) for value in (*range(64), *range(-64, 0)))
"""Indexed by the value itself: negative ones count from the end."""


def _append_record(out: bytearray, record: Record, base_offset: int, base_timestamp_ms: int) -> None:
    body = bytearray(b"\x00")
    body += encode_varint(record.timestamp_ms - base_timestamp_ms)
    body += encode_varint(record.offset - base_offset)
    _append_bytes(body, record.key)
    _append_bytes(body, record.value)
    body += encode_varint(len(record.headers))
    for name, value in record.headers:
        _append_bytes(body, name.encode())
        _append_bytes(body, value)
    out += encode_varint(len(body))
    out += body


def _append_bytes(out: bytearray, content: bytes | None) -> None:
    if content is None:
        out += encode_varint(-1)
    else:
        out += encode_varint(len(content))
        out += content


def _read_record(body: memoryview, position: int, header: BatchHeader) -> tuple[Record, int]:
    length, position = decode_varint(body, position)
    end = position + length
    if length < 1 or end > len(body):
        raise Corrupt(f"record of {length} bytes exceeds its batch at {header.base_offset}")
    timestamp_delta, position = decode_varint(body, position + 1)
    offset_delta, position = decode_varint(body, position)
    key, position = _read_bytes(body, position)
    value, position = _read_bytes(body, position)
    count, position = decode_varint(body, position)
    if not 0 <= count <= end - position:
        raise Corrupt(f"record claims {count} headers in {end - position} bytes")
    headers: list[Header] = []
    for _ in range(count):
        name, position = _read_bytes(body, position)
        content, position = _read_bytes(body, position)
        headers.append(((name or b"").decode("utf-8", "surrogateescape"), content))
    if position != end:
        raise Corrupt(f"record ends at byte {position} instead of {end}")
    if header.attributes & TIMESTAMP_TYPE_BIT:
        timestamp_ms = header.max_timestamp_ms
    else:
        timestamp_ms = header.base_timestamp_ms + timestamp_delta
    record = Record(
        offset=header.base_offset + offset_delta, timestamp_ms=timestamp_ms, key=key, value=value, headers=tuple(headers)
    )
    return record, end


def _read_bytes(body: memoryview, position: int) -> tuple[bytes | None, int]:
    length, position = decode_varint(body, position)
    if length < 0:
        return None, position
    if position + length > len(body):
        raise Corrupt(f"field of {length} bytes exceeds its record")
    return bytes(body[position : position + length]), position + length
