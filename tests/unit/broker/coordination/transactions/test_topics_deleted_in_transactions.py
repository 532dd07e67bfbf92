"""Transactions with a partition that is gone when they end: deleted for good, or until the topic is restored."""

from __future__ import annotations

import asyncio

from kio.schema.errors import ErrorCode as E
from unit.broker.coordination.transactions.test_transaction_requests import END, MINUTE, TOPIC, Producer
from unit.broker.mini_cluster import MiniCluster
from unit.broker.wire_client import connect, part

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


async def until_complete(producer: Producer) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await producer.describe()).transaction_state != "CompleteCommit":  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_transaction_ends_though_its_topic_came_back_with_fewer_partitions(mini_cluster: MiniCluster) -> None:
    await create(mini_cluster, 3)
    producer = Producer(mini_cluster)
    assert await producer.init() is E.none
    assert await producer.add(0, 2) == [E.none, E.none]
    await delete(mini_cluster)
    await create(mini_cluster, 1)
    assert (await producer.send(END, 3, committed=True)).error_code is E.none
    await until_complete(producer)
    assert await producer.init() is E.none
