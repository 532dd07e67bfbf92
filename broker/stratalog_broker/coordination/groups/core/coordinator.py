"""The groups of one partition of ``__consumer_offsets``: live state machines over the durable store. Does no I/O.

The shell passes requests and the time, writes the records of each :class:`Write`, and reports the outcome with
:meth:`GroupCoordinator.on_written`. Offsets and group metadata become visible only through the store, so only once the ack
quorum has them. Everything is bounded: see ``CoordinatorLimits``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.consumer.group_requests import GroupRequest
from stratalog_broker.coordination.groups.core.consumer.model import Topics
from stratalog_broker.coordination.groups.core.consumer.requests import HeartbeatRefused, HeartbeatRequest, check_heartbeat
from stratalog_broker.coordination.groups.core.consumer.settings import MigrationPolicy
from stratalog_broker.coordination.groups.core.consumer.turns import Step
from stratalog_broker.coordination.groups.core.group import Group
from stratalog_broker.coordination.groups.core.group_table import CoordinatorLimits, GroupTable
from stratalog_broker.coordination.groups.core.joining import check_join
from stratalog_broker.coordination.groups.core.messages import (
    Answer,
    GroupImage,
    Instruction,
    JoinAnswer,
    JoinRequest,
    LeaveAnswer,
    LeaveRequest,
    LeavingMember,
    SyncAnswer,
    SyncRequest,
)
from stratalog_broker.coordination.groups.core.migration import check_upgrade, downgraded, upgraded
from stratalog_broker.coordination.groups.core.offset_commits import OffsetCommits
from stratalog_broker.coordination.groups.core.records import encode_group_key, encode_group_value
from stratalog_broker.coordination.groups.core.removal import Removals
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.coordination.wake_times import Instant, WakeTimes
from stratalog_core.errors import Invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Instructs the shell to append the records as one batch, then call ``on_written`` with group and token."""

    group_id: str
    token: int
    records: tuple[CoordinatorRecord, ...]


Work = Answer | Write
CONSUMER_TOKEN: Final = 0
"""The token of all writes of consumer groups, of which a group has one at a time; those of classic groups are positive."""


class GroupCoordinator:
    """Handles membership requests and time for the groups of one partition. Changes are returned as records to write.

    Its parts handle the rest: ``table`` finds groups, ``commits`` plans commits, ``removals`` deletes groups and offsets.
    """

    def __init__(self, limits: CoordinatorLimits, store: GroupStore, topics: Topics, now: Instant) -> None:
        self.table = GroupTable(limits, store, topics, now)
        self.commits = OffsetCommits(self.table)
        self._wakes = WakeTimes()
        self.removals = Removals(self.table, self.commits, self._wakes)
        for group_id, group in self.table.live.items():
            self._wakes.plan(group_id, group.wake_at_ms)
        for group_id, at_ms in self.table.consumers.wake_times():
            self._wakes.plan(group_id, at_ms)

    # -- membership of consumer groups

    def consumer_heartbeat(
        self, group_id: str, request: HeartbeatRequest, now: Instant, *, needs_member_id: bool = True
    ) -> list[Work]:
        """ConsumerGroupHeartbeat: join, leave, or report owned partitions; the answer has the member's assignment."""
        try:
            self._check_consumer_heartbeat(group_id, request, needs_member_id=needs_member_id)
            work = self._upgrade(group_id, request, now)
        except HeartbeatRefused as refused:
            return [Answer(ticket=request.ticket, value=refused.answer)]
        return [*work, *self._consumer_work(group_id, self.table.consumers.handle(group_id, request, now), now)]

    def _upgrade(self, group_id: str, request: HeartbeatRequest, now: Instant) -> list[Work]:
        """Replace a classic group, if this is one, by a consumer group. Raises ``HeartbeatRefused`` if it may not be one."""
        group = self.table.find(group_id)
        if group is None:
            return []
        if group.membership.members:
            consumers = self.table.consumers
            try:
                check_upgrade(group_id, group, consumers.limits)
                state = upgraded(group_id, group, consumers.topic_id_of)
            except Invalid as refused:
                raise HeartbeatRefused(ErrorCode.group_id_not_found, refused.message) from refused
            started = consumers.upgraded_group(group_id, state, now)
            started.check_joining(request)
            consumers.start(started)
        else:
            # Its record may be on its way to the log, and then an earlier consumer group is still stored.
            self.table.consumers.find_or_create(group_id, now, replaces_classic=True)
        del self.table.live[group_id]
        return [self._to_work(group_id, each) for each in group.dissolve()]

    def _check_consumer_heartbeat(self, group_id: str, request: HeartbeatRequest, *, needs_member_id: bool) -> None:
        """Raise ``HeartbeatRefused`` unless the group is a consumer group, or the request may make it one."""
        if not group_id.strip() or not self.table.is_name(group_id):
            text = f"GroupId can't be empty or longer than {self.table.limits.name_bytes_max} bytes."
            raise HeartbeatRefused(ErrorCode.invalid_request, text)
        consumers = self.table.consumers
        check_heartbeat(request, consumers.limits, consumers.topics, needs_member_id=needs_member_id)
        if group_id in consumers:
            return
        if not request.is_joining:
            raise HeartbeatRefused(ErrorCode.group_id_not_found, f"Group {group_id} is not a consumer group.")
        if not self.table.exists(group_id) and not self.table.has_room():
            raise HeartbeatRefused(ErrorCode.coordinator_not_available, "There are too many groups.")

    def _consumer_work(self, group_id: str, step: Step, now: Instant) -> list[Work]:
        turns = self.table.consumers.turns_of(group_id)
        assert turns is not None, "the step is this group's"
        self._wakes.plan(group_id, turns.wake_at_ms)
        work: list[Work] = list(step.answers)
        if step.records:
            after = [_record(downgraded(turns.group, now))] if step.is_downgrade else []
            work.append(Write(group_id=group_id, token=CONSUMER_TOKEN, records=(*step.records, *after)))
        if turns.has_ended or turns.is_unused:
            group = self.table.end_turns(group_id, now)
            if group is not None:
                self._wakes.plan(group_id, group.wake_at_ms)
        for request in step.handed_on:
            work += self._again(group_id, request, now)
        return work

    def _again(self, group_id: str, request: GroupRequest, now: Instant) -> list[Work]:
        """Handle a request that waited while the group's protocol changed."""
        match request:
            case HeartbeatRequest():
                return self.consumer_heartbeat(group_id, request, now, needs_member_id=False)
            case JoinRequest():
                return self.join(group_id, request, now)
            case SyncRequest():
                return self.sync(group_id, request, now)
            case LeaveRequest():
                return self.leave_consumer_group(group_id, request, now)

    # -- membership of classic groups

    def join(self, group_id: str, request: JoinRequest, now: Instant) -> list[Work]:
        error = self._check_join(group_id, request)
        if error is not ErrorCode.none:
            return [Answer(ticket=request.ticket, value=JoinAnswer(error=error, member_id=request.member_id))]
        if not self.table.consumers.is_empty(group_id):
            return self._consumer_work(group_id, self.table.consumers.handle(group_id, request, now), now)
        self.table.consumers.forget(group_id)
        group = self.table.find_or_create(group_id, now)
        return self._done(group_id, group, group.join(request, now))

    def _check_join(self, group_id: str, request: JoinRequest) -> ErrorCode:
        if not self.table.is_name(group_id):
            return ErrorCode.invalid_group_id
        own_names = (request.protocol_type, request.client_id, request.member_id, request.group_instance_id or "")
        names = (*own_names, *(name for name, _ in request.protocols))
        if not all(len(name.encode()) <= self.table.limits.name_bytes_max for name in names):
            return ErrorCode.invalid_request
        if not self.table.consumers.is_empty(group_id):
            is_disabled = self.table.consumers.limits.migration is MigrationPolicy.DISABLED
            return ErrorCode.inconsistent_group_protocol if is_disabled else check_join(request, self.table.limits.group)
        if self.table.exists(group_id):
            return ErrorCode.none
        if request.member_id:
            return ErrorCode.unknown_member_id
        return ErrorCode.none if self.table.has_room() else ErrorCode.coordinator_not_available

    def sync(self, group_id: str, request: SyncRequest, now: Instant) -> list[Work]:
        if group_id in self.table.consumers:
            return self._consumer_work(group_id, self.table.consumers.handle(group_id, request, now), now)
        group = self.table.find(group_id)
        if group is None:
            return [Answer(ticket=request.ticket, value=SyncAnswer(error=ErrorCode.unknown_member_id))]
        return self._done(group_id, group, group.sync(request, now))

    def heartbeat(
        self, group_id: str, member_id: str, group_instance_id: str | None, generation: int, now: Instant
    ) -> ErrorCode:
        if group_id in self.table.consumers:
            return self._classic_heartbeat(group_id, member_id, group_instance_id, generation, now)
        group = self.table.find(group_id)
        return ErrorCode.unknown_member_id if group is None else group.heartbeat(member_id, group_instance_id, generation, now)

    def _classic_heartbeat(
        self, group_id: str, member_id: str, group_instance_id: str | None, generation: int, now: Instant
    ) -> ErrorCode:
        turns = self.table.consumers.find_or_create(group_id, now)
        error = turns.classic_heartbeat(member_id, group_instance_id, generation, now)
        self._wakes.plan(group_id, turns.wake_at_ms)
        return error

    def leave_consumer_group(self, group_id: str, request: LeaveRequest, now: Instant) -> list[Work]:
        """LeaveGroup of a group of the consumer protocol, or of one that was when the request came."""
        if group_id in self.table.consumers:
            return self._consumer_work(group_id, self.table.consumers.handle(group_id, request, now), now)
        errors, work = self.leave(group_id, request.members, now)
        return [*work, Answer(ticket=request.ticket, value=LeaveAnswer(errors=tuple(errors)))]

    def leave(self, group_id: str, members: Sequence[LeavingMember], now: Instant) -> tuple[list[ErrorCode], list[Work]]:
        """Remove members of a classic group; return one code for each, in order, and the work to do."""
        group = self.table.find(group_id)
        if group is None:
            return [ErrorCode.unknown_member_id] * len(members), []
        errors, work = [], list[Work]()
        for member in members:
            error, instructions = group.leave(member, now)
            errors.append(error)
            work += self._done(group_id, group, instructions)
        return errors, work

    def on_written(self, group_id: str, token: int, error: ErrorCode, now: Instant) -> list[Work]:
        """Report the outcome of a :class:`Write`: ``none`` if the records are in the log, else failed or unknown."""
        if token == CONSUMER_TOKEN:
            turns = self.table.consumers.turns_of(group_id)
            return [] if turns is None else self._consumer_work(group_id, turns.on_written(error, now), now)
        group = self.table.find(group_id)
        return [] if group is None else self._done(group_id, group, group.on_persisted(token, error, now))

    # -- time

    @property
    def wake_at_ms(self) -> int | None:
        """The earliest monotonic time at which :meth:`tick` may have work, in milliseconds; None without deadlines."""
        return self._wakes.next_ms

    def tick(self, now: Instant) -> list[Work]:
        """Process all groups with a deadline in the past."""
        work: list[Work] = []
        for group_id in self._wakes.due(now.monotonic_ms):
            group, turns = self.table.find(group_id), self.table.consumers.turns_of(group_id)
            if group is not None:
                work += self._done(group_id, group, group.tick(now))
                self.table.forget_if_unused(group_id)
            if turns is not None:
                work += self._consumer_work(group_id, turns.tick(now), now)
        return work

    # -- work

    def _done(self, group_id: str, group: Group, instructions: Iterable[Instruction]) -> list[Work]:
        self._wakes.plan(group_id, group.wake_at_ms)
        return [self._to_work(group_id, instruction) for instruction in instructions]

    def _to_work(self, group_id: str, instruction: Instruction) -> Work:
        if isinstance(instruction, Answer):
            return instruction
        record = _record(instruction.image)
        # A group that was empty under the consumer protocol is replaced with the first generation.
        return Write(group_id=group_id, token=instruction.token, records=(*self.table.consumers.tombstones(group_id), record))


def _record(image: GroupImage) -> CoordinatorRecord:
    return CoordinatorRecord(encode_group_key(image.group_id), encode_group_value(image))
