"""Groups of three that join and leave: every partition has one reader, nothing is skipped, the group's offsets are kept."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer, Producer
from integration.process_cluster import ProcessCluster
from kafka import KafkaConsumer

pytestmark = pytest.mark.integration
TIMEOUT_S = 120.0
PARTITIONS = 6
RECORDS = 600


def _fill(cluster: ProcessCluster, topic: str, first: int = 0) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "linger.ms": 5})
    for number in range(first, first + RECORDS):
        producer.produce(topic, str(number).encode(), partition=number % PARTITIONS)
    assert producer.flush(TIMEOUT_S) == 0


class _Members:
    """Consumers of one group, polled in turn until a condition holds."""

    def __init__(self, cluster: ProcessCluster, topic: str, group: str, assignor: str) -> None:
        self._options: dict[str, str | int | bool] = {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "partition.assignment.strategy": assignor,
            "session.timeout.ms": 120_000,
            "heartbeat.interval.ms": 500,
        }
        self._topic = topic
        self.consumers: list[Consumer] = []
        self.seen: list[int] = []

    def join(self, instance: str = "") -> None:
        consumer = Consumer({**self._options, **({"group.instance.id": instance} if instance else {})})
        consumer.subscribe([self._topic])
        self.consumers.append(consumer)

    def leave(self) -> None:
        self.consumers.pop(0).close()

    def shares(self) -> list[int]:
        return sorted(len(consumer.assignment()) for consumer in self.consumers)

    def poll_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"shares {self.shares()}, {len(self.seen)} records"
            for consumer in self.consumers:
                for message in consumer.consume(100, timeout=0.1):
                    assert message.error() is None, message.error()
                    self.seen.append(int(message.value() or b"-1"))

    def close(self) -> None:
        for consumer in self.consumers:
            consumer.close()


@pytest.mark.parametrize("assignor", ["range", "roundrobin", "cooperative-sticky"])
def test_three_members_share_and_hand_over(cluster: ProcessCluster, assignor: str) -> None:
    topic, group = cluster.new_topic(partitions=PARTITIONS), cluster.new_group()
    _fill(cluster, topic)
    members = _Members(cluster, topic, group, assignor)
    for _ in range(3):
        members.join()
    members.poll_until(lambda: members.shares() == [2, 2, 2] and len(set(members.seen)) == RECORDS)
    members.leave()
    members.poll_until(lambda: members.shares() == [3, 3])
    members.leave()
    members.poll_until(lambda: members.shares() == [6])
    _fill(cluster, topic, RECORDS)
    members.poll_until(lambda: len(set(members.seen)) == 2 * RECORDS)
    members.close()
    assert set(members.seen) == set(range(2 * RECORDS))
    offsets = cluster.json("group", "describe", group)["offsets"]
    assert {(row["partition"], row["committed_offset"], row["lag"]) for row in offsets} == {
        (partition, 2 * RECORDS // PARTITIONS, 0) for partition in range(PARTITIONS)
    }


def test_a_static_member_that_returns_keeps_its_partitions(cluster: ProcessCluster) -> None:
    topic, group = cluster.new_topic(partitions=PARTITIONS), cluster.new_group()
    _fill(cluster, topic)
    members = _Members(cluster, topic, group, "range")
    members.join("first")
    members.join("second")
    members.poll_until(lambda: members.shares() == [3, 3] and len(set(members.seen)) == RECORDS)
    owned = {place.partition for place in members.consumers[0].assignment()}
    members.leave()
    members.join("first")
    members.poll_until(lambda: len(members.consumers[1].assignment()) == 3)
    assert {place.partition for place in members.consumers[1].assignment()} == owned
    members.close()


def test_a_group_goes_on_where_it_stood_and_can_be_reset(cluster: ProcessCluster) -> None:
    topic, group = cluster.new_topic(partitions=PARTITIONS), cluster.new_group()
    _fill(cluster, topic)
    for expected in (set(range(RECORDS)), set(range(RECORDS, 2 * RECORDS))):
        members = _Members(cluster, topic, group, "range")
        members.join()
        members.poll_until(lambda members=members, expected=expected: set(members.seen) >= expected)  # type: ignore[misc]
        members.close()
        assert set(members.seen) == expected
        _fill(cluster, topic, RECORDS)
    rows = cluster.json("group", "reset", group, topic, "--to", "earliest", "--yes")["offsets"]
    assert [row["committed_offset"] for row in rows] == [0] * PARTITIONS
    assert {"group": group, "state": "empty"} in cluster.json("group", "list")["groups"]


def test_kafka_python_members(cluster: ProcessCluster) -> None:
    topic, group = cluster.new_topic(partitions=PARTITIONS), cluster.new_group()
    _fill(cluster, topic)
    shares: dict[int, int] = {}
    seen: set[int] = set()
    done = threading.Event()
    deadline = time.monotonic() + TIMEOUT_S

    def read(number: int) -> None:
        # It forgets that it needs metadata if an older request for them is still in flight: the maximum age makes it ask again.
        member = KafkaConsumer(
            topic,
            bootstrap_servers=cluster.bootstrap.split(","),
            group_id=group,
            auto_offset_reset="earliest",
            heartbeat_interval_ms=300,
            metadata_max_age_ms=1000,
        )
        while not done.is_set() and time.monotonic() < deadline:
            # Long polls: a member whose poll ends while it joins may permanently drop the assignment that comes then.
            batches = member.poll(timeout_ms=2000)
            seen.update(int(record.value) for batch in batches.values() for record in batch)
            shares[number] = len(member.assignment())
            if len(seen) == RECORDS and list(shares.values()) == [2, 2, 2]:
                done.set()
        member.close()

    # A joining member waits for the others to join, too: each needs its own thread.
    members = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    assert done.is_set(), f"{len(seen)} records, shares {shares}"


async def test_aiokafka_members(cluster: ProcessCluster) -> None:
    topic, group = cluster.new_topic(partitions=PARTITIONS), cluster.new_group()
    _fill(cluster, topic)
    members = [
        AIOKafkaConsumer(topic, bootstrap_servers=cluster.bootstrap, group_id=group, auto_offset_reset="earliest")
        for _ in range(3)
    ]
    await asyncio.gather(*(member.start() for member in members))
    seen: set[int] = set()
    async with asyncio.timeout(TIMEOUT_S):
        while len(seen) < RECORDS or sorted(len(member.assignment()) for member in members) != [2, 2, 2]:
            for batches in await asyncio.gather(*(member.getmany(timeout_ms=100) for member in members)):
                seen.update(int(record.value) for batch in batches.values() for record in batch)
    await asyncio.gather(*(member.stop() for member in members))
