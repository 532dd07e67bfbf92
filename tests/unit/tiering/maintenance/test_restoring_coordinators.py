"""Internal topics are restored from the states of their coordinators: which state is taken, and what metadata then has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace
from unit.tiering.maintenance.test_restoring import new_cluster, offload

from stratalog.restored_groups import (
    RESTORED,
    UNREADABLE,
    BucketTopics,
    GroupsReport,
    bucket_topics,
    planned_groups,
    restore_groups,
)
from stratalog_broker.coordination.groups.core.records import CommittedOffset, OffsetKey
from stratalog_broker.coordination.groups.core.restored_positions import RestoredEnds
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.coordination.transactions.core.coordinator import TransactionCoordinator, TransactionLimits
from stratalog_broker.coordination.transactions.core.store import TransactionStore
from stratalog_broker.coordination.transactions.core.transaction import Transaction, TransactionState
from stratalog_broker.coordination.wake_times import Instant
from stratalog_broker.partitions.internal_topics import TRANSACTION_STATE
from stratalog_core.batches.checkpoint import Checkpoint
from stratalog_metadata.records import Log, Partition, Topic, log_key, partition_key, topic_key
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.core.restoring import EPOCH_GAP
from stratalog_tiering.format import object_keys
from stratalog_tiering.format.coordinator_state import CoordinatorState, decode_state, encode_state
from stratalog_tiering.format.descriptor import TopicDescriptor, encode_descriptor
from stratalog_tiering.format.object_keys import parse_state_key, state_key
from stratalog_tiering.maintenance.restoring_coordinators import InternalTopic, read_internal_topics, restore_internal_topic

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
TOPIC = "__consumer_offsets"
TOPIC_ID = UUID(int=7)
FLIGHTS, ORDERS = UUID(int=1), UUID(int=2)
Batches = Callable[..., list[bytes]]


def state(partition: int, offset: int, epoch: int = 1, owner: int = 0) -> CoordinatorState:
    return CoordinatorState(
        cluster_id="previous", owner_number=owner, topic=TOPIC, topic_id=TOPIC_ID, partition=partition, partition_count=3,
        replication_factor=3, configs={"cleanup.policy": "compact"}, leader_epoch=epoch, taken_at_ms=1000 + offset,
        checkpoint=Checkpoint(offset=offset, application_state=b"state of %d" % offset),
    )  # fmt: skip


async def store(cluster: Cluster, *states: CoordinatorState) -> None:
    for each in states:
        await cluster.store.put(state_key(each.place), [encode_state(each)])


async def restore(cluster: Cluster, prefix: bytes = b"adapted ") -> bool:
    (found,) = await read_internal_topics(cluster.store, 1)
    return await restore_internal_topic(
        cluster.metadata, cluster.store, found, 1, 1, "new", 5000, lambda content: prefix + (content or b"")
    )


async def restored(cluster: Cluster, partition: int) -> CoordinatorState:
    log = cluster.metadata.view.find(Log, log_key(TOPIC_ID, partition))
    place = parse_state_key(log.restored_from)
    assert place is not None
    return decode_state(await cluster.store.get(log.restored_from), place)


async def test_the_newest_state_of_each_partition_returns(cluster: Cluster) -> None:
    await store(cluster, state(0, 10), state(0, 20), state(2, 5, epoch=150_000), state(2, 9))
    assert await restore(cluster)
    await cluster.until(lambda: cluster.metadata.view.get(topic_key(TOPIC)) is not None)
    view = cluster.metadata.view
    topic = view.find(Topic, topic_key(TOPIC))
    assert (topic.topic_id, topic.partition_count, topic.replication_factor, topic.internal) == (TOPIC_ID, 3, 1, True)
    logs = [view.find(Log, log_key(TOPIC_ID, index)) for index in range(3)]
    assert [log.log_start_offset for log in logs] == [20, 0, 5]
    assert logs[1].restored_from == ""
    assert (await restored(cluster, 0)).checkpoint.application_state == b"adapted state of 20"
    assert (await restored(cluster, 2)).checkpoint.application_state == b"adapted state of 5", "of the greater epoch"
    epochs = [view.find(Partition, partition_key(TOPIC_ID, index)).leader_epoch for index in range(3)]
    assert epochs == [2 * EPOCH_GAP, 2 * EPOCH_GAP, 150_000 + EPOCH_GAP]
    owned = view.find(Partition, partition_key(TOPIC_ID, 1))
    await cluster.metadata.propose(Command(updates=(Put(record=replace(owned, owner=1)),)))
    assert not await restore(cluster), "the cluster has used the topic"


async def test_a_damaged_state_is_reported_and_the_one_before_it_taken(cluster: Cluster) -> None:
    await store(cluster, state(0, 10))
    await cluster.store.put(state_key(state(0, 20).place), [b"damaged"])
    await cluster.store.put(state_key(state(1, 20).place), [b"damaged"])
    (found,) = await read_internal_topics(cluster.store, 1)
    assert [each.checkpoint.offset for each in found.states] == [10]
    assert [problem.split(":")[0] for problem in sorted(found.damaged)] == sorted(
        [state_key(state(0, 20).place), state_key(state(1, 20).place)]
    )


async def test_a_topic_of_which_no_state_can_be_read_is_reported(cluster: Cluster) -> None:
    """Its groups begin anew, which is not to be taken for a bucket without groups."""
    await cluster.store.put(state_key(state(0, 20).place), [b"damaged"])
    report = await planned_groups(cluster.store, {}, 1)
    (row,) = report.topics
    assert (row["topic"], row["partitions"], row["state"]) == (TOPIC, 0, "cannot be read")
    assert [problem.split(":")[0] for problem in row["damaged"]] == [state_key(state(0, 20).place)]
    restored = await restore_groups(cluster.metadata, cluster.store, BucketTopics(restored={}), 1, 1, "new", 5000)
    assert restored.topics == report.topics
    assert cluster.metadata.view.get(topic_key(TOPIC)) is None


def test_the_report_names_what_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    report = GroupsReport()
    report.add(InternalTopic(topic=TOPIC, states=(), damaged=("coordinators/x: wrong digest",)), UNREADABLE)
    report.show()
    shown = capsys.readouterr().err
    assert "skipped a corrupt state: coordinators/x: wrong digest" in shown
    assert f"{TOPIC}: cannot be read, and is not restored" in shown
    assert "no committed offsets of consumer groups are in the bucket" not in shown


async def test_a_restore_that_failed_does_not_feed_the_next(cluster: Cluster) -> None:
    """The first attempt stored less, and failed before metadata knew."""
    await store(cluster, state(0, 10))
    left = replace(state(0, 10, epoch=2 * EPOCH_GAP, owner=1), checkpoint=Checkpoint(offset=10, application_state=b"less"))
    await store(cluster, left)
    assert await restore(cluster)
    await cluster.until(lambda: cluster.metadata.view.get(topic_key(TOPIC)) is not None)
    found = await restored(cluster, 0)
    assert (found.checkpoint.application_state, found.leader_epoch) == (b"adapted state of 10", 2 * EPOCH_GAP + 1)
    partition = cluster.metadata.view.find(Partition, partition_key(TOPIC_ID, 0))
    assert partition.leader_epoch == found.leader_epoch


async def test_states_of_a_topic_of_the_same_name_that_an_earlier_owner_had_are_left_out(cluster: Cluster) -> None:
    """A cluster with groups of its own took the bucket over."""
    earlier = [replace(state(index, 99), topic_id=UUID(int=8)) for index in (0, 1)]
    await store(cluster, *earlier, state(0, 3, owner=1))
    (found,) = await read_internal_topics(cluster.store, 2)
    assert [(each.topic_id, each.partition, each.checkpoint.offset) for each in found.states] == [(TOPIC_ID, 0, 3)]


def of_groups(offsets: dict[str, int]) -> CoordinatorState:
    groups = GroupStore()
    for name, offset in offsets.items():
        topic_id = FLIGHTS if name == "flights" else ORDERS
        groups.put(
            OffsetKey("readers", name, 0),
            CommittedOffset(offset=offset, leader_epoch=-1, metadata="", committed_at_ms=1, topic_id=topic_id),
        )
    made = state(0, 20)
    return replace(made, checkpoint=replace(made.checkpoint, application_state=groups.snapshot()))


def positions_in(found: CoordinatorState) -> dict[str, int]:
    offsets = GroupStore.from_snapshot(found.checkpoint.application_state).offsets_of("readers")
    return {topic: committed.offset for (topic, _), committed in offsets.items()}


ONE = BucketTopics(restored={FLIGHTS: RestoredEnds("flights", "flights", [50])}, others={ORDERS: "orders"})
BOTH = BucketTopics(restored={**ONE.restored, ORDERS: RestoredEnds("orders", "orders", [50])})


async def test_a_restore_of_one_topic_hides_no_positions_from_the_next_owner(cluster: Cluster, tmp_path: Path) -> None:
    await store(cluster, of_groups({"flights": 30, "orders": 40}))
    await restore_groups(cluster.metadata, cluster.store, ONE, 1, 1, "new", 5000)
    await cluster.until(lambda: cluster.metadata.view.get(topic_key(TOPIC)) is not None)
    assert positions_in(await restored(cluster, 0)) == {"flights": 30}
    async with new_cluster(cluster, tmp_path / "next") as after:
        await restore_groups(after.metadata, cluster.store, BOTH, 1, 2, "next", 6000)
        await after.until(lambda: after.metadata.view.get(topic_key(TOPIC)) is not None)
        assert positions_in(await restored(after, 0)) == {"flights": 30, "orders": 40}


async def test_a_restore_of_one_topic_can_be_followed_by_one_of_the_others(cluster: Cluster) -> None:
    """The internal topic is restored anew as long as no broker has owned it."""
    await store(cluster, of_groups({"flights": 30, "orders": 40}))
    await restore_groups(cluster.metadata, cluster.store, ONE, 1, 1, "new", 5000)
    report = await restore_groups(cluster.metadata, cluster.store, BOTH, 1, 1, "new", 5000)
    assert [row["state"] for row in report.topics] == [RESTORED]
    await cluster.until(lambda: cluster.metadata.view.get(topic_key(TOPIC)) is not None)
    found = await restored(cluster, 0)
    assert positions_in(found) == {"flights": 30, "orders": 40}
    assert cluster.metadata.view.find(Partition, partition_key(TOPIC_ID, 0)).leader_epoch == found.leader_epoch
    (newest,) = await read_internal_topics(cluster.store, 2)
    assert positions_in(newest.states[0]) == {"flights": 30, "orders": 40}, "the next owner takes this one"


async def test_a_restored_transactional_id_gets_another_producer_id(cluster: Cluster) -> None:
    """The stored state is not the last one: partitions may know later epochs of the producer, and their sequences."""
    transactions = TransactionStore()
    transactions.transactions["copier"] = Transaction(
        transactional_id="copier", producer_id=7, producer_epoch=3, timeout_ms=60_000, updated_at_ms=0
    )
    made = replace(state(0, 20), topic=TRANSACTION_STATE)
    await store(cluster, replace(made, checkpoint=replace(made.checkpoint, application_state=transactions.snapshot())))
    report = await restore_groups(cluster.metadata, cluster.store, ONE, 1, 1, "new", 5000)
    assert [row["state"] for row in report.topics] == [RESTORED]
    await cluster.until(lambda: cluster.metadata.view.get(topic_key(TRANSACTION_STATE)) is not None)
    found = TransactionStore.from_snapshot((await restored(cluster, 0)).checkpoint.application_state)
    now = Instant(monotonic_ms=0, wall_ms=0)
    coordinator = TransactionCoordinator(TransactionLimits(), found, now, lambda: 2, lambda: None)
    begun = coordinator.init_producer_id("copier", 60_000, None, 8, now)
    assert isinstance(begun, Transaction)
    assert begun.producer_id == 8


async def test_positions_in_transactions_that_nobody_ends_are_dropped(cluster: Cluster) -> None:
    """The states of both coordinators are of different moments. A group waits while a position is undecided."""
    transactions, groups = TransactionStore(), GroupStore()
    transactions.transactions["copier"] = Transaction(
        transactional_id="copier", producer_id=7, producer_epoch=3, timeout_ms=60_000, updated_at_ms=0,
        state=TransactionState.ONGOING, partitions=((TOPIC, 0),),
    )  # fmt: skip
    committed = CommittedOffset(offset=5, leader_epoch=-1, metadata="", committed_at_ms=1, topic_id=FLIGHTS)
    for producer_id in (7, 8):
        groups.pending.add(producer_id, OffsetKey(f"of {producer_id}", "flights", 0), committed)
    made = state(0, 20)
    await store(
        cluster,
        replace(made, checkpoint=replace(made.checkpoint, application_state=groups.snapshot())),
        replace(
            made, topic=TRANSACTION_STATE, topic_id=UUID(int=9),
            checkpoint=replace(made.checkpoint, application_state=transactions.snapshot()),
        ),
    )  # fmt: skip
    await restore_groups(cluster.metadata, cluster.store, ONE, 1, 1, "new", 5000)
    await cluster.until(lambda: cluster.metadata.view.get(topic_key(TOPIC)) is not None)
    found = GroupStore.from_snapshot((await restored(cluster, 0)).checkpoint.application_state)
    assert [producer_id for producer_id, _, _ in found.pending] == [7]


async def test_the_topics_of_the_bucket_are_those_of_the_cluster_and_the_others(
    cluster: Cluster, make_batches: Batches
) -> None:
    await cluster.start_worker()
    await offload(cluster, make_batches(0, [3]), 0, 3)
    other = TopicDescriptor(topic_id=ORDERS, name="orders", partition_count=1, replication_factor=1)
    await cluster.store.put(object_keys.topic_key(ORDERS, 1), [encode_descriptor(other)])
    found = await bucket_topics(cluster.metadata.view, cluster.store)
    assert found.restored == {cluster.topic.topic_id: RestoredEnds("flights", "flights", [3, 0])}
    assert found.others == {ORDERS: "orders"}
