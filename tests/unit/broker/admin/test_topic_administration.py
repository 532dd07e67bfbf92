"""Topics through unmodified admin clients: creation, growth, configs, deletion, and what is refused."""

from __future__ import annotations

import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import confluent_kafka
import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
    ResourceType,
)
from unit.broker.mini_cluster import WAIT_S, MiniCluster, in_thread, run_cluster, until_all_served, until_coordinated
from unit.metadata.watching import until

from stratalog_core.errors import OutcomeUnknown
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.client.guarded_updates import decide_again
from stratalog_metadata.client.topic_deletion import delete_topic
from stratalog_metadata.records import NO_OWNER, DeletedTopic, Ledger, Log, Partition, Topic, broker_key, topic_key
from stratalog_metadata.state.commands import Applied, Command, Delete, Put


def only(futures: dict[Any, Future[Any]]) -> Any:
    (future,) = futures.values()
    return future.result(60)


def refused(futures: dict[Any, Future[Any]]) -> confluent_kafka.KafkaError:
    with pytest.raises(confluent_kafka.KafkaException) as failure:
        only(futures)
    error = failure.value.args[0]
    assert isinstance(error, confluent_kafka.KafkaError)
    return error


def admin_of(cluster: MiniCluster) -> AdminClient:
    return AdminClient({"bootstrap.servers": cluster.bootstrap})


def configs_of(admin: AdminClient, name: str) -> dict[str, ConfigEntry]:
    found: dict[str, ConfigEntry] = only(admin.describe_configs([ConfigResource(ResourceType.TOPIC, name)]))
    return found


async def test_a_topic_from_creation_to_deletion(mini_cluster: MiniCluster) -> None:
    admin = admin_of(mini_cluster)

    def scenario() -> None:
        only(admin.create_topics([NewTopic("flights", 3, 1, config={"retention.ms": "86400000"})]))
        assert len(admin.list_topics("flights", 60).topics["flights"].partitions) == 3
        only(admin.create_partitions([NewPartitions("flights", 5)]))
        assert len(admin.list_topics("flights", 60).topics["flights"].partitions) == 5
        producer = confluent_kafka.Producer({"bootstrap.servers": mini_cluster.bootstrap, "acks": "all"})
        for index in range(5):
            producer.produce("flights", b"value", partition=index)
        assert producer.flush(60) == 0
        only(admin.delete_topics(["flights"]))

    await in_thread(scenario)
    view = mini_cluster.metadata.view
    (deleted,) = view.all(DeletedTopic)
    assert (deleted.name, deleted.is_final) == ("flights", False)
    assert [*view.all(Partition)] == []
    assert len([*view.all(Log)]) == len([*view.all(Ledger)]) == 5, "what the topic is restored from"

    def again() -> None:
        only(admin.create_topics([NewTopic("flights", 1, 1)]))

    def is_empty() -> None:
        reader = confluent_kafka.Consumer({"bootstrap.servers": mini_cluster.bootstrap, "group.id": "g"})
        assert reader.get_watermark_offsets(confluent_kafka.TopicPartition("flights", 0), 60) == (0, 0)
        reader.close()

    await in_thread(again)
    await until_all_served(mini_cluster)
    await in_thread(is_empty)


async def test_a_lost_answer_to_a_creation_does_not_bring_back_a_deleted_topic(
    mini_cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proposed again under the same id, it would have an empty log and leader epoch 0 beside the old topic's ledgers."""
    view, propose = mini_cluster.metadata.view, mini_cluster.broker.metadata.propose
    left = iter([OutcomeUnknown("the answer was lost")])

    def all_have_owners() -> bool:
        partitions = list(view.all(Partition))
        return len(partitions) == 3 and all(partition.owner != NO_OWNER for partition in partitions)

    async def propose_and_delete(command: Command, timeout_s: float = 10.0) -> Applied:
        applied = await propose(command, timeout_s)
        if not any(isinstance(update, Put) and isinstance(update.record, Topic) for update in command.updates):
            return applied
        for lost in left:
            await until(mini_cluster.metadata, all_have_owners, WAIT_S)
            stored = view.get(topic_key("flights"))
            assert stored is not None
            assert isinstance(stored.record, Topic)
            await propose(delete_topic(view, stored.record, stored.version, 0, 60_000), timeout_s)
            raise lost
        return applied

    monkeypatch.setattr(mini_cluster.broker.metadata, "propose", propose_and_delete)
    admin = admin_of(mini_cluster)
    error = await in_thread(lambda: refused(admin.create_topics([NewTopic("flights", 3, 1)])))
    assert error.code() == confluent_kafka.KafkaError.REQUEST_TIMED_OUT
    assert [deleted.name for deleted in view.all(DeletedTopic)] == ["flights"]
    assert view.get(topic_key("flights")) is None
    monkeypatch.undo()
    await in_thread(lambda: only(admin.create_topics([NewTopic("flights", 3, 1)])))


@pytest.mark.parametrize("change", ["configure", "grow"])
async def test_a_lost_answer_to_a_change_does_not_change_the_next_topic_of_the_name(
    mini_cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Other clients have deleted and created it right after the change took effect."""
    view, propose = mini_cluster.metadata.view, mini_cluster.broker.metadata.propose
    admin = admin_of(mini_cluster)
    await in_thread(lambda: only(admin.create_topics([NewTopic("flights", 1, 1)])))
    again = Topic(name="flights", topic_id=UUID(int=1), partition_count=1, replication_factor=1)
    records = (again, Partition(topic_id=again.topic_id, index=0), Log(topic_id=again.topic_id, index=0))

    async def delete() -> None:
        await mini_cluster.metadata.refresh()
        stored = view.get(topic_key("flights"))
        assert stored is not None
        assert isinstance(stored.record, Topic)
        await propose(delete_topic(view, stored.record, stored.version, 0, 60_000))

    async def propose_and_replace(command: Command, timeout_s: float = 10.0) -> Applied:
        applied = await propose(command, timeout_s)
        if any(isinstance(update, Put) and isinstance(update.record, Topic) for update in command.updates):
            monkeypatch.undo()
            await decide_again("flights", delete)  # Its partitions are getting their owners.
            await propose(Command(updates=tuple(Put(record=record) for record in records)))
            raise OutcomeUnknown("the answer was lost")
        return applied

    monkeypatch.setattr(mini_cluster.broker.metadata, "propose", propose_and_replace)
    if change == "grow":
        error = await in_thread(lambda: refused(admin.create_partitions([NewPartitions("flights", 5)])))
    else:
        entry = ConfigEntry("retention.ms", "1000", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, "flights", incremental_configs=[entry])
        error = await in_thread(lambda: refused(admin.incremental_alter_configs([resource])))
    assert error.code() == confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART
    assert view.find(Topic, topic_key("flights")) == again


async def test_a_lost_answer_to_a_deletion_does_not_delete_the_next_topic_of_the_name(
    mini_cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client has created it right after the deletion took effect."""
    view, propose = mini_cluster.metadata.view, mini_cluster.broker.metadata.propose
    admin = admin_of(mini_cluster)
    await in_thread(lambda: only(admin.create_topics([NewTopic("flights", 1, 1)])))
    again = Topic(name="flights", topic_id=UUID(int=1), partition_count=1, replication_factor=1)
    records = (again, Partition(topic_id=again.topic_id, index=0), Log(topic_id=again.topic_id, index=0))

    async def propose_and_create(command: Command, timeout_s: float = 10.0) -> Applied:
        applied = await propose(command, timeout_s)
        if Delete(key=topic_key("flights")) in command.updates:
            monkeypatch.undo()
            await mini_cluster.metadata.propose(Command(updates=tuple(Put(record=record) for record in records)))
            raise OutcomeUnknown("the answer was lost")
        return applied

    monkeypatch.setattr(mini_cluster.broker.metadata, "propose", propose_and_create)
    await in_thread(lambda: only(admin.delete_topics(["flights"])))
    assert view.find(Topic, topic_key("flights")) == again
    assert len([*view.all(DeletedTopic)]) == 1


async def test_creations_that_are_refused(mini_cluster: MiniCluster) -> None:
    admin = admin_of(mini_cluster)

    def scenario() -> None:
        only(admin.create_topics([NewTopic("flights", 1, 1)]))
        for topic, code, words in (
            (NewTopic("flights", 1, 1), "TOPIC_ALREADY_EXISTS", "'flights'"),
            (NewTopic("a/b", 1, 1), "TOPIC_EXCEPTION", "a/b"),
            (NewTopic("__consumer_offsets", 1, 1), "TOPIC_EXCEPTION", "on demand"),
            (NewTopic("t", 20_000, 1), "INVALID_PARTITIONS", "1 to 10000"),
            (NewTopic("t", 1, 3), "INVALID_REPLICATION_FACTOR", "bookies: 1"),
            (NewTopic("t", 1, 1, config={"retention.mss": "1"}), "INVALID_CONFIG", "did you mean 'retention.ms'"),
            (NewTopic("t", 1, 1, config={"segment.bytes": "1"}), "INVALID_CONFIG", "segment.bytes is 1; minimum is 65536"),
            (NewTopic("t", 1, 1, config={"cleanup.policy": "shred"}), "INVALID_CONFIG", "choose compact or delete"),
        ):
            error = refused(admin.create_topics([topic]))
            assert code in error.name()
            assert words in error.str()
        only(admin.create_topics([NewTopic("t", 1, 1)], validate_only=True))
        assert "t" not in admin.list_topics(timeout=60).topics
        assert "INVALID_PARTITIONS" in refused(admin.create_partitions([NewPartitions("flights", 1)])).name()
        assert "UNKNOWN_TOPIC" in refused(admin.create_partitions([NewPartitions("unknown", 2)])).name()
        assert "UNKNOWN_TOPIC" in refused(admin.delete_topics(["unknown"])).name()

    await in_thread(scenario)


async def test_numbers_left_to_the_broker(mini_cluster: MiniCluster) -> None:
    admin = admin_of(mini_cluster)

    def scenario() -> None:
        only(admin.create_topics([NewTopic("flights")]))
        only(admin.create_topics([NewTopic("assigned", num_partitions=2, replica_assignment=[[1], [1]])]))
        topics = admin.list_topics(timeout=60).topics
        assert (len(topics["flights"].partitions), len(topics["assigned"].partitions)) == (1, 2)

    await in_thread(scenario)


async def test_shorter_retention_is_applied_and_logged(mini_cluster: MiniCluster, caplog: pytest.LogCaptureFixture) -> None:
    admin = admin_of(mini_cluster)

    def change(name: str, value: str | None) -> None:
        operation = AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET
        entry = ConfigEntry(name, value, incremental_operation=operation)
        resource = ConfigResource(ResourceType.TOPIC, "flights", incremental_configs=[entry])
        only(admin.incremental_alter_configs([resource], validate_only=True))
        only(admin.incremental_alter_configs([resource]))

    def scenario() -> None:
        only(admin.create_topics([NewTopic("flights", 1, 1, config={"retention.ms": "1000"})]))
        for name, value in (("retention.ms", "-1"), ("retention.ms", None)):
            change(name, value)
        for limit in ("70", "80", "60"):
            change("retention.bytes", limit)

    await in_thread(scenario)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text for text in warnings if "shortened" in text] == [
        "retention.ms of topic 'flights' was shortened from -1 to 604800000: older records are deleted",
        "retention.bytes of topic 'flights' was shortened from -1 to 70: older records are deleted",
        "retention.bytes of topic 'flights' was shortened from 80 to 60: older records are deleted",
    ]


async def test_configs_are_changed_one_by_one(mini_cluster: MiniCluster) -> None:
    admin = admin_of(mini_cluster)

    def change(name: str, value: str | None, operation: AlterConfigOpType) -> dict[Any, Future[Any]]:
        entry = ConfigEntry(name, value, incremental_operation=operation)
        resource = ConfigResource(ResourceType.TOPIC, "flights", incremental_configs=[entry])
        changed: dict[Any, Future[Any]] = admin.incremental_alter_configs([resource])
        return changed

    def scenario() -> None:
        only(admin.create_topics([NewTopic("flights", 1, 1)]))
        assert ConfigSource(configs_of(admin, "flights")["retention.ms"].source) is ConfigSource.DEFAULT_CONFIG
        only(change("retention.ms", "1000", AlterConfigOpType.SET))
        found = configs_of(admin, "flights")["retention.ms"]
        assert (found.value, ConfigSource(found.source)) == ("1000", ConfigSource.DYNAMIC_TOPIC_CONFIG)
        only(change("cleanup.policy", "delete", AlterConfigOpType.APPEND))
        assert configs_of(admin, "flights")["cleanup.policy"].value == "delete"
        assert "choose compact or delete" in refused(change("cleanup.policy", "shred", AlterConfigOpType.APPEND)).str()
        throttled = change("leader.replication.throttled.replicas", "0:1", AlterConfigOpType.SET)
        assert "nothing to throttle" in refused(throttled).str()
        only(change("segment.ms", "700", AlterConfigOpType.SET))
        only(change("retention.ms", None, AlterConfigOpType.DELETE))
        assert configs_of(admin, "flights")["retention.ms"].value == "604800000"
        assert "unknown topic config 'retention'" in refused(change("retention", "1", AlterConfigOpType.SET)).str()
        assert "not a list" in refused(change("retention.ms", "1", AlterConfigOpType.APPEND)).str()
        broker = ConfigResource(ResourceType.BROKER, "1")
        assert only(admin.describe_configs([broker]))["num.partitions"].value == "1"

    await in_thread(scenario)
    await until_all_served(mini_cluster)
    log = mini_cluster.broker.partitions.find_by_name(b"flights", 0)
    assert log is not None
    assert log.configs.segment_ms == 700


@pytest.mark.parametrize("deletion_is_seen", [True, False])
async def test_offsets_do_not_outlive_their_topic(tmp_path: Path, deletion_is_seen: bool) -> None:
    async with run_cluster(tmp_path, undelete_window_ms=0) as cluster:
        await _offsets_do_not_outlive_their_topic(cluster, deletion_is_seen)


async def _offsets_do_not_outlive_their_topic(mini_cluster: MiniCluster, deletion_is_seen: bool) -> None:
    admin, groups = admin_of(mini_cluster), mini_cluster.broker.groups
    reader = confluent_kafka.Consumer({"bootstrap.servers": mini_cluster.bootstrap, "group.id": "g"})

    def place(partition: int) -> list[confluent_kafka.TopicPartition]:
        return [confluent_kafka.TopicPartition("flights", partition, 7)]

    def before() -> None:
        only(admin.create_topics([NewTopic("flights", 2, 1)]))
        reader.commit(offsets=place(0), asynchronous=False)
        assert reader.committed(place(0), WAIT_S)[0].offset == 7

    def after() -> None:
        only(admin.delete_topics(["flights"]))
        only(admin.create_topics([NewTopic("flights", 2, 1)]))
        reader.commit(offsets=place(1), asynchronous=False)
        assert reader.committed(place(0), WAIT_S)[0].offset == confluent_kafka.OFFSET_INVALID
        assert reader.committed(place(1), WAIT_S)[0].offset == 7

    await until_coordinated(mini_cluster, "g")
    await in_thread(before)
    if not deletion_is_seen:
        groups.close()  # as if nobody coordinated the group just then
    await in_thread(after)
    await groups.sweep()
    await in_thread(lambda: reader.commit(offsets=place(1), asynchronous=False))
    await in_thread(reader.close)
    store = groups.coordinator_of("g").coordinator.table.store
    assert list(store.offsets_of("g")) == [("flights", 1)]


async def test_a_hundred_topics_at_once_and_busy_ones_deleted(tmp_path: Any) -> None:
    async with run_cluster(tmp_path, brokers=2, auto_create_topics=False, lease_ms=60_000) as cluster:
        admin = admin_of(cluster)
        names = [f"topic-{number}" for number in range(100)]

        def scenario() -> None:
            for future in admin.create_topics([NewTopic(name, 1, 1) for name in names], request_timeout=WAIT_S).values():
                future.result(WAIT_S)
            producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all"})
            for name in names[:10]:
                producer.produce(name, b"value")
            producer.poll(0)
            for future in admin.delete_topics(names, request_timeout=WAIT_S).values():
                future.result(WAIT_S)
            producer.purge()
            producer.flush(5)

        await in_thread(scenario)
        await until(cluster.metadata, lambda: not list(cluster.metadata.view.all(Partition)), WAIT_S)


def _is_replaced(view: MetadataView, broker_id: int) -> bool:
    """Its session has ended, and the controller has assigned every partition anew, which is a command of its own."""
    return view.get(broker_key(broker_id)) is None and all(
        each.owner not in (NO_OWNER, broker_id) for each in view.all(Partition)
    )


async def test_assignments_are_reported_and_led_in_their_order(tmp_path: Any) -> None:
    async with run_cluster(tmp_path, bookies=3, brokers=3, lease_ms=60_000) as cluster:
        admin = admin_of(cluster)

        def told() -> list[tuple[int, list[int], list[int]]]:
            found = admin.list_topics("assigned", 60).topics["assigned"].partitions
            return [(found[index].leader, found[index].replicas, sorted(found[index].isrs)) for index in sorted(found)]

        def until_told(expected: list[tuple[int, list[int], list[int]]]) -> None:
            """Wait for it: the broker that answers may learn of a change after the one that was asked for it."""
            deadline = time.monotonic() + WAIT_S
            while (found := told()) != expected:
                assert time.monotonic() < deadline, found
                time.sleep(0.05)

        def scenario() -> None:
            only(admin.create_topics([NewTopic("assigned", num_partitions=2, replica_assignment=[[3, 1, 2], [2, 3, 1]])]))
            only(admin.create_partitions([NewPartitions("assigned", 3, replica_assignment=[[1, 3, 2]])]))
            until_told([(3, [3, 1, 2], [1, 2, 3]), (2, [2, 3, 1], [1, 2, 3]), (1, [1, 3, 2], [1, 2, 3])])
            for topic, words in (
                (NewTopic("t", num_partitions=1, replica_assignment=[[1, 7]]), "lists broker 7; live brokers are [1, 2, 3]"),
                (NewTopic("t", num_partitions=1, replica_assignment=[[1, 1]]), "lists a broker twice"),
            ):
                error = refused(admin.create_topics([topic]))
                assert "INVALID_REPLICA_ASSIGNMENT" in error.name()
                assert words in error.str()
            error = refused(admin.create_partitions([NewPartitions("assigned", 4, replica_assignment=[[1, 2]])]))
            assert "1 new partitions of 3 replicas" in error.str()

        await in_thread(scenario)
        await cluster.brokers.pop(3).stop()
        for left in cluster.brokers.values():
            await until(left.metadata, partial(_is_replaced, left.metadata.view, 3), WAIT_S)

        def without_broker_3() -> None:
            assert told()[0] == (1, [3, 1, 2], [1, 2])
            assert [leader for leader, _, _ in told()] == [1, 2, 1]

        await in_thread(without_broker_3)
