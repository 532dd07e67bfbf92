"""How many copies a topic has: of internal topics when they are created, and of any topic when its factor is changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import WAIT_S, MiniCluster, in_thread, run_cluster, until_coordinated, until_served
from unit.broker.raw_client import batch, fetch, produce, request

from stratalog_broker.admin.replication_factor import change_replication_factor
from stratalog_broker.admin.topics import NewTopic
from stratalog_broker.cluster.replicas import newest_ledger
from stratalog_broker.partitions.internal_topics import CONSUMER_OFFSETS
from stratalog_broker.partitions.ledger_quorums import has_quorums_of
from stratalog_core.errors import Invalid, NotFound
from stratalog_metadata.records import Ledger, LedgerState, Topic, topic_key
from stratalog_metadata.topic_rules.topic_configs import TopicConfigs


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    async with run_cluster(tmp_path, bookies=3, offsets_topic_replication_factor=1) as made:
        yield made


async def create(cluster: MiniCluster, factor: int, **configs: str) -> Topic:
    new = NewTopic(name="flights", partition_count=1, replication_factor=factor, configs=configs)
    topic = await cluster.broker.topic_commands.create(new, WAIT_S)
    await until_served(cluster.broker, topic.topic_id)
    return topic


def newest(cluster: MiniCluster, topic: Topic, index: int = 0) -> Ledger | None:
    return newest_ledger(cluster.broker.metadata.view, topic.topic_id, index)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what the broker does by itself is announced to nobody
            await asyncio.sleep(0.01)


# -- internal topics


async def find_coordinator(cluster: MiniCluster) -> Any:
    client = await cluster.connect()
    answer = await client.call(10, 4, request(10, 4, "FindCoordinatorRequest", key_type=0, coordinator_keys=("g",)))
    return answer.coordinators[0]


async def test_the_offsets_topic_waits_for_as_many_bookies_as_it_has_copies(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, bookies=1, offsets_topic_replication_factor=3) as cluster:
        for _ in range(2):
            found = await find_coordinator(cluster)
            assert found.error_code is ErrorCode.coordinator_not_available
            assert "needs 3 bookies; registered: 1" in found.error_message
            assert "offsets_topic_replication_factor" in found.error_message
        client = await cluster.connect()
        heartbeat = request(12, 4, "HeartbeatRequest", group_id="g", generation_id=1, member_id="m", group_instance_id=None)
        assert (await client.call(12, 4, heartbeat)).error_code is ErrorCode.coordinator_not_available
        assert cluster.metadata.view.get(topic_key(CONSUMER_OFFSETS)) is None
        for number in (2, 3):
            await cluster.start_bookie(f"bookie-{number}")
        assert (await find_coordinator(cluster)).error_code is ErrorCode.none
        await cluster.refresh()
        topic = cluster.metadata.view.find(Topic, topic_key(CONSUMER_OFFSETS))
        assert topic is not None
        assert topic.replication_factor == 3


# -- changes


@pytest.mark.parametrize(("before", "after", "quorum"), [(1, 3, 2), (3, 2, 2), (3, 1, 1)])
async def test_the_open_ledger_is_rolled_and_the_next_has_the_new_factor(
    cluster: MiniCluster, before: int, after: int, quorum: int
) -> None:
    topic = await create(cluster, before)
    client = await cluster.connect()
    assert (await produce(client, "flights", batch(b"one"))).base_offset == 0
    old = newest(cluster, topic)
    assert old is not None
    changed = await change_replication_factor(cluster.metadata, "flights", after)
    assert changed.replication_factor == after
    await until(lambda: (found := newest(cluster, topic)) is not None and found.state is LedgerState.CLOSED)
    assert (await produce(client, "flights", batch(b"two"))).base_offset == 1
    found = newest(cluster, topic)
    assert found is not None
    assert found.ledger_id != old.ledger_id
    assert (found.write_quorum, found.ack_quorum, len(found.fragments[0].bookies)) == (after, quorum, after)
    assert (await fetch(client, "flights", 0)).high_watermark == 2
    assert (await produce(client, "flights", batch(b"three"))).base_offset == 2
    assert newest(cluster, topic) == found, "once"


async def test_a_change_of_the_ack_quorum_rolls_the_open_ledger_too(cluster: MiniCluster) -> None:
    topic = await create(cluster, 3)
    client = await cluster.connect()
    await produce(client, "flights", batch(b"one"))
    await cluster.broker.topic_commands.configure("flights", lambda _: {"min.insync.replicas": "3"}, WAIT_S)
    await until(lambda: (found := newest(cluster, topic)) is not None and found.state is LedgerState.CLOSED)
    assert (await produce(client, "flights", batch(b"two"))).base_offset == 1
    found = newest(cluster, topic)
    assert found is not None
    assert found.ack_quorum == 3


async def test_what_cannot_be_is_refused_with_the_reason(cluster: MiniCluster) -> None:
    await create(cluster, 3, **{"stratalog.ack.quorum": "3"})
    with pytest.raises(Invalid, match="replication factor is 4; maximum is 3: 3 bookies accept ledgers"):
        await change_replication_factor(cluster.metadata, "flights", 4)
    with pytest.raises(Invalid, match=r"stratalog\.ack\.quorum is 3; maximum is the replication factor, 2"):
        await change_replication_factor(cluster.metadata, "flights", 2)
    with pytest.raises(NotFound, match="no topic 'unknown'"):
        await change_replication_factor(cluster.metadata, "unknown", 2)
    assert (await change_replication_factor(cluster.metadata, "flights", 3)).replication_factor == 3


async def test_committed_offsets_get_their_copies_at_once_and_outlive_the_first_bookie(cluster: MiniCluster) -> None:
    """Nothing is committed after the change: what is there already is written anew."""
    await create(cluster, 3)
    place = confluent_kafka.TopicPartition("flights", 0, 7)

    def commit() -> None:
        consumer = confluent_kafka.Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "g"})
        consumer.commit(offsets=[place], asynchronous=False)
        consumer.close()

    def committed() -> int:
        consumer = confluent_kafka.Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "g"})
        (found,) = consumer.committed([confluent_kafka.TopicPartition("flights", 0)], WAIT_S)
        consumer.close()
        return int(found.offset)

    await until_coordinated(cluster, "g")
    await in_thread(commit)
    topic = cluster.metadata.view.find(Topic, topic_key(CONSUMER_OFFSETS))
    assert topic is not None
    ledgers = [newest(cluster, topic, index) for index in range(topic.partition_count)]
    (old,) = [ledger for ledger in ledgers if ledger is not None]
    index = ledgers.index(old)
    changed = await change_replication_factor(cluster.metadata, CONSUMER_OFFSETS, 3)

    def is_copied() -> bool:
        found = newest(cluster, changed, index)
        return (
            found is not None
            and has_quorums_of(found, changed, TopicConfigs.of(changed, {}))
            and old.key() not in _keys(cluster)
        )

    await until(is_copied)
    await cluster.bookies[old.fragments[0].bookies[0]].close()
    await cluster.brokers[1].kill()
    del cluster.brokers[1]
    await cluster.start_broker(2)
    assert await in_thread(committed) == 7


def _keys(cluster: MiniCluster) -> set[str]:
    return {ledger.key() for ledger in cluster.metadata.view.all(Ledger)}
