"""Records of consumer groups in ``__consumer_offsets``, in Kafka's schemas (KIP-848). Key and value are big-endian.

A key is an i16 type, the group id and, for records of a member, the member id. Values have version 0 and are *flexible*:
compact strings and arrays (uvarint length + 1, 0 is null), a uvarint count of tagged fields at the end of each struct. Unknown
tagged fields are skipped. A null value deletes the key.

Not written: the metadata of partitions (a hash replaces it, KIP-1101) and resolved regular expressions, because each
coordinator resolves them itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar
from uuid import UUID

from stratalog_broker.coordination.groups.core.consumer.model import (
    ClassicJoin,
    ConsumerGroupState,
    CurrentAssignment,
    MemberMetadata,
    MemberState,
    Partition,
    Partitions,
)
from stratalog_broker.coordination.record_reader import Reader, encode_string
from stratalog_broker.protocol.frame import write_uvarint
from stratalog_core.errors import Corrupt

_I8: Final = struct.Struct(">b")
_I16: Final = struct.Struct(">h")
_I32: Final = struct.Struct(">i")
_I64: Final = struct.Struct(">q")
_VERSION: Final = _I16.pack(0)
_NO_TAGS: Final = b"\x00"
_UUID_BYTES: Final = 16
_VARINT_BYTES_MAX: Final = 5
_EPOCH_MAX: Final = 2**31 - 1
Item = TypeVar("Item")


class ConsumerRecord(IntEnum):
    """Types of records, the first field of their keys."""

    GROUP = 3
    MEMBER = 5
    ASSIGNMENT_EPOCH = 6
    TARGET = 7
    CURRENT = 8

    @property
    def is_of_member(self) -> bool:
        return self not in (ConsumerRecord.GROUP, ConsumerRecord.ASSIGNMENT_EPOCH)


TYPES: Final = frozenset(ConsumerRecord)


@dataclass(frozen=True, slots=True)
class ConsumerKey:
    """Identifies a record of a consumer group; ``member_id`` is empty for those of the group itself."""

    kind: ConsumerRecord
    group_id: str
    member_id: str = ""


def encode_key(key: ConsumerKey) -> bytes:
    member = encode_string(key.member_id) if key.kind.is_of_member else b""
    return _I16.pack(key.kind) + encode_string(key.group_id) + member


def decode_consumer_key(kind: int, reader: Reader) -> ConsumerKey:
    """Return the key whose type has been read. Raises ``Corrupt``."""
    record = ConsumerRecord(kind)
    return ConsumerKey(record, reader.string(), reader.string() if record.is_of_member else "")


def encode_value(key: ConsumerKey, state: ConsumerGroupState) -> bytes | None:
    """Return the value of a key in this state; None if the state has nothing of that kind."""
    match key.kind:
        case ConsumerRecord.GROUP:
            return _VERSION + _I32.pack(state.epoch) + _tagged({0: _I64.pack(state.topics_hash)})
        case ConsumerRecord.ASSIGNMENT_EPOCH:
            return _VERSION + _I32.pack(state.assignment_epoch) + _tagged({0: _I64.pack(state.assigned_at_ms)})
        case ConsumerRecord.MEMBER:
            member = state.members.get(key.member_id)
            return None if member is None else _encode_member(member)
        case ConsumerRecord.TARGET:
            target = state.targets.get(key.member_id)
            return None if target is None else _encode_target(target)
        case ConsumerRecord.CURRENT:
            current = state.current.get(key.member_id)
            return None if current is None else _encode_current(current)


def apply_value(key: ConsumerKey, value: bytes, state: ConsumerGroupState) -> None:
    """Put a record into the state. Raises ``Corrupt``, without a change, for a value that cannot be read."""
    reader = FlexibleReader(value)
    reader.expect_version()
    match key.kind:
        case ConsumerRecord.GROUP:
            epoch, tags = reader.epoch(), reader.tags()
            state.epoch, state.topics_hash = epoch, _tagged_i64(tags)
        case ConsumerRecord.ASSIGNMENT_EPOCH:
            epoch, tags = reader.epoch(), reader.tags()
            state.assignment_epoch, state.assigned_at_ms = epoch, _tagged_i64(tags)
        case ConsumerRecord.MEMBER:
            state.members[key.member_id] = _decode_member(reader)
        case ConsumerRecord.TARGET:
            state.targets[key.member_id] = frozenset(_decode_partitions(reader))
        case ConsumerRecord.CURRENT:
            state.current[key.member_id] = _decode_current(reader)


def drop_value(key: ConsumerKey, state: ConsumerGroupState) -> None:
    """Remove what a deleted key of a member described."""
    match key.kind:
        case ConsumerRecord.MEMBER:
            state.members.pop(key.member_id, None)
        case ConsumerRecord.TARGET:
            state.targets.pop(key.member_id, None)
        case ConsumerRecord.CURRENT:
            state.current.pop(key.member_id, None)


def keys_of(group_id: str, state: ConsumerGroupState) -> Iterator[ConsumerKey]:
    """Yield the keys of all records of a group; the group's own comes first."""
    yield ConsumerKey(ConsumerRecord.GROUP, group_id)
    yield ConsumerKey(ConsumerRecord.ASSIGNMENT_EPOCH, group_id)
    for kind, table in (
        (ConsumerRecord.MEMBER, state.members),
        (ConsumerRecord.TARGET, state.targets),
        (ConsumerRecord.CURRENT, state.current),
    ):
        yield from (ConsumerKey(kind, group_id, member_id) for member_id in table)


# -- values


def _encode_member(member: MemberMetadata) -> bytes:
    texts = (member.instance_id, member.rack_id, member.client_id, member.client_host)
    return b"".join(
        (
            _VERSION, *map(_compact, texts), _array(member.topic_names, _compact), _compact(member.topic_pattern),
            _I32.pack(member.rebalance_timeout_ms), _compact(member.assignor),
            _tagged({} if member.classic is None else {0: _encode_classic(member.classic)}),
        )
    )  # fmt: skip


def _encode_classic(classic: ClassicJoin) -> bytes:
    """Return a nullable struct: uvarint 1, or 0 for null."""

    def encode(protocol: tuple[str, bytes]) -> bytes:
        name, metadata = protocol
        return _compact(name) + write_uvarint(len(metadata) + 1) + metadata + _NO_TAGS

    return write_uvarint(1) + _I32.pack(classic.session_timeout_ms) + _array(classic.protocols, encode) + _NO_TAGS


def _decode_member(reader: FlexibleReader) -> MemberMetadata:
    return MemberMetadata(
        instance_id=reader.compact(), rack_id=reader.compact(), client_id=reader.compact() or "",
        client_host=reader.compact() or "", topic_names=tuple(reader.array(lambda: reader.compact() or "")),
        topic_pattern=reader.compact() or "", rebalance_timeout_ms=reader.i32(), assignor=reader.compact(),
        classic=_decode_classic(reader.tags().get(0)),
    )  # fmt: skip


def _decode_classic(content: bytes | None) -> ClassicJoin | None:
    if content is None:
        return None
    reader = FlexibleReader(content)
    if reader.uvarint() == 0:
        return None

    def decode() -> tuple[str, bytes]:
        name, metadata = reader.compact() or "", reader.take(reader.uvarint() - 1)
        reader.tags()
        return name, metadata

    classic = ClassicJoin(session_timeout_ms=reader.i32(), protocols=tuple(reader.array(decode)))
    if not classic.protocols:
        raise Corrupt("member of the classic protocol has no protocols")
    return classic


def _encode_target(target: Partitions) -> bytes:
    return _VERSION + _array(_by_topic(target), lambda row: row[0].bytes + _array(row[1], _I32.pack) + _NO_TAGS) + _NO_TAGS


def _encode_current(current: CurrentAssignment) -> bytes:
    numbers = _I32.pack(current.member_epoch) + _I32.pack(current.previous_epoch) + _I8.pack(current.state)
    return _VERSION + numbers + _encode_owned(current.assigned) + _encode_owned(current.revoking) + _NO_TAGS


def _encode_owned(owned: Mapping[Partition, int]) -> bytes:
    def encode(row: tuple[UUID, list[int]]) -> bytes:
        topic_id, indexes = row
        epochs = _array([owned[topic_id, index] for index in indexes], _I32.pack)
        return topic_id.bytes + _array(indexes, _I32.pack) + _tagged({0: epochs})

    return _array(_by_topic(owned), encode)


def _decode_current(reader: FlexibleReader) -> CurrentAssignment:
    member_epoch, previous_epoch, number = reader.i32(), reader.i32(), reader.i8()
    try:
        state = MemberState(number)
    except ValueError:
        raise Corrupt(f"member state {number} is unknown; known: {', '.join(map(repr, MemberState))}") from None
    return CurrentAssignment(
        member_epoch=member_epoch, previous_epoch=previous_epoch, state=state,
        assigned=_decode_partitions(reader, member_epoch), revoking=_decode_partitions(reader, member_epoch),
    )  # fmt: skip


def _decode_partitions(reader: FlexibleReader, epoch: int = 0) -> dict[Partition, int]:
    """Return partitions with the epochs of their assignment; ``epoch`` for records without (before KIP-1251)."""
    found: dict[Partition, int] = {}

    def decode() -> None:
        topic_id, indexes = UUID(bytes=reader.take(_UUID_BYTES)), reader.array(reader.i32)
        tagged = reader.tags().get(0)
        epochs = [epoch] * len(indexes) if tagged is None else _i32_array(tagged)
        if len(epochs) != len(indexes):
            raise Corrupt(f"{len(indexes)} partitions have {len(epochs)} assignment epochs")
        found.update(((topic_id, index), of_index) for index, of_index in zip(indexes, epochs, strict=True))

    reader.array(decode)
    return found


def _i32_array(content: bytes) -> list[int]:
    reader = FlexibleReader(content)
    return reader.array(reader.i32)


def _by_topic(partitions: Iterable[Partition]) -> list[tuple[UUID, list[int]]]:
    rows: dict[UUID, list[int]] = {}
    for topic_id, index in sorted(partitions):
        rows.setdefault(topic_id, []).append(index)
    return list(rows.items())


# -- flexible encoding


def _compact(text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    encoded = text.encode()
    return write_uvarint(len(encoded) + 1) + encoded


def _array(items: Iterable[Item], encode: Callable[[Item], bytes]) -> bytes:
    encoded = [encode(item) for item in items]
    return write_uvarint(len(encoded) + 1) + b"".join(encoded)


def _tagged(fields: Mapping[int, bytes]) -> bytes:
    encoded = (write_uvarint(tag) + write_uvarint(len(content)) + content for tag, content in sorted(fields.items()))
    return write_uvarint(len(fields)) + b"".join(encoded)


def _tagged_i64(tags: Mapping[int, bytes]) -> int:
    """Return the number in tag 0, zero without it."""
    return FlexibleReader(tags[0]).i64() if 0 in tags else 0


class FlexibleReader(Reader):
    """Reads a flexible value. Truncated content raises ``Corrupt``."""

    def expect_version(self) -> None:
        version = self.i16()
        if version != 0:
            raise Corrupt(f"value has version {version}; version 0 is read")

    def epoch(self) -> int:
        """Return an epoch of a group, which can be raised. Raises ``Corrupt`` for a number that is not one."""
        epoch = self.i32()
        if not 0 <= epoch < _EPOCH_MAX:
            raise Corrupt(f"epoch is {epoch}; it must be between 0 and {_EPOCH_MAX - 1}")
        return epoch

    def i8(self) -> int:
        (value,) = _I8.unpack(self.take(_I8.size))
        return int(value)

    def uvarint(self) -> int:
        value = 0
        for position in range(_VARINT_BYTES_MAX):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << (7 * position)
            if byte < 0x80:
                return value
        raise Corrupt("number is longer than five bytes")

    def compact(self) -> str | None:
        """Return a nullable compact string."""
        length = self.uvarint()
        return None if length == 0 else self.text(length - 1)

    def array(self, decode: Callable[[], Item]) -> list[Item]:
        """Return the items of a compact array, each of which ``decode`` reads."""
        count = self.uvarint() - 1
        if count > self.remaining:
            raise Corrupt(f"array claims {count} elements in {self.remaining} bytes")
        return [decode() for _ in range(count)]

    def tags(self) -> dict[int, bytes]:
        """Return the tagged fields at the end of a struct."""
        found = {}
        for _ in range(self.uvarint()):
            tag, size = self.uvarint(), self.uvarint()
            found[tag] = self.take(size)
        return found
