"""OffsetCommit: checks commits against group and bounds, and tracks those that are being written. Does no I/O.

Commits that are being written to the log are pending. The store does not contain them yet, so expiry and topic deletion,
which use the store, skip their partitions.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.group_table import GroupTable
from stratalog_broker.coordination.groups.core.messages import NO_GENERATION
from stratalog_broker.coordination.groups.core.offset_rows import Commit, OffsetEncoder
from stratalog_broker.coordination.groups.core.store import TopicPartitionName
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.coordination.wake_times import Instant


class OffsetCommits:
    """Plans the commits of one coordinator's groups and knows which of them are pending."""

    def __init__(self, table: GroupTable) -> None:
        self._table = table
        self._pending: dict[str, dict[int, Sequence[Commit]]] = {}
        self._transactional: set[int] = set()
        """Keys of those commits in ``_pending`` that belong to transactions."""

    def plan(
        self,
        group_id: str,
        member_id: str,
        group_instance_id: str | None,
        generation: int,
        commits: Sequence[Commit],
        now: Instant,
        *,
        transactional: bool = False,
    ) -> tuple[list[ErrorCode], list[CoordinatorRecord]]:
        """Return a code for each commit, and the records of the valid ones, which take effect once they are written.

        ``transactional``: they take effect when the transaction commits.
        """
        error = self._check(group_id, member_id, group_instance_id, generation, commits, now, transactional=transactional)
        if error is not ErrorCode.none:
            return [error] * len(commits), []
        known = self._table.store.offsets_of(group_id)
        errors = [self._check_offset(known, commit, transactional=transactional) for commit in commits]
        encoder = OffsetEncoder(group_id, now.wall_ms)
        return errors, [encoder.record(each) for each, code in zip(commits, errors, strict=True) if code is ErrorCode.none]

    def _check(
        self,
        group_id: str,
        member_id: str,
        group_instance_id: str | None,
        generation: int,
        commits: Sequence[Commit],
        now: Instant,
        *,
        transactional: bool,
    ) -> ErrorCode:
        if not self._table.is_name(group_id, empty=True):
            return ErrorCode.invalid_group_id
        if group_id in self._table.consumers:
            if transactional and generation == NO_GENERATION and not member_id and group_instance_id is None:
                return ErrorCode.none  # the producer fences itself by its transactional id
            error = self._table.consumers.check_commit(group_id, member_id, generation, commits)
            is_stale = error is ErrorCode.stale_member_epoch
            return ErrorCode.illegal_generation if transactional and is_stale else error  # as producers expect it
        group = self._table.find(group_id)
        if group is not None:
            return group.check_commit(member_id, group_instance_id, generation, now, transactional=transactional)
        if generation > NO_GENERATION:
            return ErrorCode.illegal_generation
        return ErrorCode.none if self._table.exists(group_id) or self._table.has_room() else ErrorCode.coordinator_not_available

    def _check_offset(self, known: Container[TopicPartitionName], commit: Commit, *, transactional: bool) -> ErrorCode:
        if commit.metadata and len(commit.metadata.encode()) > self._table.limits.offset_metadata_bytes_max:
            return ErrorCode.offset_metadata_too_large
        store, offsets_max = self._table.store, self._table.limits.offsets_max
        is_known = (commit.topic, commit.partition) in known
        if not is_known and store.offset_count + len(store.pending) >= offsets_max:
            return ErrorCode.coordinator_not_available
        if transactional and len(store.pending) >= offsets_max:
            return ErrorCode.coordinator_not_available  # each producer may have one for each known offset
        return ErrorCode.none

    @contextmanager
    def pending(self, group_id: str, commits: Sequence[Commit], *, transactional: bool = False) -> Iterator[None]:
        """Mark commits as pending, from planning until the outcome is known, so that expiry and topic deletion skip them."""
        self._pending.setdefault(group_id, {})[id(commits)] = commits
        if transactional:
            self._transactional.add(id(commits))
        try:
            yield
        finally:
            self._transactional.discard(id(commits))
            of_group = self._pending[group_id]
            del of_group[id(commits)]
            if not of_group:
                del self._pending[group_id]

    def pending_of(self, group_id: str) -> set[TopicPartitionName]:
        """Return the partitions for which the group has pending commits, those of undecided transactions included."""
        in_flight = self._pending.get(group_id, {})
        names = {(commit.topic, commit.partition) for commits in in_flight.values() for commit in commits}
        return names | self._table.store.pending.names_of(group_id)

    def unstable_of(self, group_id: str) -> set[TopicPartitionName]:
        """Return the partitions whose offset an undecided transaction may change (KIP-447)."""
        in_flight = self._pending.get(group_id, {})
        names = {
            (commit.topic, commit.partition)
            for key, commits in in_flight.items()
            if key in self._transactional
            for commit in commits
        }
        return names | self._table.store.pending.names_of(group_id)
