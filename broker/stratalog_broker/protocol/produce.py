"""Produce requests and responses, versions 3–13, parsed and encoded by hand.

Batches stay views of the receive buffer: a decoder that copies them costs five times as much for large requests. Layouts are
those of Kafka's ProduceRequest.json and ProduceResponse.json; property tests compare both directions with kio.

Versions 3–8 are plain, 9 and later flexible. Version 5 adds the log start offset to a response, 8 an error message, 10 the
current leader (KIP-951); 13 names topics by id.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from stratalog_broker.protocol.frame import ELEMENTS_MAX, read_uvarint, skip_tagged_fields, write_uvarint
from stratalog_core.errors import Corrupt

FLEXIBLE_VERSION: Final = 9
LEADER_VERSION: Final = 10
TOPIC_ID_VERSION: Final = 13

_I16 = struct.Struct(">h")
_I32 = struct.Struct(">i")
_ACKS_TIMEOUT = struct.Struct(">hi")
_INDEX_AND_SIZE = struct.Struct(">ii")
_UUID_BYTES: Final = 16


PartitionData = tuple[int, memoryview | None]


TopicData = tuple[bytes, list[PartitionData]]
"""A topic's key (its name in UTF-8, or from version 13 its id's sixteen bytes) and its partitions."""


class ProduceRequest(NamedTuple):
    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[TopicData]


def parse_request(body: memoryview, version: int) -> ProduceRequest:
    """Parse a whole body. Raises ``Corrupt``."""
    try:
        return _parse_flexible(body, version) if version >= FLEXIBLE_VERSION else _parse_plain(body)
    except (struct.error, IndexError, UnicodeDecodeError) as malformed:
        raise Corrupt(f"malformed Produce request v{version}: {malformed}") from None


def _parse_plain(body: memoryview) -> ProduceRequest:
    (size,) = _I16.unpack_from(body)
    transactional_id = None if size < 0 else str(body[2 : 2 + size], "utf-8")
    position = 2 + max(size, 0)
    acks, timeout_ms = _ACKS_TIMEOUT.unpack_from(body, position)
    (count,) = _I32.unpack_from(body, position + 6)
    position += 10
    topics: list[TopicData] = []
    room = _room(ELEMENTS_MAX, count)
    for _ in range(count):
        (size,) = _I16.unpack_from(body, position)
        if size < 0:
            raise Corrupt("a Produce request names no topic")
        key = bytes(body[position + 2 : position + 2 + size])
        (partition_count,) = _I32.unpack_from(body, position + 2 + size)
        position += 6 + size
        room = _room(room, partition_count)
        partitions: list[PartitionData] = []
        for _ in range(partition_count):
            index, size = _INDEX_AND_SIZE.unpack_from(body, position)
            position += 8
            partitions.append((index, _slice(body, position, size)))
            position += max(size, 0)
        topics.append((key, partitions))
    _expect_end(body, position)
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def _parse_flexible(body: memoryview, version: int) -> ProduceRequest:
    size, position = read_uvarint(body, 0)
    transactional_id = None if size == 0 else str(body[position : position + size - 1], "utf-8")
    position += max(size - 1, 0)
    acks, timeout_ms = _ACKS_TIMEOUT.unpack_from(body, position)
    count, position = read_uvarint(body, position + 6)
    topics: list[TopicData] = []
    room = _room(ELEMENTS_MAX, count - 1)
    for _ in range(count - 1):
        if version >= TOPIC_ID_VERSION:
            size = _UUID_BYTES
        else:
            size, position = read_uvarint(body, position)
            size -= 1
        if size < 0:
            raise Corrupt("a Produce request names no topic")
        key = bytes(body[position : position + size])
        partition_count, position = read_uvarint(body, position + size)
        room = _room(room, partition_count - 1)
        partitions, position = _parse_partitions(body, position, partition_count - 1)
        position = skip_tagged_fields(body, position)
        topics.append((key, partitions))
    _expect_end(body, skip_tagged_fields(body, position))
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def _parse_partitions(body: memoryview, position: int, count: int) -> tuple[list[PartitionData], int]:
    """Parse one topic's partitions in a flexible version. Common cases are inlined, which saves function calls."""
    partitions: list[PartitionData] = []
    for _ in range(count):
        (index,) = _I32.unpack_from(body, position)
        size, position = read_uvarint(body, position + 4)
        end = position + size - 1
        if size and end < len(body):
            partitions.append((index, body[position:end]))
        else:
            partitions.append((index, _slice(body, position, size - 1)))
            end = max(end, position)
        position = end + 1 if not body[end] else skip_tagged_fields(body, end)
    return partitions, position


def _room(room: int, elements: int) -> int:
    """Return how many more elements are allowed after ``elements``, where a negative number counts as 0. Raises ``Corrupt``."""
    if elements > room:
        raise Corrupt(f"a Produce request has more than {ELEMENTS_MAX} topics and partitions: use several requests")
    return room - max(elements, 0)


def _slice(body: memoryview, position: int, size: int) -> memoryview | None:
    if size < 0:
        return None
    if position + size > len(body):
        raise Corrupt(f"records of {size} bytes exceed their request")
    return body[position : position + size]


def _expect_end(body: memoryview, position: int) -> None:
    """Raise ``Corrupt`` if the request ends beyond its frame. Trailing bytes are ignored, as in Kafka."""
    if position > len(body):
        raise Corrupt(f"Produce request of {len(body)} bytes ends at byte {position}")


class Leader(NamedTuple):
    """The leader to which a refused batch must be sent (KIP-951)."""

    broker_id: int
    leader_epoch: int
    host: str
    port: int
    rack: str


class PartitionResult(NamedTuple):
    partition: int
    error_code: int = 0
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1
    error_message: str | None = None
    leader: Leader | None = None


TopicResult = tuple[bytes, Sequence[PartitionResult]]
_PARTITION_3 = struct.Struct(">ihqq")
_PARTITION_5 = struct.Struct(">ihqqq")
_PARTITION_8 = struct.Struct(">ihqqqi")
_PARTITION_9 = struct.Struct(">ihqqqb")
_PARTITION_9_PLAIN = struct.Struct(">ihqqqbbb")


def encode_response(topics: Sequence[TopicResult], version: int, throttle_ms: int = 0) -> bytes:
    """Return the body of the response."""
    if version < FLEXIBLE_VERSION:
        return _encode_plain(topics, version, throttle_ms)
    out = bytearray(write_uvarint(len(topics) + 1))
    leaders: dict[int, Leader] = {}
    for key, results in topics:
        if version < TOPIC_ID_VERSION:
            out += write_uvarint(len(key) + 1)
        out += key
        out += write_uvarint(len(results) + 1)
        for result in results:
            if result.error_code == 0:
                out += _PARTITION_9_PLAIN.pack(*result[:5], 1, 0, 0)
            else:
                _append_refusal(out, result, version, leaders)
        out.append(0)
    out += _I32.pack(throttle_ms)
    out += encode_node_endpoints(0, list(leaders.values())) if leaders else b"\x00"
    return bytes(out)


def _append_refusal(out: bytearray, result: PartitionResult, version: int, leaders: dict[int, Leader]) -> None:
    out += _PARTITION_9.pack(*result[:5], 1)
    if result.error_message is None:
        out.append(0)
    else:
        text = result.error_message.encode()
        out += write_uvarint(len(text) + 1) + text
    if result.leader is None or version < LEADER_VERSION:
        out.append(0)
    else:
        leaders[result.leader.broker_id] = result.leader
        out += b"\x01" + encode_leader(0, result.leader)


def encode_leader(tag: int, leader: Leader) -> bytes:
    """Encode the tagged field LeaderIdAndEpoch."""
    return struct.pack(">bbiib", tag, 9, leader.broker_id, leader.leader_epoch, 0)


def encode_node_endpoints(tag: int, leaders: Sequence[Leader]) -> bytes:
    """Encode the tagged fields of a response whose only tagged field is NodeEndpoints."""
    body = bytearray(write_uvarint(len(leaders) + 1))
    for leader in leaders:
        host, rack = leader.host.encode(), leader.rack.encode()
        body += _I32.pack(leader.broker_id) + write_uvarint(len(host) + 1) + host + _I32.pack(leader.port)
        body += (write_uvarint(len(rack) + 1) + rack if rack else b"\x00") + b"\x00"
    return b"\x01" + write_uvarint(tag) + write_uvarint(len(body)) + bytes(body)


def _encode_plain(topics: Sequence[TopicResult], version: int, throttle_ms: int) -> bytes:
    out = bytearray(_I32.pack(len(topics)))
    for key, results in topics:
        out += _I16.pack(len(key)) + key + _I32.pack(len(results))
        for result in results:
            if version < 5:
                out += _PARTITION_3.pack(*result[:4])
            elif version < 8:
                out += _PARTITION_5.pack(*result[:5])
            else:
                out += _PARTITION_8.pack(*result[:5], 0)
                text = b"" if result.error_message is None else result.error_message.encode()
                out += _I16.pack(-1 if result.error_message is None else len(text)) + text
    out += _I32.pack(throttle_ms)
    return bytes(out)
