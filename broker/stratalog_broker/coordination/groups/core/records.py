"""Records of ``__consumer_offsets`` in Kafka's schemas, so that Kafka's tools can read them.

Big-endian; a string is an i16 length and UTF-8 (null: -1), bytes have an i32 length, an array an i32 count. Each key and
value begins with an i16 version. Written: ``OffsetCommitKey`` v1, ``OffsetCommitValue`` v3, ``GroupMetadataKey`` v2,
``GroupMetadataValue`` v3. Also read: OffsetCommit values v0–v3 and group values v0–v3, as written by older Kafka versions.
A null value deletes the key. Keys of consumer groups are in ``consumer/records.py``; other ones are skipped.

The only extension is a record header of offset commits, which Kafka's tools ignore: ``stratalog.topic_id``, the topic's id in
sixteen bytes, so that a topic recreated under the same name does not inherit offsets.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from stratalog_broker.coordination.groups.core.consumer.records import TYPES, ConsumerKey, decode_consumer_key
from stratalog_broker.coordination.groups.core.messages import GroupImage, MemberImage
from stratalog_broker.coordination.record_reader import Reader, encode_string
from stratalog_core.batches.records import Header
from stratalog_core.errors import Corrupt

OFFSET_KEY_VERSION: Final = 1
GROUP_KEY_VERSION: Final = 2
VALUE_VERSION: Final = 3
TOPIC_ID_HEADER: Final = "stratalog.topic_id"
_UUID_BYTES: Final = 16
_I16: Final = struct.Struct(">h")
_I32: Final = struct.Struct(">i")
_I64: Final = struct.Struct(">q")


class CommittedOffset(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group's committed offset for one partition. ``leader_epoch`` is -1 if the client did not send one.

    ``topic_id`` distinguishes topics created in turn under one name; it is stored in the record's header, not in its value.
    """

    offset: int
    leader_epoch: int
    metadata: str
    committed_at_ms: int
    topic_id: UUID | None = None


def is_of(committed: CommittedOffset, topic_id: UUID | None) -> bool:
    """Return whether an offset belongs to the topic with this id; an offset without an id belongs to any existing topic."""
    return topic_id is not None and committed.topic_id in (None, topic_id)


class OffsetKey(NamedTuple):
    """Identifies a group's offset for one partition of a topic."""

    group_id: str
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Identifies a group's metadata."""

    group_id: str


def encode_offset_key(key: OffsetKey) -> bytes:
    return b"".join(
        (_I16.pack(OFFSET_KEY_VERSION), encode_string(key.group_id), encode_string(key.topic), _I32.pack(key.partition))
    )


def encode_group_key(group_id: str) -> bytes:
    return _I16.pack(GROUP_KEY_VERSION) + encode_string(group_id)


def encode_offset_value(offset: CommittedOffset) -> bytes:
    head = _I16.pack(VALUE_VERSION) + _I64.pack(offset.offset) + _I32.pack(offset.leader_epoch)
    return head + encode_string(offset.metadata) + _I64.pack(offset.committed_at_ms)


def topic_id_headers(topic_id: UUID | None) -> tuple[Header, ...]:
    return () if topic_id is None else ((TOPIC_ID_HEADER, topic_id.bytes),)


def topic_id_in(headers: Sequence[Header]) -> UUID | None:
    """Return the topic id in a commit's headers, None without that header. Raises ``Corrupt`` for a malformed id."""
    content = next((content for name, content in headers if name == TOPIC_ID_HEADER), None)
    if content is None:
        return None
    if len(content) != _UUID_BYTES:
        raise Corrupt(f"header {TOPIC_ID_HEADER} has {len(content)} bytes instead of {_UUID_BYTES}")
    return UUID(bytes=content)


def encode_group_value(image: GroupImage) -> bytes:
    head = (
        _I16.pack(VALUE_VERSION), encode_string(image.protocol_type), _I32.pack(image.generation),
        encode_string(image.protocol_name), encode_string(image.leader), _I64.pack(image.state_since_ms),
        _I32.pack(len(image.members)),
    )  # fmt: skip
    return b"".join((*head, *map(_encode_member, image.members)))


def _encode_member(member: MemberImage) -> bytes:
    names = (member.member_id, member.group_instance_id, member.client_id, member.client_host)
    timeouts = _I32.pack(member.rebalance_timeout_ms) + _I32.pack(member.session_timeout_ms)
    return b"".join((*map(encode_string, names), timeouts, _bytes(member.subscription), _bytes(member.assignment)))


def decode_key(key: bytes) -> OffsetKey | GroupKey | ConsumerKey | None:
    """Return the key, or None for a key version that is not read here. Raises ``Corrupt``."""
    reader = Reader(key)
    version = reader.i16()
    if version in (0, OFFSET_KEY_VERSION):
        return OffsetKey(reader.string(), reader.string(), reader.i32())
    if version == GROUP_KEY_VERSION:
        return GroupKey(reader.string())
    return decode_consumer_key(version, reader) if version in TYPES else None


def decode_offset_value(value: bytes, topic_id: UUID | None = None) -> CommittedOffset:
    """Return the committed offset. Raises ``Corrupt``, also for unknown versions."""
    reader = Reader(value)
    version = reader.version(VALUE_VERSION)
    offset = reader.i64()
    leader_epoch = reader.i32() if version == 3 else -1
    return CommittedOffset(
        offset=offset, leader_epoch=leader_epoch, metadata=reader.string(), committed_at_ms=reader.i64(), topic_id=topic_id
    )  # fmt: skip


def decode_group_value(group_id: str, value: bytes) -> GroupImage:
    """Return the stored group. Raises ``Corrupt``, also for unknown versions."""
    reader = Reader(value)
    version = reader.version(VALUE_VERSION)
    protocol_type, generation = reader.string(), reader.i32()
    protocol_name, leader = reader.nullable_string(), reader.nullable_string()
    state_since_ms = reader.i64() if version >= 2 else -1
    members = tuple(_decode_member(reader, version) for _ in range(reader.count()))
    return GroupImage(
        group_id=group_id, protocol_type=protocol_type, generation=generation, protocol_name=protocol_name, leader=leader,
        state_since_ms=state_since_ms, members=members,
    )  # fmt: skip


def _decode_member(reader: Reader, version: int) -> MemberImage:
    member_id = reader.string()
    group_instance_id = reader.nullable_string() if version >= 3 else None
    client_id, client_host = reader.string(), reader.string()
    rebalance_timeout_ms = reader.i32() if version >= 1 else None
    session_timeout_ms = reader.i32()
    return MemberImage(
        member_id=member_id, group_instance_id=group_instance_id, client_id=client_id, client_host=client_host,
        rebalance_timeout_ms=session_timeout_ms if rebalance_timeout_ms is None else rebalance_timeout_ms,
        session_timeout_ms=session_timeout_ms, subscription=reader.blob(), assignment=reader.blob(),
    )  # fmt: skip


def subscribed_topics(subscription: bytes) -> frozenset[str] | None:
    """Return the topics in a ``ConsumerProtocolSubscription`` (all versions begin with them), or None for other content."""
    reader = Reader(subscription)
    try:
        reader.i16()
        return frozenset(reader.string() for _ in range(reader.count()))
    except Corrupt:
        return None


def _bytes(content: bytes) -> bytes:
    return _I32.pack(len(content)) + content
