"""Adapts the positions of groups to topics that were restored from a bucket, perhaps without their last records. Does no I/O.

A position past the restored end would skip the records that get the missing offsets next, so it becomes the end. Positions
of topics that were not restored are left out: the coordinator would remove them. Members stay until their sessions expire, as
after any change of coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

import msgspec

from stratalog_broker.coordination.groups.core.pending_offsets import PendingOffsets
from stratalog_broker.coordination.groups.core.records import CommittedOffset, OffsetKey
from stratalog_broker.coordination.groups.core.store import GroupStore

_NO_EPOCH = -1


class RestoredEnds(NamedTuple):
    """A restored topic: its name in the cluster, the one it had in the bucket, and the end offset of each partition."""

    name: str
    original_name: str
    ends: Sequence[int]


class MovedPosition(NamedTuple):
    """A position that was past the restored end. ``topic`` is the restored topic's name."""

    group_id: str
    topic: str
    partition: int
    committed: int
    restored: int


@dataclass(slots=True)
class PositionsReport:
    """The outcome for the positions of all groups."""

    groups: set[str] = field(default_factory=set)
    restored: int = 0
    """Number of positions that are back, the moved ones included."""
    moved: list[MovedPosition] = field(default_factory=list)
    left_out: int = 0
    """Number of positions of topics and partitions that were not restored."""


def restore_positions(state: bytes | None, topics: Mapping[UUID, RestoredEnds], report: PositionsReport) -> bytes | None:
    """Return a coordinator's state with its positions adapted, and add to ``report``. Raises ``Corrupt``."""
    if state is None:
        return None
    store, changed = GroupStore.from_snapshot(state), _Change(topics, report)
    offsets, store.offsets, store.offset_count = store.offsets, {}, 0
    for group_id, table in offsets.items():
        for (topic, partition), committed in table.items():
            found = changed.position(OffsetKey(group_id, topic, partition), committed)
            if found is not None:
                store.put(*found)
    pending, store.pending = store.pending, PendingOffsets()
    for producer_id, name, committed in pending:
        found = changed.position(name, committed)
        if found is not None:
            store.pending.add(producer_id, *found)
    return store.snapshot()


class _Change:
    def __init__(self, topics: Mapping[UUID, RestoredEnds], report: PositionsReport) -> None:
        self._topics = topics
        self._by_name = {topic.original_name: topic for topic in topics.values()}
        self._report = report

    def position(self, name: OffsetKey, committed: CommittedOffset) -> tuple[OffsetKey, CommittedOffset] | None:
        """Return a position's name and value in the cluster; None if its partition was not restored."""
        topic = self._by_name.get(name.topic) if committed.topic_id is None else self._topics.get(committed.topic_id)
        if topic is None or name.partition >= len(topic.ends):
            self._report.left_out += 1
            return None
        self._report.groups.add(name.group_id)
        self._report.restored += 1
        end = topic.ends[name.partition]
        if committed.offset > end:
            moved = MovedPosition(name.group_id, topic.name, name.partition, committed.offset, end)
            self._report.moved.append(moved)
            committed = msgspec.structs.replace(committed, offset=end, leader_epoch=_NO_EPOCH)
        return name._replace(topic=topic.name), committed
