"""Fetch requests, versions 4–18, parsed by hand, because consumers name all their partitions in most of them.

Layouts are those of Kafka's FetchRequest.json; a property test compares them with kio. Partitions without tagged fields have a
fixed size and are unpacked as an array. Version 5 adds a partition's log start offset, 7 the session, 9 the leader epoch, 11
the rack; 12 is flexible and adds the epoch of a partition's last batch; 13 names topics by id; 15 moves the replica to a
tagged field. Fields that only replicas send are skipped.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from stratalog_broker.protocol.fetch import FLEXIBLE_VERSION, TOPIC_ID_VERSION
from stratalog_broker.protocol.frame import ELEMENTS_MAX, read_uvarint, skip_tagged_fields
from stratalog_core.errors import Corrupt

SESSION_VERSION: Final = 7
_EPOCH_VERSION: Final = 9
_RACK_VERSION: Final = 11
_NO_REPLICA_VERSION: Final = 15
_UUID_BYTES: Final = 16

_I16: Final = struct.Struct(">h")
_I32: Final = struct.Struct(">i")
_HEAD_4: Final = struct.Struct(">4xiiib")
_HEAD_7: Final = struct.Struct(">4xiiibii")
_HEAD_15: Final = struct.Struct(">iiibii")
# Index, leader epoch (from 9), offset, maximum bytes; in flexible versions the number of tagged fields.
_PARTITION_4: Final = struct.Struct(">iqi")
_PARTITION_5: Final = struct.Struct(">iq8xi")
_PARTITION_9: Final = struct.Struct(">iiq8xi")
_PARTITION_12: Final = struct.Struct(">iiqi8xiB")

PartitionKey = tuple[bytes, int]
"""Topic key as in the request (name or id) and partition."""


class FetchWanted:
    """A consumer's request for one partition, in a session with the last response for it."""

    __slots__ = ("bytes_max", "index", "key", "last_epoch", "leader_epoch", "offset", "told")

    def __init__(self, key: bytes, index: int, offset: int, bytes_max: int, leader_epoch: int, last_epoch: int = -1) -> None:
        self.key = key
        self.index = index
        self.offset = offset
        self.bytes_max = bytes_max
        self.leader_epoch = leader_epoch
        self.last_epoch = last_epoch
        """Epoch of the last record that the client has fetched; -1: not given."""
        self.told: tuple[int, int, int] | None = None
        """(error code, high watermark, log start offset) of the last response."""


class FetchRequest(NamedTuple):
    """A parsed request. Versions without sessions have session id 0 and epoch -1."""

    max_wait_ms: int
    bytes_min: int
    bytes_max: int
    isolation_level: int
    session_id: int
    session_epoch: int
    wanted: list[FetchWanted]
    forgotten: list[PartitionKey]
    rack: bytes = b""
    """The client's rack; empty: not given."""


def parse_request(body: memoryview, version: int) -> FetchRequest:
    """Parse a whole body. Raises ``Corrupt``."""
    try:
        return _Walk(body, version).request()
    except (struct.error, IndexError, UnicodeDecodeError) as malformed:
        raise Corrupt(f"malformed Fetch request v{version}: {malformed}") from None


class _Walk:
    """The parser's position in one body, and in ``room`` how many more array elements are allowed."""

    __slots__ = ("body", "flexible", "position", "room", "version")

    def __init__(self, body: memoryview, version: int) -> None:
        self.body = body
        self.version = version
        self.flexible = version >= FLEXIBLE_VERSION
        self.position = 0
        self.room = ELEMENTS_MAX

    def request(self) -> FetchRequest:
        version = self.version
        head = _HEAD_15 if version >= _NO_REPLICA_VERSION else _HEAD_7 if version >= SESSION_VERSION else _HEAD_4
        fields = head.unpack_from(self.body)
        if version < SESSION_VERSION:
            fields += (0, -1)
        self.position = head.size
        wanted: list[FetchWanted] = []
        for _ in range(self.count()):
            self.topic(wanted)
        forgotten: list[PartitionKey] = []
        if version >= SESSION_VERSION:
            for _ in range(self.count()):
                self.forgotten_topic(forgotten)
        rack = b""
        if version >= _RACK_VERSION:
            rack = self.string(is_nullable=True)
        self.tagged_fields()
        if self.position > len(self.body):
            raise Corrupt(f"Fetch request of {len(self.body)} bytes ends at byte {self.position}")
        return FetchRequest._make((*fields, wanted, forgotten, rack))

    def count(self) -> int:
        """Return the number of elements of the array that begins here; all arrays of a request share one bound."""
        if self.flexible:
            count, self.position = read_uvarint(self.body, self.position)
            count -= 1
        else:
            (count,) = _I32.unpack_from(self.body, self.position)
            self.position += 4
        if count < 0:
            raise Corrupt("a Fetch request has null where an array is required")
        self.room -= count
        if self.room < 0:
            raise Corrupt(f"a Fetch request has more than {ELEMENTS_MAX} elements: use several requests")
        return count

    def string(self, *, is_nullable: bool = False) -> bytes:
        if self.flexible:
            size, start = read_uvarint(self.body, self.position)
            size -= 1
        else:
            (size,) = _I16.unpack_from(self.body, self.position)
            start = self.position + 2
        if size < 0 and not is_nullable:
            raise Corrupt("a Fetch request has null where a string is required")
        self.position = start + max(size, 0)
        found = bytes(self.body[start : self.position])
        found.decode()
        return found

    def key(self) -> bytes:
        """Return the topic's id, or its name in UTF-8."""
        if self.version < TOPIC_ID_VERSION:
            return self.string()
        start, self.position = self.position, self.position + _UUID_BYTES
        return bytes(self.body[start : self.position])

    def tagged_fields(self) -> None:
        if self.flexible:
            self.position = skip_tagged_fields(self.body, self.position)

    def topic(self, wanted: list[FetchWanted]) -> None:
        key, count = self.key(), self.count()
        if self.flexible:
            self.partitions_flexible(key, count, wanted)
        else:
            self.partitions_plain(key, count, wanted)
        self.tagged_fields()

    def records(self, layout: struct.Struct, count: int) -> memoryview:
        """Return the bytes of ``count`` records of one size. Raises ``Corrupt`` if they end beyond the body."""
        end = self.position + count * layout.size
        if end > len(self.body):
            raise Corrupt(f"a Fetch request claims {count} elements in {len(self.body) - self.position} bytes")
        return self.body[self.position : end]

    def partitions_plain(self, key: bytes, count: int, wanted: list[FetchWanted]) -> None:
        if self.version >= _EPOCH_VERSION:
            for index, epoch, offset, bytes_max in _PARTITION_9.iter_unpack(self.records(_PARTITION_9, count)):
                wanted.append(FetchWanted(key, index, offset, bytes_max, epoch))
            self.position += count * _PARTITION_9.size
            return
        layout = _PARTITION_5 if self.version >= 5 else _PARTITION_4
        for index, offset, bytes_max in layout.iter_unpack(self.records(layout, count)):
            wanted.append(FetchWanted(key, index, offset, bytes_max, -1))
        self.position += count * layout.size

    def partitions_flexible(self, key: bytes, count: int, wanted: list[FetchWanted]) -> None:
        """Parse partitions as an array of fixed size; restart it after each partition that has tagged fields."""
        size = _PARTITION_12.size
        while count:
            rows = _PARTITION_12.iter_unpack(self.records(_PARTITION_12, count))
            for index, epoch, offset, last_epoch, bytes_max, tagged_fields in rows:
                wanted.append(FetchWanted(key, index, offset, bytes_max, epoch, last_epoch))
                self.position += size
                count -= 1
                if tagged_fields:
                    self.position = skip_tagged_fields(self.body, self.position - 1)
                    break

    def forgotten_topic(self, forgotten: list[PartitionKey]) -> None:
        key, count = self.key(), self.count()
        forgotten.extend((key, index) for (index,) in _I32.iter_unpack(self.records(_I32, count)))
        self.position += count * _I32.size
        self.tagged_fields()
