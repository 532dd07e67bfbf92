"""Unmodified clients with ``group.protocol=consumer``: assignors, static members, patterns, transactions, takeovers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import ConsumerGroupState, ConsumerGroupType, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from unit.broker.coordination.groups.test_group_clients import (
    PARTITIONS,
    SESSION_MS,
    TOPIC,
    Members,
    coordinator_id,
    make_topic,
    produce,
    until_empty,
)
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster, until_coordinated

SETTINGS: dict[str, Any] = {"group_consumer_heartbeat_interval_ms": 100, "group_consumer_assignment_interval_ms": 0}


class ConsumerMembers(Members):
    """Consumers of the consumer protocol, whose time-outs and assignors are the coordinator's."""

    def make(self, **settings: Any) -> confluent_kafka.Consumer:
        return confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.bootstrap, "group.id": "readers", "group.protocol": "consumer",
                "auto.offset.reset": "earliest", "enable.auto.commit": False, "topic.metadata.refresh.interval.ms": 1_000,
                **settings,
            }
        )  # fmt: skip


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    async with run_cluster(tmp_path, bookies=1, brokers=1, **SETTINGS) as running:
        yield running


@pytest.mark.parametrize("assignor", ["range", "uniform"])
async def test_three_join_and_leave(cluster: MiniCluster, assignor: str) -> None:
    bootstrap = cluster.bootstrap

    def scenario() -> None:
        make_topic(bootstrap, 60)
        members = ConsumerMembers(bootstrap, **{"group.remote.assignor": assignor})
        for _ in range(3):
            members.add()
            members.poll_until(members.balanced)
        members.poll_until(lambda: members.has_read(10))
        assert len(set(members.messages)) == 60
        for one in members.consumers:
            one.commit(asynchronous=False)
        offsets = members.consumers[0].committed([TopicPartition(TOPIC, index) for index in range(PARTITIONS)], 60)
        assert {row.offset for row in offsets} == {10}
        admin = AdminClient({"bootstrap.servers": bootstrap})
        (row,) = admin.list_consumer_groups().result(60).valid
        assert (row.group_id, row.state, row.type) == ("readers", ConsumerGroupState.STABLE, ConsumerGroupType.CONSUMER)
        described = admin.describe_consumer_groups(["readers"])["readers"].result(60)
        assert (described.state, described.partition_assignor) == (ConsumerGroupState.STABLE, assignor)
        assert [len(member.assignment.topic_partitions) for member in described.members] == [2, 2, 2]
        while len(members.consumers) > 1:
            members.consumers.pop(0).close()
            members.poll_until(members.balanced)
        members.close()
        until_empty(admin)
        admin.delete_consumer_groups(["readers"])["readers"].result(60)

    await in_thread(scenario)


async def test_a_static_member_restarts_without_a_rebalance(cluster: MiniCluster) -> None:
    bootstrap = cluster.bootstrap

    def scenario() -> None:
        make_topic(bootstrap)
        members = ConsumerMembers(bootstrap)
        for name in ("one", "two"):
            members.add(**{"group.instance.id": name})
        members.poll_until(members.balanced)
        before = sorted(partition.partition for partition in members.consumers[1].assignment())
        members.consumers.pop(1).close()
        members.revoked.clear()
        members.add(**{"group.instance.id": "two"})
        members.poll_until(members.balanced)
        assert sorted(partition.partition for partition in members.consumers[1].assignment()) == before
        assert members.revoked == [], "the one that stayed was not called back"
        members.close()

    await in_thread(scenario)


async def test_a_pattern_is_resolved_by_the_coordinator(cluster: MiniCluster) -> None:
    bootstrap = cluster.bootstrap

    def scenario() -> None:
        make_topic(bootstrap, 6)
        members = ConsumerMembers(bootstrap)
        members.add_to(["^fli.*"])
        members.poll_until(members.balanced)
        admin = AdminClient({"bootstrap.servers": bootstrap})
        (created,) = admin.create_topics([NewTopic("flies", 2, 1)]).values()
        created.result(60)
        members.poll_until(lambda: members.sizes() == [PARTITIONS + 2])
        members.close()

    await in_thread(scenario)


async def test_offsets_of_a_member_are_committed_in_a_transaction(cluster: MiniCluster) -> None:
    bootstrap = cluster.bootstrap

    def scenario() -> None:
        make_topic(bootstrap, 6)
        members = ConsumerMembers(bootstrap)
        (one,) = [members.add()]
        members.poll_until(lambda: len(members.messages) == 6)
        producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": "copier"})
        producer.init_transactions(60)
        producer.begin_transaction()
        member = one.consumer_group_metadata()
        producer.send_offsets_to_transaction([TopicPartition(TOPIC, 0, 1)], member, 60)
        producer.commit_transaction(60)
        (found,) = one.committed([TopicPartition(TOPIC, 0)], 60)
        assert found.offset == 1
        members.close()  # the member's epoch has ended
        producer.begin_transaction()
        other = ConsumerMembers(bootstrap)
        other.add()
        other.poll_until(lambda: other.sizes() == [PARTITIONS])
        with pytest.raises(confluent_kafka.KafkaException) as refused:
            producer.send_offsets_to_transaction([TopicPartition(TOPIC, 0, 2)], member, 60)
        assert refused.value.args[0].code() == confluent_kafka.KafkaError.UNKNOWN_MEMBER_ID
        producer.abort_transaction(60)
        other.close()

    await in_thread(scenario)


@pytest.mark.parametrize("kind", [Members, ConsumerMembers], ids=["classic", "consumer"])
async def test_a_group_survives_its_coordinator(tmp_path: Path, kind: type[Members]) -> None:
    async with run_cluster(tmp_path, bookies=1, brokers=2, offsets_topic_partitions=1, **SETTINGS) as cluster:
        bootstrap = cluster.bootstrap
        members = kind(bootstrap)

        def before() -> None:
            members.add()
            members.add()
            # Produce after the last rebalance: messages read but not committed before a rebalance would be read again.
            members.poll_until(members.balanced)
            produce(bootstrap, range(60))
            members.poll_until(lambda: len(members.messages) == 60)
            for one in members.consumers:
                one.commit(asynchronous=False)
            members.revoked.clear()

        # Both brokers know the topic before a member asks one of them for it.
        await in_thread(lambda: make_topic(bootstrap))
        await in_thread(before)
        await cluster.brokers.pop(coordinator_id(cluster)).kill()

        def scenario() -> None:
            produce(bootstrap, range(60, 120))
            members.poll_until(lambda: len(set(members.messages)) == 120)
            assert members.revoked == [], "members, epochs and assignments came over with the partition"
            assert len(members.messages) == 120
            for one in members.consumers:
                one.commit(asynchronous=False)
            offsets = members.consumers[0].committed([TopicPartition(TOPIC, index) for index in range(PARTITIONS)], 60)
            assert {row.offset for row in offsets} == {20}
            members.close()

        await in_thread(scenario)


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
async def test_a_group_changes_its_protocol_member_by_member_and_back(tmp_path: Path, strategy: str) -> None:
    # Both members shall be in the first generation, and none may leave before the group is upgraded: a sticky assignor of
    # librdkafka returns to a member that joins again the user data of its subscription, and a group with user data in its
    # assignments cannot be upgraded, as in Kafka.
    async with run_cluster(tmp_path, bookies=1, brokers=1, **SETTINGS, group_initial_rebalance_delay_ms=2_000) as cluster:
        await until_coordinated(cluster, "readers")  # Or one would join when it has asked for the coordinator again.
        await in_thread(lambda: _change_protocol_and_back(cluster.bootstrap, strategy))


def _change_protocol_and_back(bootstrap: str, strategy: str) -> None:
    classic = {"group.protocol": "classic", "partition.assignment.strategy": strategy, "heartbeat.interval.ms": 100}
    make_topic(bootstrap, 60)
    members, admin = Migrating(bootstrap, **classic), AdminClient({"bootstrap.servers": bootstrap})
    sent = 60
    for _ in range(2):
        members.add()
    members.poll_until(members.balanced)
    for settings in ({"group.protocol": "consumer"}, classic):
        members.settings = settings
        for _ in range(2):
            members.add()
            members.poll_until(members.balanced)
            members.commit_and_close_first()
            produce(bootstrap, range(sent, sent + 30))
            sent += 30
            members.poll_until(members.balanced)
            members.poll_until(lambda: len(set(members.messages)) == sent)  # noqa: B023 - called at once
        kind = ConsumerGroupType.CLASSIC if settings is classic else ConsumerGroupType.CONSUMER
        (row,) = admin.list_consumer_groups().result(60).valid
        assert row.type == kind
    members.close()


class Migrating(ConsumerMembers):
    """Members that commit what they have read before they leave."""

    def make(self, **settings: Any) -> confluent_kafka.Consumer:
        is_consumer = settings["group.protocol"] == "consumer"
        return super().make(**settings, **({} if is_consumer else {"session.timeout.ms": SESSION_MS}))

    def commit_and_close_first(self) -> None:
        first = self.consumers.pop(0)
        with contextlib.suppress(confluent_kafka.KafkaException):
            first.commit(asynchronous=False)
        first.close()
