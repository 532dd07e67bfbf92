"""Transactions of unmodified Kafka clients: commits and aborts, fencing, consume-transform-produce while brokers are killed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path

import aiokafka
import confluent_kafka
import kafka
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster

SOURCE, TARGET = "source", "target"
PARTITIONS = 3
GROUP = "copiers"
DEADLINE_S = 60.0
TIMED_OUT = (KafkaError._TIMED_OUT, KafkaError._TIMED_OUT_QUEUE, KafkaError.REQUEST_TIMED_OUT)
"""What a call reports whose coordinator did not come back within ``DEADLINE_S``."""


def make_topics(bootstrap: str, *names: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for created in admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in names]).values():
        created.result(60)


def producer(bootstrap: str, transactional_id: str = "copier", timeout_ms: int = 60_000) -> confluent_kafka.Producer:
    made = confluent_kafka.Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": transactional_id,
            "linger.ms": 0,
            "transaction.timeout.ms": timeout_ms,
        }
    )
    made.init_transactions(DEADLINE_S)
    return made


def read(bootstrap: str, topic: str, expected: int, isolation: str = "read_committed") -> list[bytes]:
    """The values of a topic: at least ``expected`` ones if they come in time, and those that follow within a moment."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": f"reader-{time.monotonic_ns()}", "isolation.level": isolation}
    )
    consumer.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
    values: list[bytes] = []
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        message = consumer.poll(0.5 if len(values) >= expected else 5)
        if message is None and len(values) >= expected:
            break
        if message is not None and not message.error():
            values.append(message.value() or b"")
    consumer.close()
    return sorted(values)


async def test_committed_records_are_read_and_aborted_ones_are_not(mini_cluster: MiniCluster) -> None:
    bootstrap = mini_cluster.bootstrap

    def run() -> None:
        make_topics(bootstrap, TARGET)
        made = producer(bootstrap)
        for number, is_committed in enumerate((True, False, True)):
            made.begin_transaction()
            for index in range(PARTITIONS):
                made.produce(TARGET, b"%d-%d" % (number, index), partition=index)
            if is_committed:
                made.commit_transaction(DEADLINE_S)
            else:
                made.flush()
                made.abort_transaction(DEADLINE_S)
        expected = [b"%d-%d" % (number, index) for number in (0, 2) for index in range(PARTITIONS)]
        assert read(bootstrap, TARGET, len(expected)) == expected
        assert len(read(bootstrap, TARGET, 9, "read_uncommitted")) == 9

    await in_thread(run)


async def test_a_second_producer_fences_the_first_and_aborts_its_transaction(mini_cluster: MiniCluster) -> None:
    bootstrap = mini_cluster.bootstrap

    def run() -> None:
        make_topics(bootstrap, TARGET)
        first = producer(bootstrap)
        first.begin_transaction()
        first.produce(TARGET, b"of the first", partition=0)
        first.flush()
        second = producer(bootstrap)
        second.begin_transaction()
        second.produce(TARGET, b"of the second", partition=0)
        second.commit_transaction(DEADLINE_S)
        with pytest.raises(KafkaException) as refused:
            first.commit_transaction(DEADLINE_S)
        assert refused.value.args[0].fatal()
        assert read(bootstrap, TARGET, 1) == [b"of the second"]

    await in_thread(run)


async def test_a_transaction_that_takes_too_long_is_aborted(mini_cluster: MiniCluster) -> None:
    bootstrap = mini_cluster.bootstrap

    def run() -> None:
        make_topics(bootstrap, TARGET)
        made = producer(bootstrap, timeout_ms=1_000)
        made.begin_transaction()
        made.produce(TARGET, b"late", partition=0)
        made.flush()
        other = producer(bootstrap, "other")
        other.begin_transaction()
        other.produce(TARGET, b"behind it", partition=0)
        other.commit_transaction(DEADLINE_S)
        assert read(bootstrap, TARGET, 1) == [b"behind it"]

    await in_thread(run)


async def test_aiokafka_and_kafka_python_produce_in_transactions(mini_cluster: MiniCluster) -> None:
    bootstrap = mini_cluster.bootstrap
    await in_thread(lambda: make_topics(bootstrap, TARGET))
    async with aiokafka.AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id="aio") as made:
        async with made.transaction():
            await made.send_and_wait(TARGET, b"aio", partition=0)
        with contextlib.suppress(ZeroDivisionError):
            async with made.transaction():
                await made.send_and_wait(TARGET, b"aborted", partition=1)
                raise ZeroDivisionError

    def run() -> None:
        made = kafka.KafkaProducer(bootstrap_servers=bootstrap, transactional_id="python")
        made.init_transactions()
        made.begin_transaction()
        made.send(TARGET, b"python", partition=2)
        made.commit_transaction()
        made.begin_transaction()
        made.send(TARGET, b"aborted", partition=2)
        made.flush()
        made.abort_transaction()
        made.close()
        assert read(bootstrap, TARGET, 2) == [b"aio", b"python"]

    await in_thread(run)


class Copier:
    """Copies ``SOURCE`` to ``TARGET`` exactly once, until it is stopped; starts again after a fatal error."""

    def __init__(self, cluster: MiniCluster) -> None:
        self._cluster = cluster
        self.stop = threading.Event()
        self.failures: list[KafkaError] = []

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                self._copy()
            except KafkaException as failure:
                self.failures.append(failure.args[0])

    def _copy(self) -> None:
        bootstrap = self._cluster.bootstrap
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap, "group.id": GROUP, "auto.offset.reset": "earliest",
                "enable.auto.commit": False, "isolation.level": "read_committed", "session.timeout.ms": 6_000,
            }
        )  # fmt: skip
        made = producer(bootstrap)
        consumer.subscribe([SOURCE])
        try:
            while not self.stop.is_set():
                messages = [each for each in consumer.consume(20, 0.2) if not each.error()]
                if messages:
                    self._copy_batch(consumer, made, messages)
        finally:
            consumer.close()

    def _copy_batch(
        self, consumer: confluent_kafka.Consumer, made: confluent_kafka.Producer, messages: list[confluent_kafka.Message]
    ) -> None:
        made.begin_transaction()
        try:
            for message in messages:
                made.produce(TARGET, message.value(), partition=message.partition() or 0)
            positions = consumer.position(consumer.assignment())
            made.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), DEADLINE_S)
            made.commit_transaction(DEADLINE_S)
        except KafkaException as failure:
            if not failure.args[0].txn_requires_abort():
                raise
            made.abort_transaction(DEADLINE_S)
            raise


async def test_consume_transform_produce_is_exactly_once_while_brokers_are_killed(tmp_path: Path) -> None:
    records = 600
    async with run_cluster(tmp_path, brokers=3) as cluster:
        bootstrap = cluster.bootstrap
        await in_thread(lambda: make_topics(bootstrap, SOURCE, TARGET))
        copier = Copier(cluster)
        running = asyncio.ensure_future(asyncio.to_thread(copier.run))
        feeder = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
        for number in range(records):
            feeder.produce(SOURCE, b"%04d" % number, partition=number % PARTITIONS)
            feeder.poll(0)
            await asyncio.sleep(0.008)
            if number in (150, 300, 450):
                victim = {150: 1, 300: 2, 450: 3}[number]
                await cluster.brokers.pop(victim).kill()
                await cluster.start_broker(victim + 10)
        now = cluster.bootstrap
        assert await in_thread(lambda: feeder.flush(60)) == 0
        values = await in_thread(lambda: read(now, TARGET, records))
        copier.stop.set()
        await running
        assert values == [b"%04d" % number for number in range(records)]
        assert [str(failure) for failure in copier.failures if failure.code() in TIMED_OUT] == []
