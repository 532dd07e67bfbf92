"""Fetch requests of light consumers, encoded and decoded by hand because there are many."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from stratalog.kafka_connection import CLIENT, FETCH, Connection, NotAnswered
from stratalog_core.batches.batch import iterate_headers
from stratalog_core.batches.records import Record, iterate_records

_CLIENT: Final = CLIENT.encode()
_FETCH_HEAD, _FETCH_PARTITION = struct.Struct(f">hhih{len(_CLIENT)}s iiii b ii"), struct.Struct(">iiqqi")
_FETCHED_PARTITION = struct.Struct(">ihqqqi")
_MAX_BYTES, _WAIT_MS = 1 << 20, 500


class Fetched(NamedTuple):
    partition: int
    error: int
    records: memoryview


async def fetch(connection: Connection, topic: str, positions: Mapping[int, int]) -> list[Fetched]:
    """Return the records from ``positions`` on, waiting up to half a second for the first. Raises ``NotAnswered``."""
    answer = await connection.exchange(fetch_request(topic, positions))
    return list(fetched(memoryview(answer)))


def fetch_request(topic: str, positions: Mapping[int, int]) -> bytes:
    """Return a consumer's Fetch request, version 11, without a session."""
    name = topic.encode()
    head = _FETCH_HEAD.pack(FETCH, 11, 0, len(_CLIENT), _CLIENT, -1, _WAIT_MS, 1, _MAX_BYTES, 0, 0, -1)
    parts = [head, struct.pack(f">ih{len(name)}si", 1, len(name), name, len(positions))]
    parts += [_FETCH_PARTITION.pack(partition, -1, offset, -1, _MAX_BYTES) for partition, offset in positions.items()]
    # No forgotten topics, no rack.
    return b"".join([*parts, struct.pack(">ih", 0, 0)])


def fetched(answer: memoryview) -> Iterator[Fetched]:
    """Yield the partitions of a response to ``fetch_request``."""
    _, _, error, _, topics = struct.unpack_from(">iihii", answer)
    if error:
        raise NotAnswered(f"a fetch failed with error {error}")
    at = 18
    for _ in range(topics):
        (length,) = struct.unpack_from(">h", answer, at)
        (partitions,) = struct.unpack_from(">i", answer, at + 2 + length)
        at += 6 + length
        for _ in range(partitions):
            partition, error, _, _, _, aborted = _FETCHED_PARTITION.unpack_from(answer, at)
            at += _FETCHED_PARTITION.size + 16 * max(0, aborted)
            _, size = struct.unpack_from(">ii", answer, at)
            at += 8
            yield Fetched(partition, error, answer[at : at + max(0, size)])
            at += max(0, size)


def records_of(batches: memoryview, position: int) -> Iterator[Record]:
    """Yield the records from ``position`` on. The last batch may be truncated."""
    for at, header in iterate_headers(_whole(batches)):
        if header.next_offset > position and not header.is_control:
            yield from (
                each for each in iterate_records(batches[at : at + header.size_bytes], header) if each.offset >= position
            )


def _whole(batches: memoryview) -> memoryview:
    """Return ``batches`` without a truncated last batch."""
    end = 0
    while end + 12 <= len(batches):
        (length,) = struct.unpack_from(">i", batches, end + 8)
        if end + 12 + length > len(batches):
            break
        end += 12 + length
    return batches[:end]
