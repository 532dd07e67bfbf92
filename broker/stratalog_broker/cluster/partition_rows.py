"""Cache of partitions encoded for Metadata responses.

After a failover every client asks for its topics: a thousand clients of a topic with ten thousand partitions request the same
bytes a thousand times. When a topic is requested, only the partitions that have changed are encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from stratalog_broker.cluster.replicas import Replicas
from stratalog_broker.protocol.metadata import encode_partition, layout_of
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Bookie, Broker, Ledger, Log, Partition, Topic
from stratalog_metadata.state.changes import Change

ROWS_MAX: Final = 100_000
"""Encoded partitions kept, about 100 bytes each; the least recently requested topics are dropped."""


@dataclass(slots=True)
class _Rows:
    rows: list[bytes] = field(default_factory=list)
    stale: set[int] = field(default_factory=set)
    joined: bytes = b""


class PartitionRows:
    """Encoded partitions of requested topics, by topic and layout; the most recently requested topic is last."""

    def __init__(self, view: MetadataView) -> None:
        self._view = view
        self._topics: dict[tuple[UUID, int], _Rows] = {}
        self._layouts: dict[UUID, set[int]] = {}
        self._count = 0
        self.encoded = 0
        """Number of partitions encoded so far."""
        self._unsubscribe = view.subscribe(self._on_changes)

    def of(self, topic: Topic, version: int) -> bytes:
        """Return all partitions of a topic, encoded for a response of this version, in index order."""
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
            self._encode(topic, key[1], found)
        return found.joined

    def _encode(self, topic: Topic, layout: int, found: _Rows) -> None:
        replicas = Replicas(self._view)
        for index in found.stale:
            if index < len(found.rows):
                found.rows[index] = encode_partition(layout, index, replicas.of(topic, index))
        self.encoded += len(found.stale)
        found.stale.clear()
        found.joined = b"".join(found.rows)

    def _make_room(self) -> None:
        """Drop topics until ``ROWS_MAX`` holds; never the most recently requested one."""
        while self._count > ROWS_MAX and len(self._topics) > 1:
            self._drop(*next(iter(self._topics)))

    def _drop(self, topic_id: UUID, layout: int) -> None:
        self._count -= len(self._topics.pop((topic_id, layout)).rows)
        self._layouts[topic_id].discard(layout)
        if not self._layouts[topic_id]:
            del self._layouts[topic_id]

    def _on_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            before = change.before.record if change.before is not None else None
            record = change.after.record if change.after is not None else before
            if isinstance(record, Partition):
                self._changed(record.topic_id, record.index)
            elif isinstance(record, Log):
                if not isinstance(before, Log) or before.ledgers[-1:] != record.ledgers[-1:]:
                    self._changed(record.topic_id, record.index)
            elif isinstance(record, Ledger):
                if isinstance(before, Ledger) and before.fragments != record.fragments:
                    self._changed(record.topic_id, record.partition)
            elif isinstance(record, Broker | Bookie):
                if change.after is None or _availability(before) != _availability(record):
                    self._all_changed()
            elif isinstance(record, Topic):
                self._topic_changed(before, record, is_gone=change.after is None)

    def _changed(self, topic_id: UUID, index: int) -> None:
        for layout in self._layouts.get(topic_id, ()):
            self._topics[topic_id, layout].stale.add(index)

    def _all_changed(self) -> None:
        for found in self._topics.values():
            found.stale.update(range(len(found.rows)))

    def _topic_changed(self, before: object, topic: Topic, *, is_gone: bool) -> None:
        for layout in list(self._layouts.get(topic.topic_id, ())):
            if is_gone:
                self._drop(topic.topic_id, layout)
            elif not isinstance(before, Topic) or before.replication_factor != topic.replication_factor:
                found = self._topics[topic.topic_id, layout]
                found.stale.update(range(len(found.rows)))

    def close(self) -> None:
        """Stop following the view."""
        self._unsubscribe()


def _availability(record: object) -> object:
    """Return the part of a broker's or bookie's record that rows depend on; None if there is no record."""
    if isinstance(record, Bookie):
        return record.session_id != 0, record.disks, record.failed_disks
    return isinstance(record, Broker) or None
