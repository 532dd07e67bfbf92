"""Builds and decodes the records inside a batch, in plain Python.

Used where records are few: internal topics, the command line, tests. The hot path does not decode records, and bulk reading
has compiled kernels. Layout of a record (Kafka documentation, "Record"): varint length, i8 attributes, varlong timestamp
delta, varint offset delta, then key, value and headers, each length-prefixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from stratalog_core.batches.batch import (
    HEADER_BYTES,
    MAGIC,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    TIMESTAMP_TYPE_BIT,
    BatchHeader,
    read_header,
    write_header,
)
from stratalog_core.batches.compression import compress, decompress
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer

Header = tuple[str, bytes | None]
VARINT_BYTES_MAX: Final = 10


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One record. ``offset`` is absolute; ``timestamp_ms`` is -1 if there is none."""

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
    """Build one batch of ``records`` (at least one). Offsets must ascend; gaps are kept."""
    first, last = records[0], records[-1]
    body = bytearray()
    headers, encoded_headers = first.headers, _encode_headers(first.headers)
    for record in records:
        if record.headers is not headers:  # records of one writer often share them
            headers, encoded_headers = record.headers, _encode_headers(record.headers)
        deltas = encode_varint(record.timestamp_ms - first.timestamp_ms) + encode_varint(record.offset - first.offset)
        content = b"".join((b"\x00", deltas, _encode_bytes(record.key), _encode_bytes(record.value), encoded_headers))
        body += encode_varint(len(content))
        body += content
    packed = compress(compression, body)
    batch = bytearray(HEADER_BYTES) + packed
    header = BatchHeader(
        first.offset, 0, leader_epoch, MAGIC, 0, attributes | compression, last.offset - first.offset, first.timestamp_ms,
        max(record.timestamp_ms for record in records), producer_id, producer_epoch, base_sequence, len(records),
    )  # fmt: skip
    write_header(batch, header)
    return batch


def iterate_records(batch: Buffer, header: BatchHeader | None = None) -> Iterator[Record]:
    """Yield the records of one batch in order, without checking its CRC. Raises ``Corrupt``."""
    header = header or read_header(batch)
    body = bytes(decompress(header.compression, memoryview(batch)[HEADER_BYTES : header.size_bytes]))
    position, earlier = 0, header.base_offset - 1
    headers_seen: dict[bytes, tuple[Header, ...]] = {}
    for _ in range(header.record_count):
        record, position = _read_record(body, position, header, headers_seen)
        if not earlier < record.offset <= header.last_offset:
            raise Corrupt(f"record offset {record.offset} is not above {earlier} and at most {header.last_offset}")
        earlier = record.offset
        yield record
    if position != len(body):
        raise Corrupt(f"{len(body) - position} bytes follow the last record of the batch at {header.base_offset}")


def encode_varint(value: int) -> bytes:
    """Return ``value`` as a zig-zag variable-length integer."""
    if -64 <= value < 64:  # most lengths and deltas are one byte, from a table
        return _ONE_BYTE[value]
    remaining = (value << 1) ^ (value >> 63)
    if remaining < 1 << 14:
        return bytes((0x80 | (remaining & 0x7F), remaining >> 7))
    out = bytearray()
    while remaining > 0x7F:
        out.append(0x80 | (remaining & 0x7F))
        remaining >>= 7
    out.append(remaining)
    return bytes(out)


def decode_varint(buffer: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return ``(value, next position)``. Raises ``Corrupt`` past the end, beyond ten bytes or beyond 64 bits."""
    if position < len(buffer) and (first := buffer[position]) < 0x80:  # nearly all
        return (first >> 1) ^ -(first & 1), position + 1
    result = shift = 0
    for index in range(position, position + VARINT_BYTES_MAX):
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
"""Indexed by the value itself; negative values count from the end."""


def _encode_headers(headers: Sequence[Header]) -> bytes:
    fields = [field for name, value in headers for field in (_encode_bytes(name.encode()), _encode_bytes(value))]
    return b"".join((encode_varint(len(headers)), *fields))


def _encode_bytes(content: bytes | None) -> bytes:
    return encode_varint(-1) if content is None else encode_varint(len(content)) + content


def _read_record(
    body: bytes, position: int, header: BatchHeader, headers_seen: dict[bytes, tuple[Header, ...]]
) -> tuple[Record, int]:
    """Decode a record. ``headers_seen`` holds the previous record's headers by their bytes: they are often the same."""
    length, position = decode_varint(body, position)
    end = position + length
    if length < 1 or end > len(body):
        raise Corrupt(f"record of {length} bytes exceeds its batch at {header.base_offset}")
    timestamp_delta, position = decode_varint(body, position + 1)
    offset_delta, position = decode_varint(body, position)
    key, position = _read_bytes(body, position)
    value, position = _read_bytes(body, position)
    encoded_headers = body[position:end]
    headers = headers_seen.get(encoded_headers) if position < end else None
    if headers is None:
        headers = _read_headers(body, position, end)
        headers_seen.clear()
        headers_seen[encoded_headers] = headers
    if header.attributes & TIMESTAMP_TYPE_BIT:
        timestamp_ms = header.max_timestamp_ms
    else:
        timestamp_ms = header.base_timestamp_ms + timestamp_delta
    offset = header.base_offset + offset_delta
    return Record(offset=offset, timestamp_ms=timestamp_ms, key=key, value=value, headers=headers), end


def _read_headers(body: bytes, position: int, end: int) -> tuple[Header, ...]:
    """Decode the headers, which end the record at ``end``."""
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
    return tuple(headers)


def _read_bytes(body: bytes, position: int) -> tuple[bytes | None, int]:
    length, position = decode_varint(body, position)
    if length < 0:
        return None, position
    if position + length > len(body):
        raise Corrupt(f"field of {length} bytes exceeds its record")
    return body[position : position + length], position + length
