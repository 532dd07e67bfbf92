"""Producers of a partition with their open transactions, as an operator sees them who looks for hanging ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import in_thread, run_cluster, until_served
from unit.broker.partitions.test_failover import create_topic
from unit.broker.raw_client import RawClient, batch, produce, request
from unit.broker.transactional import append, mark, partition_of, transactional

from stratalog_core.partition_state.transactions import ABORT

TOPIC = "flights"


async def describe(client: RawClient, *partitions: int) -> Any:
    topic = request(61, 0, "TopicRequest", name=TOPIC, partition_indexes=partitions)
    answer = await client.call(61, 0, request(61, 0, "DescribeProducersRequest", topics=(topic,)))
    return answer.topics[0].partitions


async def test_producers_and_their_open_transactions(tmp_path: Path) -> None:
    async with run_cluster(tmp_path) as cluster:
        await in_thread(lambda: create_topic(cluster, TOPIC, 1))
        await until_served(cluster.broker, partition_of(cluster, TOPIC).topic_id)
        client = await cluster.connect()
        await produce(client, TOPIC, batch(b"a", b"b", producer_id=5, producer_epoch=1, base_sequence=0))
        await append(cluster, TOPIC, transactional(6, 0, b"c", epoch=2))
        await append(cluster, TOPIC, transactional(7, 0, b"d"))
        assert await mark(client, TOPIC, 7, ABORT, epoch=1, coordinator_epoch=4) == 0
        here, unknown = await describe(client, 0, 99)
        assert (here.error_code, unknown.error_code) == (0, ErrorCode.unknown_topic_or_partition)
        told = [
            (one.producer_id, one.producer_epoch, one.last_sequence, one.last_timestamp, one.coordinator_epoch,
             one.current_txn_start_offset)
            for one in here.active_producers
        ]  # fmt: skip
        assert told == [(5, 1, 1, 1001, -1, -1), (6, 2, 0, 1000, -1, 2), (7, 1, -1, -1, 4, -1)]
