"""OffsetCommit: checks commits against group and bounds, and tracks those that are being written. Does no I/O.

Commits that are being written to the log are pending. The store does not contain them yet, so expiry and topic deletion,
which use the store, skip their partitions.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.group_table import GroupTable
from stratalog_broker.coordination.groups.core.messages import NO_GENERATION, Instant
from stratalog_broker.coordination.groups.core.offset_rows import Commit, OffsetEncoder
from stratalog_broker.coordination.groups.core.store import TopicPartitionName
from stratalog_broker.coordination.replay import CoordinatorRecord


class OffsetCommits:
    """Plans the commits of one coordinator's groups and knows which of them are pending."""

    def __init__(self, table: GroupTable) -> None:
        self._table = table
        self._pending: dict[str, dict[int, Sequence[Commit]]] = {}

    def plan(
        self,
        group_id: str,
        member_id: str,
        group_instance_id: str | None,
        generation: int,
        commits: Sequence[Commit],
        now: Instant,
    ) -> tuple[list[ErrorCode], list[CoordinatorRecord]]:
        """Return a code for each commit, and the records of the valid ones, which take effect once they are written."""
        error = self._check(group_id, member_id, group_instance_id, generation, now)
        if error is not ErrorCode.none:
            return [error] * len(commits), []
        known = self._table.store.offsets_of(group_id)
        errors = [self._check_offset(known, commit) for commit in commits]
        encoder = OffsetEncoder(group_id, now.wall_ms)
        return errors, [encoder.record(each) for each, code in zip(commits, errors, strict=True) if code is ErrorCode.none]

    def _check(self, group_id: str, member_id: str, group_instance_id: str | None, generation: int, now: Instant) -> ErrorCode:
        if not self._table.is_name(group_id, empty=True):
            return ErrorCode.invalid_group_id
        group = self._table.find(group_id)
        if group is not None:
            return group.check_commit(member_id, group_instance_id, generation, now)
        if generation > NO_GENERATION:
            return ErrorCode.illegal_generation
        return ErrorCode.none if self._table.exists(group_id) or self._table.has_room() else ErrorCode.coordinator_not_available

    def _check_offset(self, known: Container[TopicPartitionName], commit: Commit) -> ErrorCode:
        if commit.metadata and len(commit.metadata.encode()) > self._table.limits.offset_metadata_bytes_max:
            return ErrorCode.offset_metadata_too_large
        if self._table.store.offset_count >= self._table.limits.offsets_max and (commit.topic, commit.partition) not in known:
            return ErrorCode.coordinator_not_available
        return ErrorCode.none

    @contextmanager
    def pending(self, group_id: str, commits: Sequence[Commit]) -> Iterator[None]:
        """Mark commits as pending, from planning until the outcome is known, so that expiry and topic deletion skip them."""
        self._pending.setdefault(group_id, {})[id(commits)] = commits
        try:
            yield
        finally:
            of_group = self._pending[group_id]
            del of_group[id(commits)]
            if not of_group:
                del self._pending[group_id]

    def pending_of(self, group_id: str) -> set[TopicPartitionName]:
        """Return the partitions for which the group has pending commits."""
        in_flight = self._pending.get(group_id, {})
        return {(commit.topic, commit.partition) for commits in in_flight.values() for commit in commits}
