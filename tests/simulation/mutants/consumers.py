"""Planted faults of fetch sessions, and of groups that administrators delete, run in ``consumers``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.application import GroupApplication
from stratalog_broker.coordination.groups.core import removal
from stratalog_broker.coordination.groups.core.instruction_queue import InstructionQueue
from stratalog_broker.coordination.groups.core.messages import GroupImage, Persist
from stratalog_broker.coordination.groups.core.records import encode_group_key
from stratalog_broker.coordination.groups.core.removal import Removals
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.handlers.fetch import FetchCall
from stratalog_broker.requests.fetch_sessions import FetchSession


def _swap(owner: object, name: str, new: object) -> Any:
    """Replace the attribute with ``new``; return the old value."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old


# -- fetch sessions


def errors_are_told_once_in_a_session() -> None:
    """A session leaves out a partition whose error it has told already."""
    by_topic = FetchCall._by_topic

    def once(self: FetchCall) -> Any:
        if not self._is_incremental:
            return by_topic(self)
        told = {(one.key, one.index): one.told for one in self._wanted}
        return [
            (key, rows)
            for key, found in by_topic(self)
            if (rows := [row for row in found if not _is_told(row, told[key, row.partition])])
        ]

    _swap(FetchCall, "_by_topic", once)


def _is_told(row: Any, told: tuple[int, int, int] | None) -> bool:
    return bool(row.error_code) and told == (row.error_code, row.high_watermark, row.log_start_offset)


def watermarks_are_told_with_records_only() -> None:
    """A session leaves out a partition without records, although its high watermark has moved."""
    by_topic = FetchCall._by_topic

    def with_records(self: FetchCall) -> Any:
        if self._is_incremental:
            for one, found in zip(self._wanted, self._results, strict=True):
                if one.told is not None and not one.told[0]:
                    one.told = (found.error_code, found.high_watermark, found.log_start_offset)
        return by_topic(self)

    _swap(FetchCall, "_by_topic", with_records)


def forgotten_partitions_stay_in_sessions() -> None:
    """A session goes on with partitions that its consumer has given up."""
    update = FetchSession.update
    _swap(FetchSession, "update", lambda self, wanted, forgotten: update(self, wanted, ()))


def partitions_that_come_back_are_told_before() -> None:
    """A session remembers what it told of a partition that had left it, and says nothing when it comes back."""
    update, told = FetchSession.update, dict[tuple[int, Any], Any]()

    def remembering(self: FetchSession, wanted: Iterable[Any], forgotten: Iterable[Any]) -> None:
        gone, new = list(forgotten), list(wanted)
        told.update({(id(self), key): self.partitions[key].told for key in gone if key in self.partitions})
        update(self, new, gone)
        for one in new:
            one.told = told.pop((id(self), (one.key, one.index)), one.told)

    _swap(FetchSession, "update", remembering)


# -- groups


def writes_of_deleted_groups_answer_their_successors() -> None:
    """Each state machine of a group numbers its writes from 1."""
    tokens = dict[int, Any]()

    def persist(self: InstructionQueue, image: GroupImage) -> int:
        token: int = next(tokens.setdefault(id(self), itertools.count(1)))
        self._queued.append(Persist(token=token, image=image))
        return token

    _swap(InstructionQueue, "persist", persist)


def groups_come_back_that_were_on_their_way_to_the_log() -> None:
    """DeleteGroups removes a group's metadata only if it is stored."""
    tombstones = Removals._group_tombstones

    def stored(self: Removals, group_id: str) -> list[CoordinatorRecord]:
        found, key = tombstones(self, group_id), encode_group_key(group_id)
        return [each for each in found if each.key != key or group_id in self._table.store.images]

    _swap(Removals, "_group_tombstones", stored)


def deletions_are_acknowledged_before_they_are_written() -> None:
    """DeleteGroups and OffsetDelete are answered when their records are queued."""
    write_for = GroupApplication._write_for

    async def queued(self: GroupApplication, errors: list[ErrorCode], records: Sequence[CoordinatorRecord]) -> list[ErrorCode]:
        if any(record.value is not None for record in records):
            return await write_for(self, errors, records)
        self._writer.write(records, lambda error: None)
        return errors

    _swap(GroupApplication, "_write_for", queued)


def deleted_groups_keep_their_offsets() -> None:
    """DeleteGroups removes a group's metadata and leaves its offsets."""
    _swap(removal, "_offset_tombstones", lambda group_id, names: iter(()))


IN_CONSUMERS: Final = (
    errors_are_told_once_in_a_session,
    watermarks_are_told_with_records_only,
    forgotten_partitions_stay_in_sessions,
    partitions_that_come_back_are_told_before,
    writes_of_deleted_groups_answer_their_successors,
    groups_come_back_that_were_on_their_way_to_the_log,
    deletions_are_acknowledged_before_they_are_written,
    deleted_groups_keep_their_offsets,
)
