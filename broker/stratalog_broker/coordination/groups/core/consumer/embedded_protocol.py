"""Kafka's encoding of what members of the classic protocol of type "consumer" say in JoinGroup and get from SyncGroup.

``ConsumerProtocolSubscription`` (versions 0–3) and ``ConsumerProtocolAssignment`` (0–3), as Java's clients name them: an i16
version, then strings with i16, bytes and arrays with i32 lengths. Later versions are read as version 3, as in Kafka.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stratalog_broker.coordination.record_reader import Reader, encode_string
from stratalog_core.errors import Corrupt

PROTOCOL_TYPE: Final = "consumer"
NEWEST: Final = 3
_OWNED_SINCE: Final = 1
_GENERATION_SINCE: Final = 2
_RACK_SINCE: Final = 3
_I16: Final = struct.Struct(">h")
_I32: Final = struct.Struct(">i")
_NO_USER_DATA: Final = _I32.pack(-1)
NamedPartitions = Mapping[str, Sequence[int]]
"""Partition indexes by topic name; this protocol identifies topics by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """``owned`` are the partitions that a member with a cooperative assignor keeps while it joins."""

    version: int
    topics: tuple[str, ...]
    owned: NamedPartitions
    rack_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    partitions: NamedPartitions
    has_user_data: bool
    """Whether the assignor that computed it keeps state in it."""


def decode_subscription(content: bytes) -> Subscription:
    """Return a member's subscription. Raises ``Corrupt``."""
    reader = Reader(content)
    version = _version(reader)
    topics = tuple(reader.string() for _ in range(reader.count()))
    reader.blob()  # user data is the assignor's own
    owned = _partitions(reader) if version >= _OWNED_SINCE else {}
    if version >= _GENERATION_SINCE:
        reader.i32()
    rack_id = reader.nullable_string() if version >= _RACK_SINCE else None
    return Subscription(version=version, topics=topics, owned=owned, rack_id=rack_id or None)


def decode_assignment(content: bytes) -> Assignment:
    """Return a member's assignment; no content means no partitions. Raises ``Corrupt``."""
    if not content:
        return Assignment(partitions={}, has_user_data=False)
    reader = Reader(content)
    _version(reader)
    return Assignment(partitions=_partitions(reader), has_user_data=bool(reader.blob()))


def encode_assignment(partitions: NamedPartitions, version: int) -> bytes:
    rows = (
        encode_string(topic) + _I32.pack(len(indexes)) + b"".join(map(_I32.pack, indexes))
        for topic, indexes in partitions.items()
    )
    return _I16.pack(version) + _I32.pack(len(partitions)) + b"".join(rows) + _NO_USER_DATA


def _version(reader: Reader) -> int:
    version = reader.i16()
    if version < 0:
        raise Corrupt(f"consumer protocol has version {version}; minimum is 0")
    return min(version, NEWEST)


def _partitions(reader: Reader) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for _ in range(reader.count()):
        found.setdefault(reader.string(), []).extend(reader.i32() for _ in range(reader.count()))
    return found
