"""The groups of one partition of ``__consumer_offsets``: live state machines over the durable store. Does no I/O.

The shell passes requests and the time, writes the records of each :class:`Write`, and reports the outcome with
:meth:`GroupCoordinator.on_written`. Offsets and group metadata become visible only through the store, so only once the ack
quorum has them. Everything is bounded: see ``CoordinatorLimits``.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.group_table import CoordinatorLimits
from stratalog_broker.coordination.groups.core.messages import (
    NO_GENERATION,
    Answer,
    Instant,
    Instruction,
    JoinAnswer,
    JoinRequest,
    LeavingMember,
    SyncAnswer,
    SyncRequest,
)
from stratalog_broker.coordination.groups.core.offset_rows import Commit, OffsetEncoder
from stratalog_broker.coordination.groups.core.records import OffsetsRecord, encode_group_key, encode_group_value
from stratalog_broker.coordination.groups.core.removal import RemovingTable
from stratalog_broker.coordination.groups.core.store import GroupStore, TopicPartitionName


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Instructs the shell to append the records as one batch, then call ``on_written`` with group and token."""

    group_id: str
    token: int
    records: tuple[OffsetsRecord, ...]


Work = Answer | Write


class GroupCoordinator(RemovingTable):
    """Handles the requests for the groups of one partition. Changes are returned as records to write."""

    def __init__(self, limits: CoordinatorLimits, store: GroupStore, now: Instant) -> None:
        super().__init__(limits, store, now)
        self._wakes: list[tuple[int, str]] = []
        self._planned: dict[str, int] = {}
        for group_id in self.groups:
            self._plan(group_id)

    # -- membership

    def join(self, group_id: str, request: JoinRequest, now: Instant) -> list[Work]:
        error = self._check_join(group_id, request)
        if error is not ErrorCode.none:
            return [Answer(ticket=request.ticket, value=JoinAnswer(error=error, member_id=request.member_id))]
        return self._done(group_id, self._group(group_id, now).join(request, now))

    def _check_join(self, group_id: str, request: JoinRequest) -> ErrorCode:
        if not self._is_name(group_id):
            return ErrorCode.invalid_group_id
        names = (request.protocol_type, request.client_id, request.group_instance_id or "", *(n for n, _ in request.protocols))
        if not all(len(name.encode()) <= self.limits.name_bytes_max for name in names):
            return ErrorCode.invalid_request
        if self._exists(group_id):
            return ErrorCode.none
        if request.member_id:
            return ErrorCode.unknown_member_id
        return ErrorCode.none if self._has_room() else ErrorCode.coordinator_not_available

    def sync(self, group_id: str, request: SyncRequest, now: Instant) -> list[Work]:
        group = self.groups.get(group_id)
        if group is None:
            return [Answer(ticket=request.ticket, value=SyncAnswer(error=ErrorCode.unknown_member_id))]
        return self._done(group_id, group.sync(request, now))

    def heartbeat(
        self, group_id: str, member_id: str, group_instance_id: str | None, generation: int, now: Instant
    ) -> ErrorCode:
        group = self.groups.get(group_id)
        return ErrorCode.unknown_member_id if group is None else group.heartbeat(member_id, group_instance_id, generation, now)

    def leave(self, group_id: str, members: Sequence[LeavingMember], now: Instant) -> tuple[list[ErrorCode], list[Work]]:
        """Remove members; return one code for each, in order, and the work to do."""
        group = self.groups.get(group_id)
        if group is None:
            return [ErrorCode.unknown_member_id] * len(members), []
        errors, work = [], list[Work]()
        for member in members:
            error, instructions = group.leave(member, now)
            errors.append(error)
            work += self._done(group_id, instructions)
        return errors, work

    def on_written(self, group_id: str, token: int, error: ErrorCode, now: Instant) -> list[Work]:
        """Report the outcome of a :class:`Write`: ``none`` if the records are in the log, else failed or unknown."""
        group = self.groups.get(group_id)
        return [] if group is None else self._done(group_id, group.on_persisted(token, error, now))

    # -- time

    @property
    def wake_at_ms(self) -> int | None:
        """The earliest monotonic time at which :meth:`tick` may have work, in milliseconds; None without deadlines."""
        return self._wakes[0][0] if self._wakes else None

    def tick(self, now: Instant) -> list[Work]:
        """Process all groups with a deadline in the past."""
        work: list[Work] = []
        while self._wakes and self._wakes[0][0] <= now.monotonic_ms:
            at_ms, group_id = heapq.heappop(self._wakes)
            if self._planned.get(group_id) != at_ms:
                continue  # rescheduled to an earlier time, which was processed
            del self._planned[group_id]
            group = self.groups.get(group_id)
            if group is not None:
                work += self._done(group_id, group.tick(now))
                self._forget_if_unused(group_id)
        return work

    def _plan(self, group_id: str) -> None:
        at_ms = self.groups[group_id].wake_at_ms
        if at_ms < self._planned.get(group_id, 1 << 62):
            self._planned[group_id] = at_ms
            heapq.heappush(self._wakes, (at_ms, group_id))

    # -- offsets

    def plan_commit(
        self,
        group_id: str,
        member_id: str,
        group_instance_id: str | None,
        generation: int,
        commits: Sequence[Commit],
        now: Instant,
    ) -> tuple[list[ErrorCode], list[OffsetsRecord]]:
        """Return a code for each commit, and the records of the valid ones, which take effect once they are written."""
        error = self._check_commit(group_id, member_id, group_instance_id, generation, now)
        if error is not ErrorCode.none:
            return [error] * len(commits), []
        known = self.store.offsets_of(group_id)
        errors = [self._check_offset(known, commit) for commit in commits]
        encoder = OffsetEncoder(group_id, now.wall_ms)
        return errors, [encoder.record(each) for each, code in zip(commits, errors, strict=True) if code is ErrorCode.none]

    def _check_commit(
        self, group_id: str, member_id: str, group_instance_id: str | None, generation: int, now: Instant
    ) -> ErrorCode:
        if not self._is_name(group_id, empty=True):
            return ErrorCode.invalid_group_id
        group = self.groups.get(group_id)
        if group is not None:
            return group.check_commit(member_id, group_instance_id, generation, now)
        if generation > NO_GENERATION:
            return ErrorCode.illegal_generation
        return ErrorCode.none if self._exists(group_id) or self._has_room() else ErrorCode.coordinator_not_available

    def _check_offset(self, known: Container[TopicPartitionName], commit: Commit) -> ErrorCode:
        if commit.metadata and len(commit.metadata.encode()) > self.limits.offset_metadata_bytes_max:
            return ErrorCode.offset_metadata_too_large
        if self.store.offset_count >= self.limits.offsets_max and (commit.topic, commit.partition) not in known:
            return ErrorCode.coordinator_not_available
        return ErrorCode.none

    # -- work

    def _done(self, group_id: str, instructions: Iterable[Instruction]) -> list[Work]:
        self._plan(group_id)
        return [self._to_work(group_id, instruction) for instruction in instructions]

    def _to_work(self, group_id: str, instruction: Instruction) -> Work:
        if isinstance(instruction, Answer):
            return instruction
        record = OffsetsRecord(encode_group_key(group_id), encode_group_value(instruction.image))
        return Write(group_id=group_id, token=instruction.token, records=(record,))
