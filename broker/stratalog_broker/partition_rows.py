"""Who leads what, encoded for Metadata responses and kept until it changes.

After a failover every client asks for all that it uses: a thousand clients of a topic with ten thousand partitions want the
same bytes a thousand times. A partition that changes is encoded again when its topic is next asked for, the others are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from stratalog_broker.protocol.metadata import encode_partition, layout_of
from stratalog_metadata.api import Change, MetadataView
from stratalog_metadata.records import Broker, Partition, Topic, broker_key, partition_key

ROWS_MAX: Final = 100_000
"""Partitions kept encoded, about 100 bytes each; the topics that were not asked for longest are dropped."""


@dataclass(slots=True)
class _Rows:
    rows: list[bytes] = field(default_factory=list)
    stale: set[int] = field(default_factory=set)
    joined: bytes = b""


class PartitionRows:
    """Encoded partitions of the topics that were asked for, by topic and layout, the one asked for last at the end."""

    def __init__(self, view: MetadataView) -> None:
        self._view = view
        self._topics: dict[tuple[UUID, int], _Rows] = {}
        self._layouts: dict[UUID, set[int]] = {}
        self._count = 0
        self.encoded = 0
        """Partitions that were encoded so far."""
        self._unsubscribe = view.subscribe(self._on_changes)

    def of(self, topic: Topic, version: int) -> bytes:
        """All partitions of a topic as they stand in a response of this version, in the order of their indexes."""
        key = topic.topic_id, layout_of(version)
        found = self._topics.pop(key, None) or _Rows()
        self._topics[key] = found
        self._layouts.setdefault(topic.topic_id, set()).add(key[1])
        before = len(found.rows)
        if before != topic.partition_count:
            self._count += topic.partition_count - before
            found.rows = found.rows[: topic.partition_count] + [b""] * (topic.partition_count - before)
            found.stale.update(range(before, topic.partition_count))
            self._make_room()
        if found.stale:
            self._encode(topic.topic_id, key[1], found)
        return found.joined

    def _encode(self, topic_id: UUID, layout: int, found: _Rows) -> None:
        for index in found.stale:
            partition = self._view.find(Partition, partition_key(topic_id, index))
            owner, epoch = (partition.owner, partition.leader_epoch) if partition is not None else (-1, -1)
            lives = owner >= 0 and self._view.find(Broker, broker_key(owner)) is not None
            if index < len(found.rows):
                found.rows[index] = encode_partition(layout, index, owner if lives else -1, epoch)
        self.encoded += len(found.stale)
        found.stale.clear()
        found.joined = b"".join(found.rows)

    def _make_room(self) -> None:
        """Never drops the one that was asked for last."""
        while self._count > ROWS_MAX and len(self._topics) > 1:
            self._drop(*next(iter(self._topics)))

    def _drop(self, topic_id: UUID, layout: int) -> None:
        self._count -= len(self._topics.pop((topic_id, layout)).rows)
        self._layouts[topic_id].discard(layout)
        if not self._layouts[topic_id]:
            del self._layouts[topic_id]

    def _on_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            versioned = change.after or change.before
            record = versioned.record if versioned is not None else None
            if isinstance(record, Partition):
                for layout in self._layouts.get(record.topic_id, ()):
                    self._topics[record.topic_id, layout].stale.add(record.index)
            elif isinstance(record, Broker) and (change.before is None or change.after is None):
                for found in self._topics.values():
                    found.stale.update(range(len(found.rows)))
            elif isinstance(record, Topic) and change.after is None:
                for layout in list(self._layouts.get(record.topic_id, ())):
                    self._drop(record.topic_id, layout)

    def close(self) -> None:
        """Follow the view no longer."""
        self._unsubscribe()
