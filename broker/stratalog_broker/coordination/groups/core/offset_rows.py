"""Fast encoding and decoding of many offset records of ``__consumer_offsets`` that share a group and a topic.

The bytes are identical to those of :mod:`.records`, which handles the uncommon cases. Repeated parts are cached for one request
or one batch: the beginning of a key up to its partition, and the topic's id.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

from stratalog_broker.coordination.groups.core.consumer.records import ConsumerKey
from stratalog_broker.coordination.groups.core.records import (
    VALUE_VERSION,
    CommittedOffset,
    GroupKey,
    OffsetKey,
    decode_key,
    decode_offset_value,
    encode_offset_key,
    encode_offset_value,
    topic_id_headers,
    topic_id_in,
)
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_core.batches.records import Header

_PARTITION: Final = struct.Struct(">i")
# Version 3 without metadata: i16 version, i64 offset, i32 leader epoch, i16 length 0, i64 time of the commit.
_PLAIN_VALUE: Final = struct.Struct(">hqihq")


class Commit(NamedTuple):
    """One offset to commit; ``metadata`` is the client's text."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    topic_id: UUID | None = None


class OffsetEncoder:
    """Encodes one group's commits of one time."""

    def __init__(self, group_id: str, committed_at_ms: int) -> None:
        self._group_id = group_id
        self._committed_at_ms = committed_at_ms
        self._beginnings: dict[str, bytes] = {}
        self._headers: dict[UUID | None, tuple[Header, ...]] = {}

    def record(self, commit: Commit) -> CoordinatorRecord:
        topic, partition, offset, leader_epoch, metadata, topic_id = commit
        beginning = self._beginnings.get(topic)
        if beginning is None:
            key = encode_offset_key(OffsetKey(self._group_id, topic, partition))
            beginning = self._beginnings[topic] = key[: -_PARTITION.size]
        headers = self._headers.get(topic_id)
        if headers is None:
            headers = self._headers[topic_id] = topic_id_headers(topic_id)
        return CoordinatorRecord(beginning + _PARTITION.pack(partition), self._value(offset, leader_epoch, metadata), headers)

    def _value(self, offset: int, leader_epoch: int, metadata: str) -> bytes:
        if not metadata:
            return _PLAIN_VALUE.pack(VALUE_VERSION, offset, leader_epoch, 0, self._committed_at_ms)
        return encode_offset_value(
            CommittedOffset(offset=offset, leader_epoch=leader_epoch, metadata=metadata, committed_at_ms=self._committed_at_ms)
        )


class OffsetDecoder:
    """Decodes the keys and values of one batch. Both methods raise ``Corrupt``, as :mod:`.records` does."""

    def __init__(self) -> None:
        self._names: dict[bytes, tuple[str, str]] = {}
        self._topic_ids: dict[tuple[Header, ...], UUID | None] = {}

    def key(self, key: bytes) -> OffsetKey | GroupKey | ConsumerKey | None:
        """Return the same as :func:`.records.decode_key`."""
        names = self._names.get(key[: -_PARTITION.size])
        if names is not None:
            return OffsetKey(*names, *_PARTITION.unpack_from(key, len(key) - _PARTITION.size))
        found = decode_key(key)
        # Cache only keys that end with their partition: others with the same beginning then differ only in the partition.
        if isinstance(found, OffsetKey) and encode_offset_key(found) == key:
            self._names[key[: -_PARTITION.size]] = found.group_id, found.topic
        return found

    def value(self, value: bytes, headers: Sequence[Header]) -> CommittedOffset:
        """Return the committed offset, with the topic id from the headers."""
        topic_id = self._topic_id(tuple(headers))
        if len(value) == _PLAIN_VALUE.size:
            version, offset, leader_epoch, metadata_bytes, committed_at_ms = _PLAIN_VALUE.unpack(value)
            if version == VALUE_VERSION and metadata_bytes == 0:
                return CommittedOffset(
                    offset=offset, leader_epoch=leader_epoch, metadata="", committed_at_ms=committed_at_ms, topic_id=topic_id
                )
        return decode_offset_value(value, topic_id)

    def _topic_id(self, headers: tuple[Header, ...]) -> UUID | None:
        if headers not in self._topic_ids:
            self._topic_ids[headers] = topic_id_in(headers)
        return self._topic_ids[headers]
