"""The shell of one partition's groups: the frame's application for groups, with tickets and timers.

All decisions are made in ``core/coordinator.py``. When this broker resigns the partition, all waiting joins and syncs fail with
NOT_COORDINATOR.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar
from uuid import UUID

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.coordinator_partition import CoordinatorKind
from stratalog_broker.coordination.groups.core.consumer.model import Topics
from stratalog_broker.coordination.groups.core.consumer.requests import HeartbeatAnswer, HeartbeatRequest
from stratalog_broker.coordination.groups.core.coordinator import GroupCoordinator, Work
from stratalog_broker.coordination.groups.core.group_table import CoordinatorLimits
from stratalog_broker.coordination.groups.core.messages import (
    Answer,
    JoinAnswer,
    JoinRequest,
    LeaveAnswer,
    LeaveRequest,
    LeavingMember,
    SyncAnswer,
    SyncRequest,
)
from stratalog_broker.coordination.groups.core.offset_rows import Commit
from stratalog_broker.coordination.groups.core.store import GroupStore, TopicPartitionName
from stratalog_broker.coordination.record_writer import RecordWriter, TransactionalProducer
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.coordination.wake_timer import WakeTimer
from stratalog_broker.coordination.wake_times import Instant
from stratalog_broker.partitions.internal_topics import CONSUMER_OFFSETS
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core.ports import Clock

KEY_TYPE: Final = 0
"""The key type of groups in FindCoordinator."""
EXPIRY_INTERVAL_S: Final = 600.0
AnswerType = TypeVar("AnswerType", JoinAnswer, SyncAnswer, HeartbeatAnswer, LeaveAnswer)


class CommittingMember(NamedTuple):
    """The group member that commits in a transaction, as far as the client says."""

    member_id: str
    group_instance_id: str | None
    generation: int


class GroupApplication:
    """Serves the groups of one partition of ``__consumer_offsets`` from their loaded state."""

    def __init__(
        self, limits: CoordinatorLimits, topics: Topics, clock: Clock, store: GroupStore, writer: RecordWriter
    ) -> None:
        self._clock = clock
        self._store = store
        self._writer = writer
        self._tickets: dict[int, asyncio.Future[JoinAnswer | SyncAnswer | HeartbeatAnswer | LeaveAnswer]] = {}
        self._next_ticket = 0
        self._wake = WakeTimer(self._tick)
        self._coordinator: GroupCoordinator | None = GroupCoordinator(limits, store, topics, self.now())
        self._plan_wake()
        self._expiry = asyncio.get_running_loop().call_later(EXPIRY_INTERVAL_S, self._expire)

    def resigned(self) -> None:
        self._coordinator = None
        self._wake.cancel()
        self._expiry.cancel()
        tickets, self._tickets = self._tickets, {}
        for future in tickets.values():
            if not future.done():
                future.set_exception(KafkaError(ErrorCode.not_coordinator))

    # -- requests

    @property
    def coordinator(self) -> GroupCoordinator:
        """The core, for reading. Raises ``KafkaError`` NOT_COORDINATOR after this broker has lost the partition."""
        if self._coordinator is None:
            raise KafkaError(ErrorCode.not_coordinator)
        return self._coordinator

    def now(self) -> Instant:
        return Instant(monotonic_ms=int(self._clock.monotonic() * 1000), wall_ms=self._clock.wall_ms())

    async def join(self, group_id: str, make_request: Callable[[int], JoinRequest]) -> JoinAnswer:
        """JoinGroup: return the answer, which may wait for the group's join phase. ``make_request`` gets the ticket."""
        ticket, answer = self._open_ticket(JoinAnswer)
        self._do(self.coordinator.join(group_id, make_request(ticket), self.now()))
        return await self._answer(ticket, answer)

    async def sync(self, group_id: str, make_request: Callable[[int], SyncRequest]) -> SyncAnswer:
        """SyncGroup: return the answer once the leader's assignment is in the log."""
        ticket, answer = self._open_ticket(SyncAnswer)
        self._do(self.coordinator.sync(group_id, make_request(ticket), self.now()))
        return await self._answer(ticket, answer)

    def heartbeat(self, group_id: str, member_id: str, group_instance_id: str | None, generation: int) -> ErrorCode:
        error = self.coordinator.heartbeat(group_id, member_id, group_instance_id, generation, self.now())
        self._plan_wake()
        return error

    async def consumer_heartbeat(
        self, group_id: str, make_request: Callable[[int], HeartbeatRequest], *, needs_member_id: bool
    ) -> HeartbeatAnswer:
        """ConsumerGroupHeartbeat: return the answer once what it says is in the log. ``make_request`` gets the ticket."""
        ticket, answer = self._open_ticket(HeartbeatAnswer)
        request = make_request(ticket)
        self._do(self.coordinator.consumer_heartbeat(group_id, request, self.now(), needs_member_id=needs_member_id))
        return await self._answer(ticket, answer)

    async def leave(self, group_id: str, members: Sequence[LeavingMember]) -> Sequence[ErrorCode]:
        """LeaveGroup: return a code for each member. Raises ``KafkaError`` if none has left."""
        if group_id not in self.coordinator.table.consumers:
            errors, work = self.coordinator.leave(group_id, members, self.now())
            self._do(work)
            return errors
        ticket, answer = self._open_ticket(LeaveAnswer)
        request = LeaveRequest(ticket=ticket, members=tuple(members))
        self._do(self.coordinator.leave_consumer_group(group_id, request, self.now()))
        left = await self._answer(ticket, answer)
        if left.error is not ErrorCode.none:
            raise KafkaError(left.error)
        return left.errors

    async def commit(
        self, group_id: str, member_id: str, group_instance_id: str | None, generation: int, commits: Sequence[Commit]
    ) -> list[ErrorCode]:
        """OffsetCommit: return a code for each commit, once the valid ones are in the log."""
        coordinator = self.coordinator
        errors, records = coordinator.commits.plan(group_id, member_id, group_instance_id, generation, commits, self.now())
        with coordinator.commits.pending(group_id, commits):
            return [_commit_error_of(error) for error in await self._write_for(errors, records)]

    async def commit_in_transaction(
        self,
        group_id: str,
        member: CommittingMember,
        producer: TransactionalProducer,
        commits: Sequence[Commit],
        check: Callable[[], None],
    ) -> list[ErrorCode]:
        """TxnOffsetCommit: return a code for each commit, once the valid ones are in the log as part of the transaction.

        ``check`` raises ``KafkaError`` if the transaction has ended; it is called immediately before the append.
        """
        coordinator = self.coordinator
        errors, records = coordinator.commits.plan(group_id, *member, commits, self.now(), transactional=True)
        if not records:
            return errors
        with coordinator.commits.pending(group_id, commits, transactional=True):
            written = _commit_error_of(await self._writer.written_in_transaction(records, producer, check))
        return errors if written is ErrorCode.none else _with_failure(errors, written)

    async def delete_group(self, group_id: str) -> ErrorCode:
        while part := self.coordinator.removals.plan_first_part(group_id):
            (failed,) = await self._write_for([ErrorCode.none], part)
            if failed is not ErrorCode.none:
                return failed
        error, records = self.coordinator.removals.plan_delete(group_id, self.now())
        (written,) = await self._write_for([error], records)
        return written

    async def delete_offsets(
        self, group_id: str, partitions: Sequence[TopicPartitionName]
    ) -> tuple[ErrorCode, list[ErrorCode]]:
        """OffsetDelete: return a code for the group and one for each partition."""
        error, errors, records = self.coordinator.removals.plan_delete_offsets(group_id, partitions)
        return error, await self._write_for(errors, records)

    def topics(self) -> set[tuple[str, UUID | None]]:
        """Return names and ids of all topics for which a group of this partition has committed offsets."""
        tables = self._store.offsets.values()
        return {(topic, committed.topic_id) for table in tables for (topic, _), committed in table.items()}

    def forget_topic(self, topic: str, gone: Container[UUID | None]) -> None:
        """Remove the offsets of deleted topics of this name; see ``plan_topic_deletion``."""
        if self._coordinator is not None:
            for _, records in self._coordinator.removals.plan_topic_deletion(topic, gone):
                self._writer.write(records, lambda _: None)

    async def _write_for(self, errors: list[ErrorCode], records: Sequence[CoordinatorRecord]) -> list[ErrorCode]:
        if not records:
            return errors
        written = await self._writer.written(records)
        return errors if written is ErrorCode.none else _with_failure(errors, written)

    # -- tickets, work and time

    def _open_ticket(self, _: type[AnswerType]) -> tuple[int, asyncio.Future[AnswerType]]:
        self._next_ticket += 1
        future: asyncio.Future[AnswerType] = asyncio.get_running_loop().create_future()
        self._tickets[self._next_ticket] = future  # type: ignore[assignment]  # a ticket's answer has its request's type
        return self._next_ticket, future

    async def _answer(self, ticket: int, future: asyncio.Future[AnswerType]) -> AnswerType:
        try:
            return await future
        finally:
            self._tickets.pop(ticket, None)

    def _do(self, work: Iterable[Work]) -> None:
        for item in work:
            if isinstance(item, Answer):
                future = self._tickets.get(item.ticket)
                if future is not None and not future.done():
                    future.set_result(item.value)
            else:
                self._writer.write(item.records, self._report(item.group_id, item.token))
        self._plan_wake()

    def _report(self, group_id: str, token: int) -> Callable[[ErrorCode], None]:
        def written(error: ErrorCode) -> None:
            if self._coordinator is not None:
                self._do(self._coordinator.on_written(group_id, token, error, self.now()))

        return written

    def _plan_wake(self) -> None:
        if self._coordinator is not None:
            self._wake.plan(self._coordinator.wake_at_ms, self.now().monotonic_ms)

    def _tick(self) -> None:
        if self._coordinator is not None:
            self._do(self._coordinator.tick(self.now()))

    def _expire(self) -> None:
        if self._coordinator is None:
            return
        self._expiry = asyncio.get_running_loop().call_later(EXPIRY_INTERVAL_S, self._expire)
        for _, records in self._coordinator.removals.plan_expiry(self.now()):
            self._writer.write(records, lambda _: None)
        self._plan_wake()


def _with_failure(errors: Sequence[ErrorCode], failure: ErrorCode) -> list[ErrorCode]:
    """Return the codes of commits whose write failed."""
    return [failure if error is ErrorCode.none else error for error in errors]


def _commit_error_of(code: ErrorCode) -> ErrorCode:
    """Return the code of an OffsetCommit or TxnOffsetCommit response for that of a write."""
    return ErrorCode.invalid_commit_offset_size if code is ErrorCode.message_too_large else code


def group_kind(
    limits: CoordinatorLimits, topics: Topics, clock: Clock, *, partition_count: int, copies: int
) -> CoordinatorKind[GroupStore, GroupApplication]:
    """Return groups as a kind of coordinator; the numbers are those of ``__consumer_offsets`` when it is created."""

    def start(store: GroupStore, writer: RecordWriter, leader_epoch: int) -> GroupApplication:
        return GroupApplication(limits, topics, clock, store, writer)

    return CoordinatorKind(
        key_type=KEY_TYPE,
        topic=CONSUMER_OFFSETS,
        partition_count=partition_count,
        copies=copies,
        load=GroupStore.from_snapshot,
        start=start,
    )
