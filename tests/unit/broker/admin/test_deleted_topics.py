"""Deleted topics through an unmodified client: gone at once, restored while the window lasts, final after it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka import OFFSET_END, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions, NewTopic, ResourceType
from unit.broker.admin.test_topic_administration import admin_of, only, refused
from unit.broker.mini_cluster import WAIT_S, MiniCluster, in_thread, run_cluster
from unit.metadata.watching import until

from stratalog_broker.admin.deleted_topics import delete_for_good, deleted_topic, undelete, until_in_bucket
from stratalog_broker.admin.errors import LimitExceeded, Protected
from stratalog_broker.admin.topic_limits import check_cluster
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_core.errors import Conflict, Invalid, NotFound, OutcomeUnknown
from stratalog_metadata.client import topic_deletion
from stratalog_metadata.client.topic_deletion import finish_deletion
from stratalog_metadata.records import (
    DeletedTopic,
    DynamicConfig,
    Ledger,
    LedgerState,
    Log,
    ManifestPointer,
    Partition,
    RestoredTopic,
    TieringWorker,
    Topic,
    partition_key,
    topic_key,
)
from stratalog_metadata.state.commands import Applied, Command, Delete, Put

GROUP = "readers"


def produce(cluster: MiniCluster, topic: str, values: Sequence[bytes]) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all"})
    for value in values:
        producer.produce(topic, value, partition=0)
    assert producer.flush(60) == 0


def consumed(cluster: MiniCluster, topic: str, count: int) -> list[bytes | None]:
    """The next ``count`` records from where the group is, which then commits."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": GROUP,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, 0, confluent_kafka.OFFSET_STORED)])
    values = [message.value() for message in consumer.consume(count, timeout=60)]
    consumer.commit(asynchronous=False)
    consumer.close()
    return values


def delete(cluster: MiniCluster, topic: str) -> None:
    admin = admin_of(cluster)
    only(admin.delete_topics([topic]))


def create_with_records(cluster: MiniCluster, topic: str, values: Sequence[bytes]) -> None:
    admin = admin_of(cluster)
    only(admin.create_topics([NewTopic(topic, 2, 1, config={"retention.ms": "86400000"})]))
    produce(cluster, topic, values)


async def has_owner(cluster: MiniCluster, topic: Topic) -> None:
    def owned() -> bool:
        partition = cluster.metadata.view.find(Partition, partition_key(topic.topic_id, 0))
        return partition is not None and partition.owner >= 0

    await until(cluster.metadata, owned, WAIT_S)


async def test_a_restored_topic_has_its_records_its_configs_and_its_groups_positions(mini_cluster: MiniCluster) -> None:
    admin, view = admin_of(mini_cluster), mini_cluster.metadata.view

    def before() -> None:
        create_with_records(mini_cluster, "flights", [b"1", b"2", b"3"])
        assert consumed(mini_cluster, "flights", 2) == [b"1", b"2"]
        only(admin.delete_topics(["flights"]))
        assert "flights" not in admin.list_topics(timeout=60).topics
        assert "UNKNOWN_TOPIC" in refused(admin.create_partitions([NewPartitions("flights", 3)])).name()

    await in_thread(before)
    await mini_cluster.broker.groups.sweep()
    (deleted,) = view.all(DeletedTopic)
    restored = await undelete(mini_cluster.metadata, "flights")
    assert (restored.topic_id, restored.configs) == (deleted.topic_id, {"retention.ms": "86400000"})
    assert [*view.all(DeletedTopic)] == []
    await has_owner(mini_cluster, restored)

    def after() -> None:
        produce(mini_cluster, "flights", [b"4"])
        assert consumed(mini_cluster, "flights", 2) == [b"3", b"4"]

    await in_thread(after)


async def test_a_topic_that_is_detached_meanwhile_is_not_reported_as_deleted(
    mini_cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await in_thread(lambda: create_with_records(mini_cluster, "flights", [b"1"]))
    (running,) = mini_cluster.brokers.values()
    propose = running.metadata.propose

    async def after_detachment(command: Command, timeout_s: float = 10.0) -> Applied:
        """All that the command of a detachment does and this one can see."""
        if Delete(key=topic_key("flights")) in command.updates:
            monkeypatch.setattr(running.metadata, "propose", propose)
            await mini_cluster.metadata.propose(Command(updates=(Delete(key=topic_key("flights")),)))
        return await propose(command, timeout_s)

    monkeypatch.setattr(running.metadata, "propose", after_detachment)
    admin = admin_of(mini_cluster)
    error = await in_thread(lambda: refused(admin.delete_topics(["flights"])))
    assert "UNKNOWN_TOPIC" in error.name()
    assert [*mini_cluster.metadata.view.all(DeletedTopic)] == []


async def test_a_restored_partition_begins_above_its_last_leader_epoch(mini_cluster: MiniCluster) -> None:
    await in_thread(lambda: create_with_records(mini_cluster, "flights", [b"1"]))
    view = mini_cluster.metadata.view
    epochs = {partition.index: partition.leader_epoch for partition in view.all(Partition)}
    await in_thread(lambda: delete(mini_cluster, "flights"))
    await undelete(mini_cluster.metadata, "flights")
    await until(mini_cluster.metadata, lambda: all(partition.owner >= 0 for partition in view.all(Partition)), WAIT_S)
    assert {partition.index for partition in view.all(Partition)} == {0, 1}
    assert all(partition.leader_epoch > epochs[partition.index] for partition in view.all(Partition))


async def test_the_open_ledger_of_a_deleted_topic_is_sealed(mini_cluster: MiniCluster) -> None:
    """Bookies repair and move copies of sealed ledgers only."""
    await in_thread(lambda: create_with_records(mini_cluster, "flights", [b"1"]))
    await in_thread(lambda: delete(mini_cluster, "flights"))
    view = mini_cluster.metadata.view
    await until(mini_cluster.metadata, lambda: [ledger.state for ledger in view.all(Ledger)] == [LedgerState.CLOSED], WAIT_S)


async def test_a_topic_of_the_same_name_is_another_one_and_the_deleted_one_is_restored_under_another_name(
    mini_cluster: MiniCluster,
) -> None:
    def before() -> None:
        create_with_records(mini_cluster, "flights", [b"old"])
        delete(mini_cluster, "flights")
        create_with_records(mini_cluster, "flights", [b"new"])

    await in_thread(before)
    metadata = mini_cluster.metadata
    with pytest.raises(Conflict, match="is taken: choose another one with --as"):
        await undelete(metadata, "flights")
    with pytest.raises(Invalid, match="1 to 249 characters"):
        await undelete(metadata, "flights", "a/b")
    restored = await undelete(metadata, "flights", "flights-old")
    await has_owner(mini_cluster, restored)
    assert await in_thread(lambda: consumed(mini_cluster, "flights-old", 1)) == [b"old"]
    assert await in_thread(lambda: consumed(mini_cluster, "flights", 1)) == [b"new"]


async def test_namesakes_are_named_by_their_ids(mini_cluster: MiniCluster) -> None:
    def before() -> None:
        for value in (b"first", b"second"):
            create_with_records(mini_cluster, "flights", [value])
            delete(mini_cluster, "flights")

    await in_thread(before)
    metadata = mini_cluster.metadata
    with pytest.raises(Invalid, match="2 deleted topics were named 'flights'"):
        deleted_topic(metadata.view, "flights")
    first = min(metadata.view.all(DeletedTopic), key=lambda each: each.deleted_at_ms)
    restored = await undelete(metadata, str(first.topic_id))
    await has_owner(mini_cluster, restored)
    assert await in_thread(lambda: consumed(mini_cluster, "flights", 1)) == [b"first"]
    with pytest.raises(NotFound, match="no deleted topic 'unknown'"):
        await undelete(metadata, "unknown")


async def test_a_topic_that_somebody_else_has_restored_is_not_reported_under_another_name(
    mini_cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = mini_cluster.metadata
    await in_thread(lambda: create_with_records(mini_cluster, "flights", [b"1"]))
    await in_thread(lambda: delete(mini_cluster, "flights"))
    propose = metadata.propose

    async def after_another(command: Command, timeout_s: float = 10.0) -> Applied:
        monkeypatch.setattr(metadata, "propose", propose)
        await undelete(metadata, "flights", "first")
        return await propose(command, timeout_s)

    monkeypatch.setattr(metadata, "propose", after_another)
    with pytest.raises(NotFound):
        await undelete(metadata, "flights", "second")
    assert [topic.name for topic in metadata.view.all(Topic) if not topic.internal] == ["first"]


async def test_a_restore_is_done_when_a_worker_has_removed_the_marker_from_the_bucket(mini_cluster: MiniCluster) -> None:
    metadata = mini_cluster.metadata
    await in_thread(lambda: create_with_records(mini_cluster, "flights", [b"1"]))
    await in_thread(lambda: delete(mini_cluster, "flights"))
    restored = await undelete(metadata, "flights")
    assert not await until_in_bucket(metadata, restored, WAIT_S), "nothing was offloaded, and no worker runs"
    await metadata.propose(Command(updates=(Put(record=TieringWorker(worker_id="w", session_id=0)),)))
    with pytest.raises(OutcomeUnknown, match=f"topic undelete {restored.topic_id}`"):
        await until_in_bucket(metadata, restored, 0.1)
    assert await undelete(metadata, str(restored.topic_id)) == restored
    assert await undelete(metadata, "flights", "flights") == restored
    with pytest.raises(NotFound):
        await undelete(metadata, "flights", "other")
    waiting = asyncio.ensure_future(until_in_bucket(metadata, restored, WAIT_S))
    await metadata.propose(Command(updates=(Delete(key=RestoredTopic(topic_id=restored.topic_id).key()),)))
    assert await waiting
    with pytest.raises(NotFound):
        await undelete(metadata, str(restored.topic_id))


async def test_a_restore_is_not_done_if_the_worker_that_wrote_the_marker_is_away(mini_cluster: MiniCluster) -> None:
    metadata = mini_cluster.metadata
    await in_thread(lambda: create_with_records(mini_cluster, "flights", [b"1"]))
    topic = metadata.view.find(Topic, topic_key("flights"))
    assert topic is not None
    pointer = ManifestPointer(
        topic_id=topic.topic_id, index=1, manifest_version=1, object_key="k", sha256="0" * 64, start_offset=0, end_offset=0,
        cold_bytes=0,
    )  # fmt: skip
    await metadata.propose(Command(updates=(Put(record=pointer),)))
    await in_thread(lambda: delete(mini_cluster, "flights"))
    restored = await undelete(metadata, "flights")
    with pytest.raises(OutcomeUnknown, match="is a tiering worker up"):
        await until_in_bucket(metadata, restored, 0.1)


async def test_a_restore_is_not_done_if_the_topic_is_deleted_again(mini_cluster: MiniCluster) -> None:
    metadata = mini_cluster.metadata
    await metadata.propose(Command(updates=(Put(record=TieringWorker(worker_id="w", session_id=0)),)))
    await in_thread(lambda: create_with_records(mini_cluster, "flights", [b"1"]))
    await in_thread(lambda: delete(mini_cluster, "flights"))
    restored = await undelete(metadata, "flights")
    waiting = asyncio.ensure_future(until_in_bucket(metadata, restored, WAIT_S))
    await in_thread(lambda: delete(mini_cluster, "flights"))
    with pytest.raises(Conflict, match="deleted again"):
        await waiting


async def test_a_final_deletion_removes_everything(mini_cluster: MiniCluster) -> None:
    await in_thread(lambda: create_with_records(mini_cluster, "flights", [b"1"]))
    await in_thread(lambda: delete(mini_cluster, "flights"))
    metadata, view = mini_cluster.metadata, mini_cluster.metadata.view
    (deleted,) = view.all(DeletedTopic)
    await delete_for_good(metadata, deleted.topic_id)
    assert [*view.all(Log), *view.all(Ledger), *view.all(ManifestPointer), *view.all(RestoredTopic)] == []
    assert [each.is_final for each in view.all(DeletedTopic)] == [True]
    await delete_for_good(metadata, deleted.topic_id)
    with pytest.raises(NotFound, match="see `stratalog topic list --deleted`"):
        await undelete(metadata, "flights")


async def test_a_final_deletion_goes_on_after_it_was_interrupted(
    mini_cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts against the limits until metadata has forgotten its partitions, and cannot be restored."""
    monkeypatch.setattr(topic_deletion, "PART_RECORDS_MAX", 1)
    await in_thread(lambda: create_with_records(mini_cluster, "flights", [b"1"]))
    await in_thread(lambda: delete(mini_cluster, "flights"))
    metadata, view = mini_cluster.metadata, mini_cluster.metadata.view
    (deleted,) = view.all(DeletedTopic)
    stored = view.get(deleted.key())
    assert stored is not None
    first, *others = finish_deletion(view, deleted)
    assert others
    await metadata.propose(first.command(stored.version))
    assert [(each.is_final, each.partitions_kept) for each in view.all(DeletedTopic)] == [(True, 1)]
    with pytest.raises(NotFound, match="see `stratalog topic list --deleted`"):
        await undelete(metadata, "flights")
    with pytest.raises(LimitExceeded, match="there would be 2 partitions; partitions_max is 1: 1 deleted topics count"):
        check_cluster(BrokerSettings(broker_id=1, partitions_max=1), view, 0, 1)
    await delete_for_good(metadata, deleted.topic_id)
    assert [*view.all(Log), *view.all(Ledger), *view.all(ManifestPointer)] == []
    assert [(each.is_final, each.partitions_kept) for each in view.all(DeletedTopic)] == [(True, 0)]


async def test_the_positions_of_groups_go_when_the_deletion_is_final(mini_cluster: MiniCluster) -> None:
    def before() -> None:
        create_with_records(mini_cluster, "flights", [b"1"])
        consumed(mini_cluster, "flights", 1)
        delete(mini_cluster, "flights")

    await in_thread(before)
    groups, (deleted,) = mini_cluster.broker.groups, mini_cluster.metadata.view.all(DeletedTopic)

    def positions() -> set[str]:
        return {name for coordinator in groups.coordinators() for name, _ in coordinator.topics()}

    await groups.sweep()
    assert positions() == {"flights"}
    await delete_for_good(mini_cluster.metadata, deleted.topic_id)
    async with asyncio.timeout(WAIT_S):
        while positions():  # noqa: ASYNC110 - the groups' log is written behind the view
            await asyncio.sleep(0.02)


async def test_without_a_window_every_deletion_is_final(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, undelete_window_ms=0) as cluster:
        await in_thread(lambda: create_with_records(cluster, "flights", [b"1"]))
        await in_thread(lambda: delete(cluster, "flights"))
        view = cluster.metadata.view
        assert [each.is_final for each in view.all(DeletedTopic)] == [True]
        assert [*view.all(Log), *view.all(Ledger)] == []
        assert view.get(topic_key("flights")) is None


async def test_deleted_topics_count_as_long_as_they_can_be_restored(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, topics_max=1) as cluster:
        admin = admin_of(cluster)

        def before() -> None:
            only(admin.create_topics([NewTopic("first", 1, 1)]))
            only(admin.delete_topics(["first"]))
            error = refused(admin.create_topics([NewTopic("second", 1, 1)]))
            assert "1 deleted topics count: delete them for good with `stratalog topic delete --now`" in error.str()

        await in_thread(before)
        await delete_for_good(cluster.metadata, deleted_topic(cluster.metadata.view, "first").topic_id)
        await cluster.refresh()
        await in_thread(lambda: only(admin.create_topics([NewTopic("second", 1, 1)])))


async def test_a_protected_topic_keeps_its_records_until_the_protection_is_lifted(mini_cluster: MiniCluster) -> None:
    admin = admin_of(mini_cluster)

    def protect(value: str) -> None:
        entry = ConfigEntry("stratalog.deletion.protection", value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, "flights", incremental_configs=[entry])
        only(admin.incremental_alter_configs([resource]))

    def scenario() -> None:
        create_with_records(mini_cluster, "flights", [b"1", b"2"])
        protect("true")
        assert refused(admin.delete_topics(["flights"])).code() == confluent_kafka.KafkaError.POLICY_VIOLATION
        first = [TopicPartition("flights", 0, 1)]
        assert refused(admin.delete_records(first)).code() == confluent_kafka.KafkaError.POLICY_VIOLATION
        assert consumed(mini_cluster, "flights", 2) == [b"1", b"2"]

    def lifted() -> None:
        protect("false")
        first = [TopicPartition("flights", 0, 1)]
        assert only(admin.delete_records(first)).low_watermark == 1
        only(admin.delete_topics(["flights"]))

    await in_thread(scenario)
    with pytest.raises(Protected, match=r"`stratalog topic config flights --set stratalog\.deletion\.protection=false`"):
        await mini_cluster.broker.topic_commands.delete("flights", WAIT_S)
    await in_thread(lifted)


async def test_records_of_a_topic_that_is_only_compacted_are_not_deleted(mini_cluster: MiniCluster) -> None:
    """As in Kafka: the newest record of each key is kept until its tombstone."""
    admin = admin_of(mini_cluster)
    policies = {"state": "compact", "both": "compact,delete", "archive": "", "events": "delete"}

    def scenario() -> None:
        producer = confluent_kafka.Producer({"bootstrap.servers": mini_cluster.bootstrap, "acks": "all"})
        for topic, policy in policies.items():
            only(admin.create_topics([NewTopic(topic, 1, 1, config={"cleanup.policy": policy})]))
            producer.produce(topic, b"1", key=b"k", partition=0)
        assert producer.flush(60) == 0
        for offset in (1, OFFSET_END):
            error = refused(admin.delete_records([TopicPartition("state", 0, offset)]))
            assert error.code() == confluent_kafka.KafkaError.POLICY_VIOLATION
        assert consumed(mini_cluster, "state", 1) == [b"1"]
        for topic in ("both", "archive", "events"):
            assert only(admin.delete_records([TopicPartition(topic, 0, 1)])).low_watermark == 1

    await in_thread(scenario)


async def test_the_protection_of_all_topics_is_lifted_for_one(mini_cluster: MiniCluster) -> None:
    defaults = DynamicConfig(resource="", configs={"stratalog.deletion.protection": "true"})
    await mini_cluster.metadata.propose(Command(updates=(Put(record=defaults),)))
    (broker,) = mini_cluster.brokers.values()
    await until(broker.metadata, lambda: broker.metadata.view.get(defaults.key()) is not None, WAIT_S)
    admin = admin_of(mini_cluster)

    def scenario() -> None:
        only(admin.create_topics([NewTopic("kept", 1, 1)]))
        only(admin.create_topics([NewTopic("free", 1, 1, config={"stratalog.deletion.protection": "false"})]))
        assert refused(admin.delete_topics(["kept"])).code() == confluent_kafka.KafkaError.POLICY_VIOLATION
        only(admin.delete_topics(["free"]))

    await in_thread(scenario)
