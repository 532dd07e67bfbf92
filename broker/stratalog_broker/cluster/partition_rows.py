"""Cache of partitions encoded for Metadata responses.

After a failover every client asks for its topics: a thousand clients of a topic with ten thousand partitions request the same
bytes a thousand times. When a topic is requested, only the partitions that have changed are encoded again.

Large responses are made in pieces, and the event loop runs between them: a hundred thousand partitions take a second or two.
Only one response at a time encodes partitions, because the others need the same ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple
from uuid import UUID

from stratalog_broker.cluster.replicas import Replicas
from stratalog_broker.protocol.metadata import encode_partition, layout_of
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Bookie, Broker, Ledger, Log, Partition, Topic, topic_key
from stratalog_metadata.state.changes import Change

ROWS_MAX: Final = 100_000
"""Encoded partitions kept, about 100 bytes each; the least recently requested topics are dropped."""


PIECE_ROWS: Final = 128
"""Partitions encoded before the event loop runs: 10 to 20 µs each, so about 2 ms."""
TOPIC_ROWS: Final = 4
"""A topic costs as much as this number of partitions."""


class Pieces:
    """Counts the work of one response and lets the event loop run after each ``PIECE_ROWS``."""

    def __init__(self) -> None:
        self.left = PIECE_ROWS
        self.largest = 0
        """The most that was done without a pause."""

    async def done(self, rows: int) -> None:
        """Count work that has been done, as a number of partitions."""
        self.left -= rows
        self.largest = max(self.largest, PIECE_ROWS - self.left)
        if self.left <= 0:
            await asyncio.sleep(0)
            self.left = PIECE_ROWS


class EncodedRows(NamedTuple):
    """All partitions of a topic in index order: their number, and their bytes in blocks."""

    partitions: int
    blocks: Sequence[bytes]


@dataclass(slots=True)
class _Rows:
    rows: list[bytes] = field(default_factory=list)
    encoded: int = 0
    """The number of rows, from the first one on, that have been encoded since all of them changed."""
    stale: set[int] = field(default_factory=set)
    """Those among them that have changed again."""
    blocks: list[bytes] = field(default_factory=list)
    """Every ``PIECE_ROWS`` rows joined: joining a hundred thousand at once takes 10 ms."""

    @property
    def is_current(self) -> bool:
        return self.encoded == len(self.rows) and not self.stale

    def changed(self, index: int) -> None:
        if index < self.encoded:
            self.stale.add(index)

    def all_changed(self) -> None:
        self.encoded = 0
        self.stale.clear()

    def take(self, rows_max: int) -> list[int]:
        """Return the indexes of some rows that have to be encoded, which is done at once."""
        indexes = list(islice(self.stale, rows_max))
        self.stale.difference_update(indexes)
        end = min(self.encoded + rows_max - len(indexes), len(self.rows))
        indexes += range(self.encoded, end)
        self.encoded = end
        return indexes

    def join(self, indexes: Sequence[int]) -> None:
        """Join the blocks of these rows, which have been encoded."""
        for block in {index // PIECE_ROWS: None for index in sorted(indexes)}:
            first = block * PIECE_ROWS
            self.blocks[block : block + 1] = [b"".join(self.rows[first : first + PIECE_ROWS])]


class PartitionRows:
    """Encoded partitions of requested topics, by topic and layout; the most recently requested topic is last."""

    def __init__(self, view: MetadataView) -> None:
        self._view = view
        self._topics: dict[tuple[UUID, int], _Rows] = {}
        self._layouts: dict[UUID, set[int]] = {}
        self._count = 0
        self.encoded = 0
        """Number of partitions encoded so far."""
        self._encoding = asyncio.Lock()
        self._unsubscribe = view.subscribe(self._on_changes)

    async def of(self, topic: Topic, version: int, pieces: Pieces) -> EncodedRows:
        """Return the partitions of a topic, encoded for a response of this version. There may be more than ``topic`` says."""
        found = self._find(topic, version)
        if not found.is_current:
            async with self._encoding:
                while not found.is_current:
                    await pieces.done(self._encode(topic, layout_of(version), found, pieces.left))
        return EncodedRows(len(found.rows), tuple(found.blocks))

    def _find(self, topic: Topic, version: int) -> _Rows:
        key = topic.topic_id, layout_of(version)
        found = self._topics.pop(key, None) or _Rows()
        self._topics[key] = found
        self._layouts.setdefault(topic.topic_id, set()).add(key[1])
        before = len(found.rows)
        if before < topic.partition_count:
            self._count += topic.partition_count - before
            found.rows += [b""] * (topic.partition_count - before)
            self._make_room()
        return found

    def _encode(self, topic: Topic, layout: int, found: _Rows, rows_max: int) -> int:
        """Encode some of the partitions that have changed; return their number."""
        current = self._view.find(Topic, topic_key(topic.name))
        if current is None or current.topic_id != topic.topic_id:
            current = topic
        replicas, indexes = Replicas(self._view), found.take(rows_max)
        for index in indexes:
            found.rows[index] = encode_partition(layout, index, replicas.of(current, index))
        found.join(indexes)
        self.encoded += len(indexes)
        return len(indexes)

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
            self._topics[topic_id, layout].changed(index)

    def _all_changed(self) -> None:
        for found in self._topics.values():
            found.all_changed()

    def _topic_changed(self, before: object, topic: Topic, *, is_gone: bool) -> None:
        for layout in list(self._layouts.get(topic.topic_id, ())):
            if is_gone:
                self._drop(topic.topic_id, layout)
            elif not isinstance(before, Topic) or before.replication_factor != topic.replication_factor:
                self._topics[topic.topic_id, layout].all_changed()

    def close(self) -> None:
        """Stop following the view."""
        self._unsubscribe()


def _availability(record: object) -> object:
    """Return the part of a broker's or bookie's record that rows depend on; None if there is no record."""
    if isinstance(record, Bookie):
        return record.session_id != 0, record.disks, record.failed_disks
    return isinstance(record, Broker) or None
