"""Groups whose offsets are too many for one batch of records are removed in several."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.coordination.groups.known_topics import NO_TOPICS
from unit.broker.coordination.groups.test_group_coordinator import LIMITS, NOW, Log, Shell, join_request, later

from stratalog_bookies.client.ledger_writer import ENTRY_BYTES_MAX
from stratalog_broker.coordination.groups.core import removal
from stratalog_broker.coordination.groups.core.coordinator import GroupCoordinator
from stratalog_broker.coordination.groups.core.messages import LeavingMember
from stratalog_broker.coordination.groups.core.records import CommittedOffset, OffsetKey
from stratalog_broker.coordination.groups.core.removal import PART_BYTES_MAX
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_core.errors import NotLeader

GROUP = "g" * LIMITS.name_bytes_max
OFFSETS = ENTRY_BYTES_MAX // len(GROUP) + 100
TOPIC = "t"


def fill(store: GroupStore, count: int = OFFSETS) -> None:
    committed = CommittedOffset(offset=1, leader_epoch=-1, metadata="", committed_at_ms=NOW.wall_ms)
    for index in range(count):
        store.put(OffsetKey(GROUP, TOPIC, index), committed)


def restarted(store: GroupStore) -> GroupCoordinator:
    return GroupCoordinator(LIMITS, GroupStore.from_snapshot(store.snapshot()), NO_TOPICS, NOW)


async def test_a_large_group_is_deleted() -> None:
    shell = Shell()
    store = shell.application.coordinator.table.store
    fill(store)
    async with asyncio.timeout(60):
        assert await shell.application.delete_group(GROUP) is ErrorCode.none
    assert not shell.application.coordinator.table.exists(GROUP)
    assert store.offset_count == 0
    assert len(shell.batches) > ENTRY_BYTES_MAX // PART_BYTES_MAX
    assert max(map(len, shell.batches)) < 2 * PART_BYTES_MAX
    assert await shell.application.delete_group(GROUP) is ErrorCode.group_id_not_found


async def test_a_group_of_which_only_a_part_was_deleted_can_be_deleted_again() -> None:
    shell = Shell()
    store = shell.application.coordinator.table.store
    fill(store)
    deletion = asyncio.ensure_future(shell.application.delete_group(GROUP))
    while len(shell.batches) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    shell.failure = NotLeader("lost")
    assert await deletion is ErrorCode.not_coordinator
    shell.failure = None
    again = restarted(store)
    assert 0 < again.table.store.offset_count < OFFSETS
    assert again.table.group_ids() == [GROUP]
    assert await shell.application.delete_group(GROUP) is ErrorCode.none
    assert not shell.application.coordinator.table.exists(GROUP)


async def test_a_group_that_gets_a_member_while_it_is_deleted_stays() -> None:
    shell = Shell()
    fill(shell.application.coordinator.table.store)
    deletion = asyncio.ensure_future(shell.application.delete_group(GROUP))
    while not shell.batches:  # noqa: ASYNC110
        await asyncio.sleep(0)
    joining = asyncio.ensure_future(
        shell.application.join(GROUP, lambda ticket: replace(join_request(), ticket=ticket, fresh_member_id="m"))
    )
    assert await deletion is ErrorCode.non_empty_group
    assert (await joining).error is ErrorCode.none
    assert shell.application.coordinator.table.store.offsets_of(GROUP)
    shell.application.resigned()


def test_offsets_of_undecided_transactions_are_removed_in_parts() -> None:
    log = Log()
    committed = CommittedOffset(offset=1, leader_epoch=-1, metadata="", committed_at_ms=NOW.wall_ms)
    for index in range(2 * PART_BYTES_MAX // len(GROUP)):
        log.store.pending.add(7, OffsetKey(GROUP, TOPIC, index), committed)
    parts = 0
    while part := log.core.removals.plan_first_part(GROUP):
        log.write(part)
        parts += 1
    assert parts >= 1
    error, records = log.core.removals.plan_delete(GROUP, NOW)
    log.write(records)
    assert (error, len(log.store.pending)) == (ErrorCode.none, 0)


def test_a_large_group_expires() -> None:
    log = Log()
    fill(log.store)
    runs = 0
    while log.core.table.exists(GROUP):
        runs += 1
        planned = log.core.removals.plan_expiry(later(8))
        sizes = [sum(record.size_bytes for record in records) for _, records in planned]
        assert max(sizes) <= PART_BYTES_MAX
        assert sum(sizes) <= removal.EXPIRY_BYTES_MAX + PART_BYTES_MAX
        for _, records in planned:
            log.write(records)
    assert runs == -(-(OFFSETS * (len(GROUP) + 20)) // removal.EXPIRY_BYTES_MAX)


def test_expiry_that_stops_within_a_group_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "EXPIRY_BYTES_MAX", PART_BYTES_MAX)
    log = Log()
    log.stable(GROUP)
    _, work = log.core.leave(GROUP, [LeavingMember(member_id="m1")], NOW)
    log.do(work)
    fill(log.store, 2 * PART_BYTES_MAX // len(GROUP))
    log.expire(later(8))
    assert log.core.table.find(GROUP) is not None
    assert GROUP in log.store.images
    log.expire(later(8))
    log.expire(later(8))
    assert not log.core.table.exists(GROUP)


def test_the_offsets_of_a_deleted_topic_are_removed_in_parts() -> None:
    log = Log()
    fill(log.store)
    for _, records in log.core.removals.plan_topic_deletion(TOPIC, (None,)):
        assert sum(record.size_bytes for record in records) <= PART_BYTES_MAX
        log.write(records)
    assert log.store.offset_count == 0


def test_an_offset_that_is_named_twice_is_deleted_once() -> None:
    log = Log()
    fill(log.store, 1)
    _, errors, records = log.core.removals.plan_delete_offsets(GROUP, [(TOPIC, 0)] * 3)
    assert (errors, len(records)) == ([ErrorCode.none] * 3, 1)
