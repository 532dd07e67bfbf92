"""Unmodified Kafka clients against a whole cluster in this process."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import confluent_kafka
import pytest
import pytest_asyncio
from confluent_kafka.admin import AdminClient, NewTopic
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster


def create_topic(bootstrap: str, topic: str, partitions: int = 1, **configs: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (created,) = admin.create_topics([NewTopic(topic, partitions, 1, config=configs)]).values()
    created.result(60)


def produce(bootstrap: str, topic: str, values: list[bytes], **settings: Any) -> None:
    failures: list[Any] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "acks": "all", **settings})

    def delivered(error: Any, _: Any) -> None:
        if error is not None:
            failures.append(error)

    for number, value in enumerate(values):
        producer.produce(topic, value, key=str(number % 7), on_delivery=delivered)
        producer.poll(0)
    assert producer.flush(60) == 0
    assert failures == []


def consume(bootstrap: str, topic: str, count: int, group: str = "readers") -> list[confluent_kafka.Message]:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    )
    consumer.subscribe([topic])
    found: list[confluent_kafka.Message] = []
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        message = consumer.poll(0.2)
        if message is not None:
            assert message.error() is None, message.error()
            found.append(message)
    consumer.commit(asynchronous=False)
    consumer.close()
    return found


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mini_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MiniCluster]:
    """One cluster for all tests of this module; each uses a topic of its own."""
    async with run_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_a_consumer_gets_what_a_producer_sent(mini_cluster: MiniCluster, compression: str) -> None:
    values = [f"value {number}".encode() * 5 for number in range(2000)]
    bootstrap = mini_cluster.bootstrap
    await in_thread(lambda: create_topic(bootstrap, compression, 3))
    await in_thread(
        lambda: produce(bootstrap, compression, values, **{"compression.type": compression, "enable.idempotence": True})
    )
    found = await in_thread(lambda: consume(bootstrap, compression, len(values), group=compression))
    assert sorted(message.value() or b"" for message in found) == sorted(values)
