"""The contents of a partition of ``__consumer_offsets``: the metadata of its groups and their committed offsets.

This is the durable half of a coordinator, its ``CoordinatorState``. Live group members are in ``group.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final
from uuid import UUID

import msgspec

from stratalog_broker.coordination.groups.core.consumer.model import ConsumerGroupState
from stratalog_broker.coordination.groups.core.consumer.records import (
    ConsumerKey,
    ConsumerRecord,
    apply_value,
    drop_value,
    encode_key,
    encode_value,
    keys_of,
)
from stratalog_broker.coordination.groups.core.messages import GroupImage
from stratalog_broker.coordination.groups.core.offset_rows import OffsetDecoder
from stratalog_broker.coordination.groups.core.pending_offsets import PendingOffsets
from stratalog_broker.coordination.groups.core.records import CommittedOffset, GroupKey, OffsetKey, decode_group_value
from stratalog_broker.coordination.replay import ApplyRecord, decode_snapshot
from stratalog_core.batches.batch import NO_PRODUCER_ID
from stratalog_core.batches.records import Header

SNAPSHOT_VERSION: Final = 1

TopicPartitionName = tuple[str, int]
"""Topic name and partition index; groups identify topics by name."""


class _StoredOffset(msgspec.Struct, frozen=True, array_like=True):
    group_id: str
    topic: str
    partition: int
    committed: CommittedOffset


class _StoredPendingOffset(msgspec.Struct, frozen=True, array_like=True):
    producer_id: int
    group_id: str
    topic: str
    partition: int
    committed: CommittedOffset


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot format. Fields may be added with defaults; a change of meaning needs a new version."""

    version: int
    groups: tuple[GroupImage, ...]
    offsets: tuple[_StoredOffset, ...]
    pending: tuple[_StoredPendingOffset, ...] = ()
    """In the order of their records."""
    consumer_groups: tuple[tuple[bytes, bytes], ...] = ()
    """Keys and values of their records."""
    left_out: tuple[_StoredOffset, ...] = ()
    left_out_pending: tuple[_StoredPendingOffset, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Snapshot)


class LeftOutOffsets:
    """Offsets of topics that were not restored from the bucket with the others, for the next restore.

    The coordinator answers no request with them and changes them only when a transaction ends.
    """

    def __init__(self) -> None:
        self.offsets: dict[tuple[OffsetKey, UUID | None], CommittedOffset] = {}
        """By name and topic id, because topics created in turn can have one name."""
        self.pending = PendingOffsets()

    def put(self, name: OffsetKey, committed: CommittedOffset) -> None:
        self.offsets[name, committed.topic_id] = committed

    def transaction_ended(self, producer_id: int, *, commit: bool) -> None:
        for name, committed in self.pending.ended(producer_id, commit=commit):
            self.put(name, committed)

    def __iter__(self) -> Iterator[tuple[OffsetKey, CommittedOffset]]:
        """Yield the names and values of those that are not pending."""
        return ((name, committed) for (name, _), committed in self.offsets.items())


class GroupStore:
    """Groups and offsets by group id. A group without offsets has no entry in ``offsets``."""

    def __init__(self) -> None:
        self.images: dict[str, GroupImage] = {}
        self.offsets: dict[str, dict[TopicPartitionName, CommittedOffset]] = {}
        self.consumer_groups: dict[str, ConsumerGroupState] = {}
        self.offset_count = 0
        self.pending = PendingOffsets()
        """Offsets of transactions that are not decided yet."""
        self.left_out = LeftOutOffsets()

    def offsets_of(self, group_id: str) -> dict[TopicPartitionName, CommittedOffset]:
        return self.offsets.get(group_id, {})

    def begin_batch(self, producer_id: int = NO_PRODUCER_ID) -> ApplyRecord:
        """Return the function that applies the records of one batch; see ``CoordinatorState``."""
        return partial(self._apply, OffsetDecoder(), producer_id)

    def transaction_ended(self, producer_id: int, *, commit: bool) -> None:
        for name, committed in self.pending.ended(producer_id, commit=commit):
            self.put(name, committed)
        self.left_out.transaction_ended(producer_id, commit=commit)

    def _apply(
        self, decoder: OffsetDecoder, producer_id: int, key: bytes, value: bytes | None, headers: Sequence[Header]
    ) -> None:
        match decoder.key(key):
            case OffsetKey() as name:
                if value is None:
                    self.pending.replaced(name)
                    self._drop(name)
                elif producer_id != NO_PRODUCER_ID:
                    self.pending.add(producer_id, name, decoder.value(value, headers))
                else:
                    committed = decoder.value(value, headers)
                    self.pending.replaced(name)
                    self.put(name, committed)
            case GroupKey(group_id=group_id):
                if value is None:
                    self.images.pop(group_id, None)
                else:
                    self.images[group_id] = decode_group_value(group_id, value)
            case ConsumerKey() as consumer_key:
                self._apply_to_consumer_group(consumer_key, value)
            case None:
                pass

    def _apply_to_consumer_group(self, key: ConsumerKey, value: bytes | None) -> None:
        state = self.consumer_groups.get(key.group_id)
        if value is not None:
            found = ConsumerGroupState() if state is None else state
            apply_value(key, value, found)
            self.consumer_groups[key.group_id] = found
        elif key.kind is ConsumerRecord.GROUP:
            self.consumer_groups.pop(key.group_id, None)
        elif state is not None:
            drop_value(key, state)

    def _drop(self, key: OffsetKey) -> None:
        committed = self.offsets.get(key.group_id)
        if committed is None or committed.pop((key.topic, key.partition), None) is None:
            return
        self.offset_count -= 1
        if not committed:
            del self.offsets[key.group_id]

    def put(self, name: OffsetKey, committed: CommittedOffset) -> None:
        """Set a position."""
        partition: TopicPartitionName = (name.topic, name.partition)
        table = self.offsets.setdefault(name.group_id, {})
        self.offset_count += partition not in table
        table[partition] = committed

    def snapshot(self) -> bytes:
        """Return the whole content as msgpack (docs/reference/formats/consumer-offsets.md)."""
        return _encoder.encode(
            _Snapshot(
                version=SNAPSHOT_VERSION,
                groups=tuple(self.images.values()),
                offsets=tuple(self._all_offsets()),
                pending=_stored_pending(self.pending),
                consumer_groups=tuple(self._consumer_records()),
                left_out=tuple(_StoredOffset(*name, committed) for name, committed in self.left_out),
                left_out_pending=_stored_pending(self.left_out.pending),
            )
        )

    def _consumer_records(self) -> Iterator[tuple[bytes, bytes]]:
        for group_id, state in self.consumer_groups.items():
            for key in keys_of(group_id, state):
                value = encode_value(key, state)
                assert value is not None, "the state has all that its keys name"
                yield encode_key(key), value

    def _all_offsets(self) -> Iterator[_StoredOffset]:
        for group_id, table in self.offsets.items():
            for (topic, partition), committed in table.items():
                yield _StoredOffset(group_id, topic, partition, committed)

    @classmethod
    def from_snapshot(cls, content: bytes | None) -> GroupStore:
        """Return the store of a snapshot, empty for None. Raises ``Corrupt`` for malformed content and unknown versions."""
        store = cls()
        if content is None:
            return store
        snapshot = decode_snapshot(_decoder, content, SNAPSHOT_VERSION, "consumer groups")
        store.images = {image.group_id: image for image in snapshot.groups}
        for stored in snapshot.offsets:
            store.put(OffsetKey(stored.group_id, stored.topic, stored.partition), stored.committed)
        for stored in snapshot.left_out:
            store.left_out.put(OffsetKey(stored.group_id, stored.topic, stored.partition), stored.committed)
        for pending, found in ((store.pending, snapshot.pending), (store.left_out.pending, snapshot.left_out_pending)):
            for each in found:
                pending.add(each.producer_id, OffsetKey(each.group_id, each.topic, each.partition), each.committed)
        apply = store.begin_batch()
        for key, value in snapshot.consumer_groups:
            apply(key, value, ())
        return store


def _stored_pending(pending: PendingOffsets) -> tuple[_StoredPendingOffset, ...]:
    return tuple(_StoredPendingOffset(producer_id, *name, committed) for producer_id, name, committed in pending)
