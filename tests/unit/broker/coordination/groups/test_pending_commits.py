"""Pending commits: expiry and topic deletion never remove an acknowledged commit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kio.schema.errors import ErrorCode
from unit.broker.coordination.groups.known_topics import NO_TOPICS
from unit.broker.coordination.groups.test_group_coordinator import LIMITS, load_nothing, partition_of_groups

from stratalog_broker.coordination.groups.application import GroupApplication
from stratalog_broker.coordination.groups.core.coordinator import GroupCoordinator
from stratalog_broker.coordination.groups.core.offset_rows import Commit
from stratalog_broker.coordination.groups.core.records import is_of
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.coordination.wake_times import Instant

RETENTION_MS = 1_000
AT_ONCE = replace(LIMITS, offsets_retention_ms=0)
GROUPS, TOPICS = ("g", "h"), ("t", "u")

partitions = st.tuples(st.sampled_from(GROUPS), st.sampled_from(TOPICS), st.integers(0, 1))


class Coordinating(RuleBasedStateMachine):
    """A coordinator with a log that confirms late. Deleted topics are recreated immediately, with another id."""

    def __init__(self) -> None:
        super().__init__()
        self.store = GroupStore()
        self.now = Instant(0, 100 * RETENTION_MS)
        self.core = GroupCoordinator(replace(LIMITS, offsets_retention_ms=RETENTION_MS), self.store, NO_TOPICS, self.now)
        self.log: deque[tuple[Sequence[CoordinatorRecord], Callable[[], None]]] = deque()
        self.ids = {topic: UUID(int=number) for number, topic in enumerate(TOPICS)}
        self.acknowledged: dict[tuple[str, str, int], tuple[int, UUID, int]] = {}
        self.offset = 0

    def write(self, records: Sequence[CoordinatorRecord], applied: Callable[[], None] = lambda: None) -> None:
        if records:
            self.log.append((records, applied))

    @rule(name=partitions)
    def commit(self, name: tuple[str, str, int]) -> None:
        group_id, topic, partition = name
        self.offset += 1
        commits = [Commit(topic, partition, self.offset, topic_id=self.ids[topic])]
        (error,), records = self.core.commits.plan(group_id, "", None, -1, commits, self.now)
        assert error is ErrorCode.none
        in_flight = ExitStack()
        in_flight.enter_context(self.core.commits.pending(group_id, commits))
        committed = self.offset, self.ids[topic], self.now.wall_ms

        def applied() -> None:
            in_flight.close()
            self.acknowledged[name] = committed

        self.write(records, applied)

    @rule(count=st.integers(1, 3))
    def confirm(self, count: int) -> None:
        for _ in range(min(count, len(self.log))):
            records, applied = self.log.popleft()
            for record in records:
                self.store.begin_batch()(record.key, record.value, record.headers)
            applied()

    @rule()
    def expire(self) -> None:
        for _, records in self.core.removals.plan_expiry(self.now):
            self.write(records)

    @rule(topic=st.sampled_from(TOPICS))
    def create_anew(self, topic: str) -> None:
        gone, self.ids[topic] = self.ids[topic], UUID(int=self.ids[topic].int + 10)
        for _, records in self.core.removals.plan_topic_deletion(topic, (gone, None)):
            self.write(records)

    @rule(name=partitions)
    def delete_group(self, name: tuple[str, str, int]) -> None:
        """Deleting a group also removes its pending commits, which are before the deletion in the log."""
        group_id = name[0]
        error, records = self.core.removals.plan_delete(group_id, self.now)
        earlier = {key: kept for key, kept in self.acknowledged.items() if key[0] == group_id}

        def applied() -> None:
            assert self.store.offsets_of(group_id) == {}
            assert not earlier or error is ErrorCode.none
            self.acknowledged = {key: kept for key, kept in self.acknowledged.items() if key[0] != group_id}

        self.write(records, applied)

    @rule(elapsed_ms=st.sampled_from([1, RETENTION_MS // 2, RETENTION_MS]))
    def wait(self, elapsed_ms: int) -> None:
        self.now = Instant(self.now.monotonic_ms + elapsed_ms, self.now.wall_ms + elapsed_ms)

    @invariant()
    def acknowledged_commits_are_there(self) -> None:
        for (group_id, topic, partition), (offset, topic_id, committed_at_ms) in self.acknowledged.items():
            if topic_id != self.ids[topic] or committed_at_ms <= self.now.wall_ms - RETENTION_MS:
                continue
            found = self.store.offsets_of(group_id).get((topic, partition))
            assert found is not None, f"the commit of {offset} for {topic}-{partition} by {group_id} is gone"
            assert found.offset >= offset
            assert is_of(found, topic_id)

    def teardown(self) -> None:
        self.confirm(len(self.log))
        self.acknowledged_commits_are_there()
        assert self.core.commits.pending_of("g") == self.core.commits.pending_of("h") == set()


TestPendingCommits = Coordinating.TestCase
TestPendingCommits.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


class SlowLog:
    """An application whose batches are confirmed when ``go_on`` is set."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.partition = partition_of_groups(self.append, AT_ONCE)
        load_nothing(self.partition)

    @property
    def application(self) -> GroupApplication:
        assert self.partition.application is not None
        return self.partition.application

    async def append(self, batch: bytearray) -> int:
        await self.go_on.wait()
        self.partition.apply(batch)
        return 0

    async def commit(self, offset: int, topic_id: UUID) -> list[ErrorCode]:
        return await self.application.commit("g", "", None, -1, [Commit("t", 0, offset, topic_id=topic_id)])

    def offset(self) -> int:
        return self.application.coordinator.table.store.offsets_of("g")[("t", 0)].offset


@pytest.mark.parametrize("removed_by", ["time", "a deleted topic"])
async def test_a_commit_in_flight_outlives_the_removal_of_what_was_committed_before(removed_by: str) -> None:
    log, old, new = SlowLog(), UUID(int=1), UUID(int=2)
    log.go_on.set()
    assert await log.commit(1, old) == [ErrorCode.none]
    log.go_on.clear()
    committing = asyncio.ensure_future(log.commit(2, new))
    await asyncio.sleep(0)
    if removed_by == "time":
        log.application._expire()
    else:
        log.application.forget_topic("t", (old, None))
    log.go_on.set()
    assert await committing == [ErrorCode.none]
    assert await log.application.commit("other", "", None, -1, [Commit("t", 0, 1)]) == [ErrorCode.none]
    assert log.offset() == 2
    log.application.forget_topic("t", (new,))
    assert await log.application.commit("other", "", None, -1, [Commit("t", 0, 2)]) == [ErrorCode.none]
    assert log.application.coordinator.table.store.offsets_of("g") == {}
    log.partition.resigned()
