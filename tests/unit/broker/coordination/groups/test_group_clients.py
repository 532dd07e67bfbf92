"""Consumer groups of unmodified Kafka clients: joining and leaving, static members, commits, administration, takeovers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import ConsumerGroupState, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster

TOPIC = "flights"
PARTITIONS = 6
DEADLINE_S = 60.0
SESSION_MS = 30_000
"""Longer than the process may stand still; shorter than ``DEADLINE_S``, because a request to leave may be lost."""


def make_topic(bootstrap: str, messages: int = 0) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (created,) = admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)]).values()
    created.result(60)
    produce(bootstrap, range(messages))


def produce(bootstrap: str, numbers: range) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": True})
    for number in numbers:
        producer.produce(TOPIC, str(number).encode(), partition=number % PARTITIONS)
    assert producer.flush(60) == 0


def consumer(bootstrap: str, **settings: Any) -> confluent_kafka.Consumer:
    return confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap, "group.id": "readers", "auto.offset.reset": "earliest",
            "session.timeout.ms": SESSION_MS, "heartbeat.interval.ms": 100, "enable.auto.commit": False, **settings,
        }
    )  # fmt: skip


class Members:
    """Consumers that are polled in turn, so that rebalances make progress."""

    def __init__(self, bootstrap: str, **settings: Any) -> None:
        self.bootstrap = bootstrap
        self.settings = settings
        self.consumers: list[confluent_kafka.Consumer] = []
        self.messages: list[bytes] = []
        self.revoked: list[int] = []
        self.assigned: list[int] = []

    def add(self, **settings: Any) -> confluent_kafka.Consumer:
        return self.add_to([TOPIC], **settings)

    def add_to(self, topics: list[str], **settings: Any) -> confluent_kafka.Consumer:
        added = self.make(**{**self.settings, **settings})
        self.consumers.append(added)
        added.subscribe(topics, on_assign=self._on_assign, on_revoke=self._on_revoke)
        return added

    def make(self, **settings: Any) -> confluent_kafka.Consumer:
        return consumer(self.bootstrap, **settings)

    def _on_assign(self, _: confluent_kafka.Consumer, partitions: list[TopicPartition]) -> None:
        self.assigned += [partition.partition for partition in partitions]

    def _on_revoke(self, _: confluent_kafka.Consumer, partitions: list[TopicPartition]) -> None:
        self.revoked += [partition.partition for partition in partitions]

    def poll_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.sizes()
            for one in self.consumers:
                message = one.poll(0.02)
                if message is not None:
                    assert message.error() is None, message.error()
                    self.messages.append(message.value() or b"")

    def sizes(self) -> list[int]:
        return [len(one.assignment()) for one in self.consumers]

    def has_read(self, end_offset: int) -> bool:
        """Whether each partition was read to its end by the member that has it: it reads again what is not committed."""
        places = [place.offset for one in self.consumers for place in one.position(one.assignment())]
        return places == [end_offset] * PARTITIONS

    def balanced(self) -> bool:
        held = [partition.partition for one in self.consumers for partition in one.assignment()]
        return sorted(held) == list(range(PARTITIONS)) and max(self.sizes()) == PARTITIONS // len(self.consumers)

    def close(self) -> None:
        for one in self.consumers:
            one.close()


def until_empty(admin: AdminClient) -> None:
    """Wait until the members have left: librdkafka closes a consumer though its request to leave is not answered."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := admin.describe_consumer_groups(["readers"])["readers"].result(60)).state is not ConsumerGroupState.EMPTY:
        assert time.monotonic() < deadline, found.state
        time.sleep(0.05)


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
async def test_three_join_and_leave(mini_cluster: MiniCluster, strategy: str) -> None:
    bootstrap = mini_cluster.bootstrap

    def scenario() -> None:
        make_topic(bootstrap, 60)
        members = Members(bootstrap, **{"partition.assignment.strategy": strategy})
        for _ in range(3):
            members.add()
            members.poll_until(members.balanced)
        members.poll_until(lambda: len(set(members.messages)) == 60)
        if strategy == "cooperative-sticky":
            assert len(members.revoked) < PARTITIONS, "partitions that stay are not revoked"
        while len(members.consumers) > 1:
            members.consumers.pop(0).close()
            members.poll_until(members.balanced)
        members.close()

    await in_thread(scenario)


async def test_a_static_member_restarts_without_a_rebalance(mini_cluster: MiniCluster) -> None:
    bootstrap = mini_cluster.bootstrap

    def scenario() -> None:
        make_topic(bootstrap)
        members = Members(bootstrap, **{"partition.assignment.strategy": "range"})
        for name in ("one", "two"):
            members.add(**{"group.instance.id": name})
        members.poll_until(members.balanced)
        before = sorted(partition.partition for partition in members.consumers[1].assignment())
        # A static member does not leave when it is closed; it returns before its session expires.
        members.consumers.pop(1).close()
        members.revoked.clear()
        members.add(**{"group.instance.id": "two"})
        members.poll_until(members.balanced)
        assert sorted(partition.partition for partition in members.consumers[1].assignment()) == before
        assert members.revoked == [], "the one that stayed was not called back"
        members.close()

    await in_thread(scenario)


async def test_commits_are_where_they_were_left(mini_cluster: MiniCluster) -> None:
    bootstrap = mini_cluster.bootstrap

    def scenario() -> None:
        make_topic(bootstrap, 60)
        one = consumer(bootstrap)
        unknown = one.committed([TopicPartition(TOPIC, 0)], 60)
        assert [row.offset for row in unknown] == [confluent_kafka.OFFSET_INVALID]
        one.commit(offsets=[TopicPartition(TOPIC, 2, 7, metadata="here")], asynchronous=False)
        (found,) = one.committed([TopicPartition(TOPIC, 2)], 60)
        assert (found.offset, found.metadata) == (7, "here")
        one.subscribe([TOPIC])
        values: list[bytes] = []
        while len(values) < 53:
            message = one.poll(DEADLINE_S)
            assert message is not None
            assert message.error() is None
            values.append(message.value() or b"")
        assert len(set(values)) == 53, "partition 2 went on from its commit"
        one.commit(asynchronous=False)
        one.close()
        two = consumer(bootstrap)
        assert {row.offset for row in two.committed([TopicPartition(TOPIC, index) for index in range(PARTITIONS)], 60)} == {10}
        two.close()

    await in_thread(scenario)


async def test_administration_of_groups(mini_cluster: MiniCluster) -> None:
    bootstrap = mini_cluster.bootstrap

    def scenario() -> None:
        make_topic(bootstrap, 6)
        admin = AdminClient({"bootstrap.servers": bootstrap})
        members = Members(bootstrap)
        members.add()
        members.poll_until(lambda: len(members.messages) == 6)
        members.consumers[0].commit(asynchronous=False)
        listed = admin.list_consumer_groups().result(60)
        assert [(row.group_id, row.state) for row in listed.valid] == [("readers", ConsumerGroupState.STABLE)]
        assert listed.errors == []
        described = admin.describe_consumer_groups(["readers"])["readers"].result(60)
        assert described.state is ConsumerGroupState.STABLE
        assert [len(member.assignment.topic_partitions) for member in described.members] == [PARTITIONS]
        with pytest.raises(confluent_kafka.KafkaException, match="NON_EMPTY_GROUP"):
            admin.delete_consumer_groups(["readers"])["readers"].result(60)
        members.close()
        until_empty(admin)
        wanted = ConsumerGroupTopicPartitions("readers", [TopicPartition(TOPIC, index) for index in range(PARTITIONS)])
        offsets = admin.list_consumer_group_offsets([wanted])["readers"].result(60)
        assert {row.offset for row in offsets.topic_partitions} == {1}
        reset = ConsumerGroupTopicPartitions("readers", [TopicPartition(TOPIC, 0, 0)])
        admin.alter_consumer_group_offsets([reset])["readers"].result(60)
        everything = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions("readers")])["readers"].result(60)
        assert sorted((row.partition, row.offset) for row in everything.topic_partitions)[0] == (0, 0)
        admin.delete_consumer_groups(["readers"])["readers"].result(60)
        assert admin.list_consumer_groups().result(60).valid == []
        with pytest.raises(confluent_kafka.KafkaException, match="GROUP_ID_NOT_FOUND"):
            admin.delete_consumer_groups(["readers"])["readers"].result(60)

    await in_thread(scenario)


async def test_kafka_python_reads_as_a_group(mini_cluster: MiniCluster) -> None:
    bootstrap = mini_cluster.bootstrap

    def scenario() -> None:
        make_topic(bootstrap, 60)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read_with_kafka_python(bootstrap)
            gc.collect()  # kafka-python sometimes leaves a socket to the garbage collector.

    await in_thread(scenario)


def read_with_kafka_python(bootstrap: str) -> None:
    """Run two members, each in its own thread; both get partitions, and their commits are found.

    Polls have a long time-out: a member whose poll ends while it joins may permanently drop the assignment that follows.
    """
    import kafka
    from kafka.errors import CommitFailedError, RebalanceInProgressError

    values: set[bytes] = set()
    shares: dict[int, int] = {}
    both_have_seen_it = threading.Barrier(2)
    deadline = time.monotonic() + 2 * DEADLINE_S

    def poll(number: int, member: Any) -> None:
        assert time.monotonic() < deadline, f"{len(values)} values, shares {shares}"
        for rows in member.poll(timeout_ms=2000).values():
            values.update(row.value for row in rows)
        shares[number] = len(member.assignment())
        with contextlib.suppress(RebalanceInProgressError, CommitFailedError):
            member.commit()

    def read(number: int) -> int:
        settings: dict[str, Any] = {
            "bootstrap_servers": bootstrap, "group_id": "pythons", "auto_offset_reset": "earliest", "enable_auto_commit": False,
            "heartbeat_interval_ms": 200,
            # kafka-python drops a needed metadata refresh while an older request is in flight; the maximum age repeats it.
            "metadata_max_age_ms": 500,
        }  # fmt: skip
        with contextlib.closing(kafka.KafkaConsumer(TOPIC, **settings)) as member:
            committed = 0
            while committed < 60 or not all(shares.get(each) for each in range(2)):
                poll(number, member)
                committed = sum(member.committed(kafka.TopicPartition(TOPIC, index)) or 0 for index in range(PARTITIONS))
            both_have_seen_it.wait(DEADLINE_S)
            return committed

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(read, range(2))) == [60, 60]
    assert len(values) == 60


async def test_aiokafka_reads_as_a_group(mini_cluster: MiniCluster) -> None:
    from aiokafka import AIOKafkaConsumer

    bootstrap = mini_cluster.bootstrap
    await in_thread(lambda: make_topic(bootstrap, 60))
    readers = [
        AIOKafkaConsumer(
            TOPIC,
            bootstrap_servers=bootstrap,
            group_id="aios",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=SESSION_MS,
        )
        for _ in range(2)
    ]
    values: set[bytes] = set()
    try:
        await asyncio.gather(*(reader.start() for reader in readers))
        async with asyncio.timeout(DEADLINE_S):
            # What one has read before the other has joined is read again by the other.
            while [await positions_of(reader) for reader in readers] != [[10] * 3] * 2:
                for reader in readers:
                    for rows in (await reader.getmany(timeout_ms=50)).values():
                        values |= {row.value for row in rows}
        assert len(values) == 60
        for reader in readers:
            await reader.commit()
        partition = next(iter(readers[0].assignment()))
        assert await readers[0].committed(partition) == 10
    finally:
        for reader in readers:
            await reader.stop()


async def positions_of(reader: Any) -> list[int]:
    from aiokafka.errors import IllegalStateError

    try:
        return [await reader.position(partition) for partition in reader.assignment()]
    except IllegalStateError:  # It was revoked meanwhile.
        return []


def coordinator_id(cluster: MiniCluster) -> int:
    """Return the id of the broker that serves the only partition of ``__consumer_offsets``."""
    return next(broker_id for broker_id, broker in cluster.brokers.items() if any(broker.server.groups.coordinators()))


async def test_no_acknowledged_commit_is_lost_over_two_coordinators_deaths(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, bookies=1, brokers=2, offsets_topic_partitions=1) as cluster:
        bootstrap = cluster.bootstrap
        await in_thread(lambda: make_topic(bootstrap))
        committer = consumer(bootstrap)
        acknowledged = [0]
        acknowledgement, loop, stopped = asyncio.Event(), asyncio.get_running_loop(), threading.Event()

        def commit_on() -> None:
            offset = 0
            while not stopped.is_set():
                offset += 1
                with contextlib.suppress(confluent_kafka.KafkaException):
                    done = committer.commit(offsets=[TopicPartition(TOPIC, 0, offset)], asynchronous=False) or []
                    if [row.error for row in done] == [None]:
                        acknowledged.append(offset)
                        loop.call_soon_threadsafe(acknowledgement.set)

        async def progress() -> None:
            enough = len(acknowledged) + 20
            async with asyncio.timeout(DEADLINE_S):
                while len(acknowledged) < enough:
                    acknowledgement.clear()
                    await acknowledgement.wait()

        working = asyncio.ensure_future(asyncio.to_thread(commit_on))
        try:
            for _ in range(2):
                await progress()
                owner = coordinator_id(cluster)
                await cluster.brokers.pop(owner).kill()
                await cluster.start_broker(owner + 2)
            await progress()
        finally:
            stopped.set()
            await working
        (found,) = await in_thread(lambda: committer.committed([TopicPartition(TOPIC, 0)], 60))
        assert found.offset >= acknowledged[-1]
        await in_thread(committer.close)
