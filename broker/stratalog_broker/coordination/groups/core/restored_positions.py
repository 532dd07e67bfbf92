"""Adapts the positions of groups to topics that were restored from a bucket, perhaps without their last records. Does no I/O.

A position past the restored end would skip the records that get the missing offsets next, so it becomes the end. Positions
of topics that were not restored are left out: the coordinator would remove them. Those of topics that the bucket still has stay
in the state apart from the others, because it hides the states from before the restore: the next restore finds them. Members
stay until their sessions expire, as after any change of coordinator.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

import msgspec

from stratalog_broker.coordination.groups.core.pending_offsets import PendingOffsets
from stratalog_broker.coordination.groups.core.records import CommittedOffset, OffsetKey
from stratalog_broker.coordination.groups.core.store import GroupStore, LeftOutOffsets

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


def restore_positions(
    state: bytes | None,
    topics: Mapping[UUID, RestoredEnds],
    others: Mapping[UUID, str],
    report: PositionsReport,
    unfinished: Container[int] | None = None,
) -> bytes | None:
    """Return a coordinator's state with its positions adapted, and add to ``report``. Raises ``Corrupt``.

    ``others``: ids and names of the bucket's topics that are not restored. ``unfinished``: the producers whose transactions
    their restored coordinators end; None if these go on where they were. Positions in other transactions are dropped, because
    nobody would decide them, and the group would wait for that permanently.
    """
    if state is None:
        return None
    store, changed = GroupStore.from_snapshot(state), _Change(topics, others, report)
    offsets, store.offsets, store.offset_count = store.offsets, {}, 0
    pending, store.pending = store.pending, PendingOffsets()
    left_out, store.left_out = store.left_out, LeftOutOffsets()
    names = [OffsetKey(group_id, *place) for group_id, table in offsets.items() for place in table]
    known = [(name, offsets[name.group_id][name.topic, name.partition]) for name in names]
    for name, committed in (*left_out, *known):  # A later one replaces an earlier one of the same name.
        found = changed.position(name, committed)
        if found is not None:
            store.put(*found)
        elif changed.is_of_others(name, committed):
            store.left_out.put(name, committed)
    for producer_id, name, committed in (*left_out.pending, *pending):
        if unfinished is not None and producer_id not in unfinished:
            continue
        found = changed.position(name, committed)
        if found is not None:
            store.pending.add(producer_id, *found)
        elif changed.is_of_others(name, committed):
            store.left_out.pending.add(producer_id, name, committed)
    return store.snapshot()


class _Change:
    def __init__(self, topics: Mapping[UUID, RestoredEnds], others: Mapping[UUID, str], report: PositionsReport) -> None:
        self._topics = topics
        self._others = others
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

    def is_of_others(self, name: OffsetKey, committed: CommittedOffset) -> bool:
        """Whether a position is of a topic that the bucket has and that was not restored."""
        return name.topic in self._others.values() if committed.topic_id is None else committed.topic_id in self._others
