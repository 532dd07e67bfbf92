"""Transactions with a partition that is gone when they end: deleted for good, or until the topic is restored."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kio.schema.errors import ErrorCode as E
from unit.broker.coordination.transactions.test_transaction_requests import END, MINUTE, TOPIC, Producer
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster, until_served
from unit.broker.raw_client import fetch
from unit.broker.transactional import COMMITTED, append, read_committed, transactional
from unit.broker.wire_client import connect, part
from unit.metadata.watching import until

from stratalog_broker.admin.deleted_topics import delete_for_good, deleted_topic, undelete
from stratalog_broker.coordination.transactions import deferral
from stratalog_broker.coordination.transactions.core.coordinator import ProducerEpoch
from stratalog_metadata.records import DeferredMarker, DeletedTopic, Partition, Topic, partition_key, topic_key
from stratalog_metadata.state.commands import Command, Put

PATIENCE_S = 10.0
"""Many times what markers take."""


async def create(cluster: MiniCluster, partitions: int) -> None:
    async with connect(cluster.bootstrap) as client:
        topic = part(
            19, 5, "CreatableTopic", name=TOPIC, num_partitions=partitions, replication_factor=1, assignments=(), configs=()
        )
        answer = await client.send(19, 5, topics=(topic,), timeout=MINUTE, validate_only=False)
    assert answer.topics[0].error_code is E.none
    await cluster.refresh()


async def delete(cluster: MiniCluster) -> None:
    async with connect(cluster.bootstrap) as client:
        answer = await client.send(20, 5, topic_names=(TOPIC,), timeout=MINUTE)
    assert answer.responses[0].error_code is E.none
    await cluster.refresh()


async def end(producer: Producer, *, committed: bool) -> None:
    """Decide the producer's transaction, and return when it is complete."""
    assert (await producer.send(END, 3, committed=committed)).error_code is E.none
    await until_complete(producer, "CompleteCommit" if committed else "CompleteAbort")


async def until_complete(producer: Producer, state: str = "CompleteCommit") -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await producer.describe()).transaction_state != state:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_transaction_ends_though_its_topic_came_back_with_fewer_partitions(mini_cluster: MiniCluster) -> None:
    await create(mini_cluster, 3)
    producer = Producer(mini_cluster)
    assert await producer.init() is E.none
    assert await producer.add(0, 2) == [E.none, E.none]
    await delete(mini_cluster)
    await create(mini_cluster, 1)
    await end(producer, committed=True)
    assert await producer.init() is E.none


async def write(cluster: MiniCluster, producer: Producer, *values: bytes, sequence: int = 0) -> int:
    """Write to the topic's first partition in the producer's transaction, to which that is added."""
    assert await producer.add(0) == [E.none]
    return await append(cluster, TOPIC, transactional(producer.producer_id, sequence, *values, epoch=producer.epoch))


async def written_in_transaction(cluster: MiniCluster, value: bytes) -> Producer:
    """Create the topic with one partition, and write to it; return the producer, whose transaction is open."""
    await create(cluster, 1)
    producer = Producer(cluster)
    assert await producer.init() is E.none
    await write(cluster, producer, value)
    return producer


async def restore(cluster: MiniCluster, wanted: str, new_name: str | None = None) -> Topic:
    topic = await undelete(cluster.metadata, wanted, new_name)
    await cluster.refresh()
    await until_served(cluster.broker, topic.topic_id)
    return topic


async def require_stable(cluster: MiniCluster, topic: str, expected: list[bytes]) -> None:
    """Require that these are the committed records, and that no transaction is open."""
    client = await cluster.connect()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            row = await fetch(client, topic, 0, isolation_level=COMMITTED)
            if row.error_code == 0 and row.last_stable_offset == row.high_watermark:
                break
            await asyncio.sleep(0.02)
    assert await read_committed(client, topic) == expected


def deferred(cluster: MiniCluster) -> list[DeferredMarker]:
    return list(cluster.metadata.view.all(DeferredMarker))


@pytest.mark.parametrize("is_replaced", [False, True], ids=["name is free", "name is taken"])
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
async def test_a_transaction_that_ended_while_its_topic_was_deleted_is_ended_when_that_is_back(
    mini_cluster: MiniCluster, *, commit: bool, is_replaced: bool
) -> None:
    await create(mini_cluster, 2)
    producer = Producer(mini_cluster)
    assert await producer.init() is E.none
    await write(mini_cluster, producer, b"1", b"2")
    assert await producer.add(1) == [E.none]
    wanted = next(each for each in mini_cluster.metadata.view.all(Topic) if each.name == TOPIC)
    await delete(mini_cluster)
    if is_replaced:
        await create(mini_cluster, 1)
    await end(producer, committed=commit)
    await mini_cluster.refresh()
    assert [(each.index, each.is_commit) for each in deferred(mini_cluster)] == [(0, commit), (1, commit)]
    assert await producer.init() is E.none, "the transactional id does not wait for the topic"
    topic = await restore(mini_cluster, str(wanted.topic_id), "events-old" if is_replaced else None)
    await require_stable(mini_cluster, topic.name, [b"1", b"2"] if commit else [])
    await until(mini_cluster.metadata, lambda: not deferred(mini_cluster), WAIT_S)


async def test_a_transaction_ends_in_a_topic_that_came_back_under_another_name(mini_cluster: MiniCluster) -> None:
    producer = await written_in_transaction(mini_cluster, b"old")
    await delete(mini_cluster)
    await create(mini_cluster, 1)
    await write(mini_cluster, producer, b"new")
    await restore(mini_cluster, TOPIC, "events-old")
    await end(producer, committed=True)
    await require_stable(mini_cluster, "events-old", [b"old"])
    await require_stable(mini_cluster, TOPIC, [b"new"])


async def test_a_deferred_marker_ends_no_later_transaction_of_its_producer(tmp_path: Path) -> None:
    """Its record may stay for a while after the marker was written, because its removal failed."""
    async with run_cluster(tmp_path, brokers=2) as cluster:
        await create(cluster, 1)
        producer = Producer(cluster)
        assert await producer.init() is E.none
        topic = cluster.metadata.view.find(Topic, topic_key(TOPIC))
        assert topic is not None
        key = partition_key(topic.topic_id, 0)

        async def write_at_owner(value: bytes, sequence: int) -> None:
            assert await producer.add(0) == [E.none]
            owned = cluster.metadata.view.find(Partition, key)
            assert owned is not None
            broker = cluster.brokers[owned.owner].server
            await until_served(broker, topic.topic_id)
            batch = transactional(producer.producer_id, sequence, value, epoch=producer.epoch)
            log = broker.partitions.find_by_id(topic.topic_id.bytes, 0)
            assert log is not None
            await broker.partitions.append_internal(log.topic_partition, batch)

        await write_at_owner(b"1", 0)
        await delete(cluster)
        await end(producer, committed=False)
        await cluster.refresh()
        (marker,) = deferred(cluster)
        await undelete(cluster.metadata, TOPIC)
        await cluster.refresh()
        await until(cluster.metadata, lambda: not deferred(cluster), WAIT_S)
        await write_at_owner(b"2", 1)
        await cluster.metadata.propose(Command(updates=(Put(record=marker),)))
        owned = cluster.metadata.view.find(Partition, key)
        assert owned is not None
        await cluster.brokers.pop(owned.owner).stop()
        await until_served(cluster.broker, topic.topic_id)
        await until(cluster.metadata, lambda: not deferred(cluster), WAIT_S)
        await end(producer, committed=True)
        await require_stable(cluster, TOPIC, [b"2"])


async def test_the_first_outcome_in_a_deletion_stays(mini_cluster: MiniCluster) -> None:
    """A transaction that a coordinator with an old view begins after it has nothing in the partition."""
    producer = await written_in_transaction(mini_cluster, b"1")
    topic = mini_cluster.metadata.view.find(Topic, topic_key(TOPIC))
    assert topic is not None
    await delete(mini_cluster)
    await end(producer, committed=True)
    assert mini_cluster.broker.transactions is not None
    application = mini_cluster.broker.transactions.coordinator_of("copier")
    added = frozenset(((TOPIC, 0),)), frozenset(((TOPIC, topic.topic_id),))
    of_producer = ProducerEpoch(producer.producer_id, producer.epoch)
    assert await application.add_partitions("copier", of_producer, *added, 0) is E.none
    await end(producer, committed=False)
    await restore(mini_cluster, TOPIC)
    await require_stable(mini_cluster, TOPIC, [b"1"])


async def test_a_final_deletion_ends_the_wait_for_a_restore(mini_cluster: MiniCluster) -> None:
    producer = await written_in_transaction(mini_cluster, b"1")
    await delete(mini_cluster)
    await end(producer, committed=True)
    await mini_cluster.refresh()
    assert len(deferred(mini_cluster)) == 1
    await delete_for_good(mini_cluster.metadata, deleted_topic(mini_cluster.metadata.view, TOPIC).topic_id)
    assert deferred(mini_cluster) == []


async def test_a_transaction_ends_though_its_topic_was_deleted_for_good(mini_cluster: MiniCluster) -> None:
    producer = await written_in_transaction(mini_cluster, b"1")
    await delete(mini_cluster)
    (topic,) = mini_cluster.metadata.view.all(DeletedTopic)
    await delete_for_good(mini_cluster.metadata, topic.topic_id)
    await end(producer, committed=True)
    await mini_cluster.refresh()
    assert deferred(mini_cluster) == []


async def test_a_transaction_waits_if_too_many_markers_are_deferred(
    mini_cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deferral, "DEFERRED_MAX", 0)
    producer = await written_in_transaction(mini_cluster, b"1")
    await delete(mini_cluster)
    assert (await producer.send(END, 3, committed=True)).error_code is E.none
    async with asyncio.timeout(PATIENCE_S):
        while "1 markers would be deferred; maximum is 0" not in caplog.text:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)
    assert (await producer.describe()).transaction_state == "PrepareCommit"
    await restore(mini_cluster, TOPIC)
    await until_complete(producer)
    await require_stable(mini_cluster, TOPIC, [b"1"])
