"""Removal of groups and offsets by administrators, topic deletion and expiry (KIP-211, KIP-496). Does no I/O.

Each method returns the records to write; offsets and stored metadata are removed once those are in the log. A record that
removes an offset is written after all commits that are pending now and removes those too, as an administrator who deletes a
group or its offsets intends. Expiry and topic deletion skip partitions with pending commits until the next run.

A group may have more offsets than records fit into one batch. They are removed in parts, the group itself with the last one:
a group that is left over after a failure can be deleted again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.expiry import (
    CONSUMER_PROTOCOL,
    expired_in_consumer_group,
    expired_offsets,
    topics_wanted_by,
)
from stratalog_broker.coordination.groups.core.group_table import GroupTable
from stratalog_broker.coordination.groups.core.offset_commits import OffsetCommits
from stratalog_broker.coordination.groups.core.rebalance import GroupState
from stratalog_broker.coordination.groups.core.records import OffsetKey, encode_group_key, encode_offset_key
from stratalog_broker.coordination.groups.core.store import TopicPartitionName
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.coordination.wake_times import Instant, WakeTimes

PART_BYTES_MAX: Final = 256 * 1024
"""Of the records that are written as one batch: some thousand offsets."""
EXPIRY_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of the records of one run of expiry; the next run goes on."""


class Removals:
    """Plans the removal of groups and of single offsets."""

    def __init__(self, table: GroupTable, commits: OffsetCommits, wakes: WakeTimes) -> None:
        self._table = table
        self._commits = commits
        self._wakes = wakes

    def plan_first_part(self, group_id: str) -> list[CoordinatorRecord]:
        """DeleteGroups: return the records to write before ``plan_delete`` is called; none if it can be called now.

        Call it again once they are written, because the group may have got members or offsets meanwhile.
        """
        group = self._table.find(group_id)
        if not self._table.consumers.is_empty(group_id) or (group is not None and group.state is not GroupState.EMPTY):
            return []
        parts = _parts(_offset_tombstones(group_id, self._stored_names(group_id)))
        first = next(parts, [])
        return first if next(parts, None) is not None else []

    def _stored_names(self, group_id: str) -> Iterator[TopicPartitionName]:
        yield from self._table.store.offsets_of(group_id)
        yield from self._table.store.pending.names_of(group_id)

    def plan_delete(self, group_id: str, now: Instant) -> tuple[ErrorCode, list[CoordinatorRecord]]:
        """DeleteGroups: return the records that delete a group without members and all its offsets."""
        if not self._table.exists(group_id):
            return ErrorCode.group_id_not_found, []
        if not self._table.consumers.is_empty(group_id):
            return ErrorCode.non_empty_group, []
        group = self._table.find(group_id)
        error = ErrorCode.none if group is None else group.delete(now)
        if error is not ErrorCode.none:
            return error, []
        names = {*self._table.store.offsets_of(group_id), *self._commits.pending_of(group_id)}
        records = [*_offset_tombstones(group_id, sorted(names)), *self._group_tombstones(group_id)]
        self._forget(group_id)
        return ErrorCode.none, records

    def _forget(self, group_id: str) -> None:
        self._table.forget(group_id)
        self._wakes.forget(group_id)

    def plan_delete_offsets(
        self, group_id: str, partitions: Sequence[TopicPartitionName]
    ) -> tuple[ErrorCode, list[ErrorCode], list[CoordinatorRecord]]:
        """OffsetDelete: return a code for the group, one for each partition, and the records to write."""
        if not group_id:
            return ErrorCode.invalid_group_id, [], []
        if not self._table.exists(group_id):
            return ErrorCode.group_id_not_found, [], []
        group = self._table.find(group_id)
        subscribed: frozenset[str] = frozenset()
        consumers = self._table.consumers.find(group_id)
        if consumers is not None:
            subscribed = frozenset(topic for topic, _ in partitions if consumers.is_subscribed_to(topic))
        elif group is not None and group.state is not GroupState.EMPTY:
            if group.protocol_type != CONSUMER_PROTOCOL:
                return ErrorCode.non_empty_group, [], []
            subscribed = topics_wanted_by(group) or frozenset(topic for topic, _ in partitions)
        errors = [ErrorCode.group_subscribed_to_topic if topic in subscribed else ErrorCode.none for topic, _ in partitions]
        known = {*self._table.store.offsets_of(group_id), *self._commits.pending_of(group_id)}
        gone = {name: None for name, code in zip(partitions, errors, strict=True) if code is ErrorCode.none and name in known}
        return ErrorCode.none, errors, list(_offset_tombstones(group_id, gone))

    def plan_expiry(self, now: Instant) -> list[tuple[str, list[CoordinatorRecord]]]:
        """Return, with their group, records that remove expired offsets, and the group if nothing is left (KIP-211).

        Those of each item are one write. All of them together have about ``EXPIRY_BYTES_MAX`` at most.
        """
        room_bytes = EXPIRY_BYTES_MAX
        horizon_ms = now.wall_ms - self._table.limits.offsets_retention_ms
        planned = list[tuple[str, list[CoordinatorRecord]]]()
        for group_id in self._table.all_ids():
            stored, pending = self._table.store.offsets_of(group_id), self._commits.pending_of(group_id)
            consumers = self._table.consumers.find(group_id)
            if consumers is None:
                expired = expired_offsets(self._table.find(group_id), stored, horizon_ms)
            else:
                expired = expired_in_consumer_group(consumers, stored, horizon_ms)
            expired = [name for name in expired if name not in pending]
            goes = len(expired) == len(stored) and not pending and self._table.is_empty(group_id)
            records = chain(_offset_tombstones(group_id, expired), self._group_tombstones(group_id) if goes else ())
            for part in _parts(records):
                if room_bytes <= 0:
                    return planned
                planned.append((group_id, part))
                room_bytes -= sum(record.size_bytes for record in part)
            if goes:
                self._forget(group_id)
        return planned

    def plan_topic_deletion(self, topic: str, gone: Container[UUID | None]) -> Iterator[tuple[str, list[CoordinatorRecord]]]:
        """Yield, with their group, records that remove the offsets of deleted topics of this name, whose ids are ``gone``.

        Those of each item are one write. None in ``gone`` means offsets committed without an id. Offsets of a newer topic of
        the same name are kept.
        """
        for group_id in list(self._table.store.offsets):
            stored = self._table.store.offsets_of(group_id)
            names = [name for name, committed in stored.items() if name[0] == topic and committed.topic_id in gone]
            if names:
                pending = self._commits.pending_of(group_id)
                for part in _parts(_offset_tombstones(group_id, (name for name in names if name not in pending))):
                    yield group_id, part

    def _group_tombstones(self, group_id: str) -> list[CoordinatorRecord]:
        """Return the records that remove a group that is not forgotten yet, without its offsets."""
        records = []
        # Even if no image is stored: the one of a live group may be on its way to the log.
        if group_id in self._table.store.images or self._table.find(group_id) is not None:
            records.append(CoordinatorRecord(encode_group_key(group_id), None))
        return records + self._table.consumers.tombstones(group_id)


def _offset_tombstones(group_id: str, names: Iterable[TopicPartitionName]) -> Iterator[CoordinatorRecord]:
    keys = (encode_offset_key(OffsetKey(group_id, topic, partition)) for topic, partition in names)
    return (CoordinatorRecord(key, None) for key in keys)


def _parts(records: Iterable[CoordinatorRecord]) -> Iterator[list[CoordinatorRecord]]:
    """Yield the records in parts that are each written as one batch."""
    part, part_bytes = list[CoordinatorRecord](), 0
    for record in records:
        if part and part_bytes + record.size_bytes > PART_BYTES_MAX:
            yield part
            part, part_bytes = [], 0
        part.append(record)
        part_bytes += record.size_bytes
    if part:
        yield part
