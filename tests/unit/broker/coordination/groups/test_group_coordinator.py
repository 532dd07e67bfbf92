"""The groups of one partition: commits, deletion, expiry, bounds, and the shell with a log that can fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from support.replayed import replayed
from unit.broker.coordination.groups.known_topics import NO_TOPICS

from stratalog_broker.coordination.coordinator_partition import CoordinatorPartition
from stratalog_broker.coordination.groups.application import GroupApplication, group_kind
from stratalog_broker.coordination.groups.core.coordinator import GroupCoordinator, Work, Write
from stratalog_broker.coordination.groups.core.group_table import CoordinatorLimits
from stratalog_broker.coordination.groups.core.messages import (
    Answer,
    GroupLimits,
    JoinAnswer,
    JoinRequest,
    LeavingMember,
    SyncAnswer,
    SyncRequest,
)
from stratalog_broker.coordination.groups.core.offset_rows import Commit
from stratalog_broker.coordination.groups.core.rebalance import GroupState
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.coordination.record_writer import WAITING_BYTES_MAX, Append, RecordWriter
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.coordination.wake_times import Instant
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core.errors import NotLeader, StratalogError, Unavailable
from stratalog_core.system import SystemClock

DAY_MS = 86_400_000
NOW = Instant(0, 100 * DAY_MS)
LIMITS = CoordinatorLimits(group=GroupLimits(initial_rebalance_delay_ms=0), offsets_retention_ms=7 * DAY_MS)
SUBSCRIPTION = b"\x00\x01\x00\x00\x00\x01\x00\x05wants\x00\x00\x00\x00"


def join_request(ticket: int = 1, member_id: str = "", metadata: bytes = SUBSCRIPTION) -> JoinRequest:
    return JoinRequest(
        ticket=ticket, member_id=member_id, fresh_member_id=f"m{ticket}", group_instance_id=None, client_id="c",
        client_host="/h", protocol_type="consumer", protocols=(("range", metadata),), session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000, requires_known_member=False,
    )  # fmt: skip


class Log:
    """A coordinator whose writes are applied immediately and in order."""

    def __init__(self, limits: CoordinatorLimits = LIMITS) -> None:
        self.store = GroupStore()
        self.limits = limits
        self.core = GroupCoordinator(limits, self.store, NO_TOPICS, NOW)
        self.answers: list[JoinAnswer | SyncAnswer] = []

    def write(self, records: Iterable[CoordinatorRecord]) -> None:
        for record in records:
            self.store.begin_batch()(record.key, record.value, record.headers)

    def do(self, work: Iterable[Work], now: Instant = NOW) -> None:
        for item in work:
            if isinstance(item, Write):
                self.write(item.records)
                self.do(self.core.on_written(item.group_id, item.token, ErrorCode.none, now), now)
            else:
                assert isinstance(item.value, JoinAnswer | SyncAnswer)
                self.answers.append(item.value)

    def commit(self, group_id: str, *commits: Commit, now: Instant = NOW) -> list[ErrorCode]:
        errors, records = self.core.commits.plan(group_id, "", None, -1, commits, now)
        self.write(records)
        return errors

    def stable(self, group_id: str, now: Instant = NOW) -> None:
        self.do(self.core.join(group_id, join_request(), now), now)
        sync = SyncRequest(ticket=2, member_id="m1", group_instance_id=None, generation=1, assignments=(("m1", b"all"),))
        self.do(self.core.sync(group_id, sync, now), now)
        assert self.core.table.state_of(group_id) is GroupState.STABLE

    def expire(self, now: Instant) -> None:
        for _, records in self.core.removals.plan_expiry(now):
            self.write(records)

    def reload(self) -> None:
        self.core = GroupCoordinator(self.limits, GroupStore.from_snapshot(self.store.snapshot()), NO_TOPICS, NOW)
        self.store = self.core.table.store


def later(days: float) -> Instant:
    return Instant(int(days * DAY_MS), NOW.wall_ms + int(days * DAY_MS))


def test_a_commit_without_members_makes_a_group() -> None:
    log = Log()
    assert log.core.table.state_of("g") is GroupState.DEAD
    assert log.commit("g", Commit(topic="t", partition=0, offset=5, metadata="why")) == [ErrorCode.none]
    assert log.core.table.group_ids() == ["g"]
    assert log.core.table.state_of("g") is GroupState.EMPTY
    assert log.store.offsets_of("g")[("t", 0)].offset == 5
    log.reload()
    assert log.store.offsets_of("g")[("t", 0)].metadata == "why"


def test_commits_that_are_refused() -> None:
    log = Log(replace(LIMITS, groups_max=1, offsets_max=2))
    errors = log.commit(
        "g", Commit(topic="t", partition=0, offset=1, metadata="x" * 4097), Commit(topic="t", partition=1, offset=1)
    )
    assert errors == [ErrorCode.offset_metadata_too_large, ErrorCode.none]
    assert log.commit("other", Commit(topic="t", partition=0, offset=1)) == [ErrorCode.coordinator_not_available]
    log.commit("g", Commit(topic="t", partition=2, offset=1))
    assert log.commit("g", Commit(topic="t", partition=3, offset=1)) == [ErrorCode.coordinator_not_available]
    assert log.core.commits.plan("new", "m", None, 3, [Commit(topic="t", partition=0, offset=1)], NOW)[0] == [
        ErrorCode.illegal_generation
    ]
    assert log.commit("g" * 5_000, Commit(topic="t", partition=0, offset=1)) == [ErrorCode.invalid_group_id]


def test_pending_offsets_of_transactions_are_bounded() -> None:
    """Each producer may have one for each offset that is known already."""
    log = Log(replace(LIMITS, offsets_max=2))
    commit = Commit(topic="t", partition=0, offset=1)
    assert log.commit("g", commit) == [ErrorCode.none]
    codes = []
    for producer_id in range(4):
        errors, records = log.core.commits.plan("g", "", None, -1, [commit], NOW, transactional=True)
        codes += errors
        for record in records:
            log.store.begin_batch(producer_id)(record.key, record.value, record.headers)
    assert codes == [ErrorCode.none] * 2 + [ErrorCode.coordinator_not_available] * 2
    assert log.commit("g", commit) == [ErrorCode.none], "that one replaces them"
    assert len(log.store.pending) == 0


def test_a_deleted_group_has_no_deadline() -> None:
    log = Log()
    log.do(log.core.join("g", replace(join_request(), member_id="", requires_known_member=True), NOW))
    assert log.core.wake_at_ms is not None
    log.core.removals.plan_delete("g", NOW)
    assert list(log.core._wakes.due(10**12)) == []


def test_joins_that_are_refused() -> None:
    log = Log(replace(LIMITS, groups_max=1))
    for group_id, request, error in (
        ("", join_request(), ErrorCode.invalid_group_id),
        ("g", join_request(member_id="somebody"), ErrorCode.unknown_member_id),
        ("g", replace(join_request(), client_id="c" * 5_000), ErrorCode.invalid_request),
    ):
        log.do(log.core.join(group_id, request, NOW))
        assert log.answers.pop().error is error
    log.stable("g")
    log.do(log.core.join("other", join_request(), NOW))
    assert log.answers.pop().error is ErrorCode.coordinator_not_available


def test_unknown_groups() -> None:
    log = Log()
    assert log.core.heartbeat("g", "m", None, 1, NOW) is ErrorCode.unknown_member_id
    assert log.core.leave("g", [LeavingMember(member_id="m")], NOW) == ([ErrorCode.unknown_member_id], [])
    log.do(log.core.sync("g", SyncRequest(ticket=1, member_id="m", group_instance_id=None, generation=1), NOW))
    assert log.answers.pop().error is ErrorCode.unknown_member_id
    assert log.core.removals.plan_delete("g", NOW) == (ErrorCode.group_id_not_found, [])
    assert log.core.removals.plan_delete_offsets("g", [("t", 0)])[0] is ErrorCode.group_id_not_found


def test_a_deleted_group_leaves_nothing() -> None:
    log = Log()
    log.stable("g")
    log.commit("simple", Commit(topic="t", partition=0, offset=1))
    assert log.core.removals.plan_delete("g", NOW)[0] is ErrorCode.non_empty_group
    _, work = log.core.leave("g", [LeavingMember(member_id="m1")], NOW)
    log.do(work)
    log.commit("g", Commit(topic="t", partition=0, offset=1))
    for group_id in ("g", "simple"):
        error, records = log.core.removals.plan_delete(group_id, NOW)
        assert error is ErrorCode.none
        log.write(records)
    assert log.core.table.group_ids() == []
    assert (log.store.images, log.store.offsets) == ({}, {})


def test_a_join_after_an_unwritten_deletion_goes_on_from_what_is_stored() -> None:
    log = Log()
    log.stable("g")
    _, work = log.core.leave("g", [LeavingMember(member_id="m1")], NOW)
    log.do(work)
    log.core.removals.plan_delete("g", NOW)
    log.do(log.core.join("g", join_request(ticket=3), NOW))
    answer = log.answers.pop()
    assert isinstance(answer, JoinAnswer)
    assert answer.generation == 3


def test_a_join_after_an_unwritten_deletion_does_not_wait_for_members_that_have_left() -> None:
    log = Log()
    log.stable("g")
    _, left = log.core.leave("g", [LeavingMember(member_id="m1")], NOW)
    assert left, "its record is on its way to the log, where the member still is"
    assert log.core.removals.plan_delete("g", NOW)[0] is ErrorCode.none
    log.do(log.core.join("g", join_request(ticket=3), NOW))
    answer = log.answers.pop()
    assert isinstance(answer, JoinAnswer)
    assert [member.member_id for member in answer.members] == ["m3"]


def test_a_deletion_removes_a_group_that_is_on_its_way_to_the_log() -> None:
    log = Log()
    log.core.join("g", join_request(), NOW)
    _, (left,) = log.core.leave("g", [LeavingMember(member_id="m1")], NOW)
    assert isinstance(left, Write)
    error, tombstones = log.core.removals.plan_delete("g", NOW)
    assert error is ErrorCode.none
    log.write(left.records)
    log.write(tombstones)
    assert log.core.table.group_ids() == []
    log.reload()
    assert log.core.table.group_ids() == []


def test_a_write_of_a_deleted_group_says_nothing_of_the_next_one() -> None:
    core = Log().core
    core.join("g", join_request(1), NOW)
    _, (left,) = core.leave("g", [LeavingMember(member_id="m1")], NOW)
    assert isinstance(left, Write)
    assert core.removals.plan_delete("g", NOW)[0] is ErrorCode.none
    core.join("g", join_request(2), NOW)
    sync = SyncRequest(ticket=3, member_id="m2", group_instance_id=None, generation=1, assignments=(("m2", b"all"),))
    (assigned,) = core.sync("g", sync, NOW)
    assert isinstance(assigned, Write)
    assert core.on_written("g", left.token, ErrorCode.none, NOW) == [], "the assignment is not in the log yet"
    (answer,) = core.on_written("g", assigned.token, ErrorCode.none, NOW)
    assert isinstance(answer, Answer)
    assert answer.ticket == 3


def test_offsets_are_deleted_unless_somebody_wants_the_topic() -> None:
    log = Log()
    for topic in ("wants", "other"):
        log.commit("g", Commit(topic=topic, partition=0, offset=1))
    log.stable("g")
    error, errors, records = log.core.removals.plan_delete_offsets("g", [("wants", 0), ("other", 0), ("unknown", 0)])
    assert (error, errors) == (ErrorCode.none, [ErrorCode.group_subscribed_to_topic, ErrorCode.none, ErrorCode.none])
    log.write(records)
    assert list(log.store.offsets_of("g")) == [("wants", 0)]


def test_offsets_of_a_deleted_topic_go() -> None:
    log = Log()
    for topic in ("gone", "kept"):
        log.commit("g", Commit(topic=topic, partition=0, offset=1))
    for _, records in log.core.removals.plan_topic_deletion("gone", (None,)):
        log.write(records)
    assert list(log.store.offsets_of("g")) == [("kept", 0)]


def test_offsets_of_an_earlier_topic_of_the_name_go() -> None:
    log = Log()
    old, new = UUID(int=1), UUID(int=2)
    for partition, topic_id in enumerate((old, new, None)):
        log.commit("g", Commit(topic="t", partition=partition, offset=1, topic_id=topic_id))
    log.reload()
    for _, records in log.core.removals.plan_topic_deletion("t", (old,)):
        log.write(records)
    assert list(log.store.offsets_of("g")) == [("t", 1), ("t", 2)]


def test_offsets_expire_when_nobody_needs_them() -> None:
    log = Log()
    log.commit("simple", Commit(topic="t", partition=0, offset=1))
    log.commit("simple", Commit(topic="t", partition=1, offset=1), now=later(1))
    for topic in ("wants", "other"):
        log.commit("live", Commit(topic=topic, partition=0, offset=1))
    log.stable("live")
    log.expire(later(6.9))
    assert len(log.store.offsets_of("simple")) == 2
    log.expire(later(7))
    assert list(log.store.offsets_of("simple")) == [("t", 1)]
    assert list(log.store.offsets_of("live")) == [("wants", 0)]
    log.expire(later(8))
    assert log.core.table.group_ids() == ["live"]


def test_an_empty_group_counts_from_when_it_became_empty() -> None:
    log = Log()
    log.commit("g", Commit(topic="wants", partition=0, offset=1))
    log.stable("g")
    _, work = log.core.leave("g", [LeavingMember(member_id="m1")], later(3))
    log.do(work, later(3))
    log.reload()
    log.expire(later(9.9))
    assert log.store.offsets_of("g")
    log.expire(later(10))
    assert log.core.table.group_ids() == []
    assert log.store.images == {}


def test_time_reaches_every_group_and_unused_ones_are_forgotten() -> None:
    log = Log()
    log.stable("g")
    log.do(log.core.join("h", replace(join_request(), requires_known_member=True), NOW))
    assert set(log.core.table.live) == {"g", "h"}
    assert log.core.wake_at_ms is not None
    log.do(log.core.tick(Instant(9_999, 0)))
    assert log.core.table.state_of("g") is GroupState.STABLE
    log.do(log.core.tick(Instant(10_000, 0)))
    assert log.core.table.state_of("g") is GroupState.EMPTY
    assert set(log.core.table.live) == {"g"}


def partition_of_groups(append: Append, limits: CoordinatorLimits) -> CoordinatorPartition[GroupStore, GroupApplication]:
    kind = group_kind(limits, NO_TOPICS, SystemClock(), partition_count=1, copies=1)
    return CoordinatorPartition(kind, append, SystemClock(), "groups")


def load_nothing(partition: CoordinatorPartition[GroupStore, GroupApplication]) -> None:
    """Load the empty state, for which the event loop need not run."""
    with pytest.raises(StopIteration):
        partition.load(None, replayed(), 0).send(None)


class Shell:
    """A coordinator partition on a log whose appends fail with ``failure`` if it is set."""

    def __init__(self) -> None:
        self.partition = partition_of_groups(self.append, LIMITS)
        self.failure: StratalogError | None = None
        self.batches: list[bytes] = []
        load_nothing(self.partition)

    @property
    def application(self) -> GroupApplication:
        assert self.partition.application is not None
        return self.partition.application

    async def append(self, batch: bytearray) -> int:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        self.batches.append(bytes(batch))
        self.partition.apply(batch)
        return len(self.batches) - 1


async def test_requests_of_one_turn_are_written_together() -> None:
    shell = Shell()
    commits = [
        shell.application.commit(f"g{number}", "", None, -1, [Commit(topic="t", partition=0, offset=number)])
        for number in range(5)
    ]
    assert await asyncio.gather(*commits) == [[ErrorCode.none]] * 5
    assert len(shell.batches) == 1
    successor = Shell()
    await successor.partition.load(shell.partition.snapshot(), replayed(), 0)
    assert successor.application.coordinator.table.store.offsets_of("g4")[("t", 0)].offset == 4
    await successor.partition.load(None, replayed(shell.batches), 0)
    assert successor.application.coordinator.table.group_ids() == [f"g{number}" for number in range(5)]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [(NotLeader(), ErrorCode.not_coordinator), (Unavailable(), ErrorCode.coordinator_not_available)],
)
async def test_what_the_log_refuses_is_not_acknowledged(failure: StratalogError, expected: ErrorCode) -> None:
    shell = Shell()
    shell.failure = failure
    commit = Commit(topic="t", partition=0, offset=1)
    assert await shell.application.commit("g", "", None, -1, [commit]) == [expected]
    assert shell.application.coordinator.table.store.offsets_of("g") == {}
    answer = await shell.application.join("g", lambda ticket: join_request(ticket))
    sync = SyncRequest(
        ticket=0, member_id=answer.member_id, group_instance_id=None, generation=answer.generation, assignments=()
    )
    synced = await shell.application.sync("g", lambda ticket: replace(sync, ticket=ticket))
    assert synced.error is expected


async def test_whoever_waits_is_told_when_the_partition_goes() -> None:
    shell = Shell()
    first = await shell.application.join("g", lambda ticket: join_request(ticket))
    waiting = asyncio.ensure_future(shell.application.join("g", lambda ticket: join_request(ticket)))
    await asyncio.sleep(0)
    application = shell.application
    shell.partition.resigned()
    with pytest.raises(KafkaError) as refused:
        await waiting
    assert refused.value.code is ErrorCode.not_coordinator
    with pytest.raises(KafkaError):
        application.heartbeat("g", first.member_id, None, 1)
    assert shell.partition.application is None


async def test_members_expire_by_the_clock() -> None:
    limits = replace(LIMITS, group=replace(LIMITS.group, session_timeout_ms_min=1))
    partition = partition_of_groups(Shell().append, limits)
    await partition.load(None, replayed(), 0)
    application = partition.application
    assert application is not None
    silent = replace(join_request(), session_timeout_ms=20)
    await application.join("g", lambda ticket: replace(silent, ticket=ticket, fresh_member_id="silent"))
    async with asyncio.timeout(30):
        answer = await application.join("g", lambda ticket: join_request(ticket))
    assert [member.member_id for member in answer.members] == [answer.member_id], "it waited until the silent one was gone"
    application.resigned()


async def test_a_writer_takes_only_so_much() -> None:
    writer = RecordWriter(Shell().append, SystemClock())
    assert await writer.written([]) is ErrorCode.none
    key = b"\x00\x02\x00\x01g"
    assert await writer.written([CoordinatorRecord(key, bytes(WAITING_BYTES_MAX))]) is ErrorCode.message_too_large
    large = [CoordinatorRecord(key, bytes(WAITING_BYTES_MAX // 2))]
    codes = await asyncio.gather(writer.written(large), writer.written(large))
    assert codes[1] is ErrorCode.coordinator_not_available, "there may be room for it later"


def test_answers_are_never_lost() -> None:
    log = Log()
    work = log.core.join("g", join_request(), NOW)
    assert [item.ticket for item in work if isinstance(item, Answer)] == [1]
