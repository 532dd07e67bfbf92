"""Deletions through an unmodified client while history is locked: POLICY_VIOLATION and the date, and nothing is deleted."""

from __future__ import annotations

from uuid import UUID

import confluent_kafka
import msgspec
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType
from support.segment_entries import entry_of, leaves_of
from unit.broker.admin.test_deleted_topics import create_with_records
from unit.broker.admin.test_topic_administration import admin_of, only, refused
from unit.broker.mini_cluster import WAIT_S, MiniCluster, in_thread
from unit.metadata.watching import until

from stratalog_broker.admin.errors import InvalidConfig, ObjectsLocked
from stratalog_broker.admin.topic_defaults import configure_defaults
from stratalog_core.moments import utc_text
from stratalog_core.system import SystemClock
from stratalog_metadata.records import Topic, manifest_pointer_key, topic_key
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.format.manifest import empty_manifest, pointer_to
from stratalog_tiering.format.manifest_edit import ManifestEdit, Previous

VIOLATION = confluent_kafka.KafkaError.POLICY_VIOLATION
HOUR_MS = 3_600_000


async def commit_history(cluster: MiniCluster, topic_id: UUID, locks_ms: list[int]) -> None:
    """Commit a manifest of segments with two records each, locked until the wall times ``locks_ms``; 0: not locked."""
    edit = ManifestEdit(Previous(manifest=empty_manifest(topic_id, "flights", 0, 0)), writer="w", random_id=lambda: 1)
    for number, until_ms in enumerate(locks_ms):
        made = entry_of(f"s{number}", 2 * number, 2 * number + 2)
        mode = "compliance" if until_ms else ""
        options = msgspec.structs.replace(made.options, lock_until_ms=until_ms, lock_mode=mode)
        made = msgspec.structs.replace(made, options=options)
        edit.append(made, leaves_of(made))
    new = edit.finish(created_at_ms=SystemClock().wall_ms() - 2 * HOUR_MS)
    # The directory of this cluster could not lock it.
    await cluster.store.put(new.key, [new.content])
    pointer = pointer_to(new.manifest, new.key, new.sha256)
    await cluster.metadata.propose(Command(updates=(Put(record=pointer),)))
    (broker,) = cluster.brokers.values()
    key = manifest_pointer_key(topic_id, 0)
    await until(broker.metadata, lambda: broker.metadata.view.get(key) is not None, WAIT_S)


def topic_of(cluster: MiniCluster) -> Topic:
    found = cluster.metadata.view.find(Topic, topic_key("flights"))
    assert found is not None
    return found


async def test_locked_history_is_not_deleted(mini_cluster: MiniCluster) -> None:
    admin = admin_of(mini_cluster)
    await in_thread(lambda: create_with_records(mini_cluster, "flights", [b"%d" % number for number in range(6)]))
    now_ms = SystemClock().wall_ms()
    until_ms = now_ms + HOUR_MS
    await commit_history(mini_cluster, topic_of(mini_cluster).topic_id, [now_ms - HOUR_MS, until_ms, 0])

    def scenario() -> None:
        assert refused(admin.delete_topics(["flights"])).code() == VIOLATION
        for offset in (3, 4, 5, confluent_kafka.OFFSET_END):
            assert refused(admin.delete_records([TopicPartition("flights", 0, offset)])).code() == VIOLATION
        assert only(admin.delete_records([TopicPartition("flights", 0, 2)])).low_watermark == 2
        assert "flights" in admin.list_topics(timeout=60).topics

    await in_thread(scenario)
    with pytest.raises(ObjectsLocked) as refusal:
        await mini_cluster.broker.topic_commands.delete("flights", WAIT_S)
    assert refusal.value.message == (
        f"records of topic 'flights' are locked in the object store until {utc_text(until_ms)} (compliance): delete them after"
        " that"
    )


async def test_history_whose_locks_have_ended_is_deleted(mini_cluster: MiniCluster) -> None:
    admin = admin_of(mini_cluster)
    await in_thread(lambda: create_with_records(mini_cluster, "flights", [b"1", b"2"]))
    await commit_history(mini_cluster, topic_of(mini_cluster).topic_id, [SystemClock().wall_ms() - 1000])

    def scenario() -> None:
        assert only(admin.delete_records([TopicPartition("flights", 0, 2)])).low_watermark == 2
        only(admin.delete_topics(["flights"]))

    await in_thread(scenario)


async def test_neither_a_topic_nor_a_default_makes_retention_shorter_than_a_lock(mini_cluster: MiniCluster) -> None:
    admin = admin_of(mini_cluster)

    def change(config: str, value: str) -> confluent_kafka.KafkaError:
        entry = ConfigEntry(config, value, incremental_operation=AlterConfigOpType.SET)
        return refused(
            admin.incremental_alter_configs([ConfigResource(ResourceType.TOPIC, "locked", incremental_configs=[entry])])
        )

    def scenario() -> None:
        locks = {"stratalog.tier.lock.mode": "compliance", "stratalog.tier.lock.ms": "86400000"}
        only(admin.create_topics([NewTopic("locked", 1, 1, config=locks)]))
        only(admin.create_topics([NewTopic("free", 1, 1)]))
        error = change("retention.ms", "86399999")
        assert error.code() == confluent_kafka.KafkaError.INVALID_CONFIG
        assert "stratalog.tier.lock.ms is 86400000; maximum is retention.ms, 86399999" in str(error)
        assert "maximum is retention.ms, 604800000" in str(change("stratalog.tier.lock.ms", str(8 * 86_400_000)))

    await in_thread(scenario)
    metadata = mini_cluster.broker.metadata
    with pytest.raises(InvalidConfig, match=r"topic 'locked': stratalog\.tier\.lock\.ms is 86400000; maximum is retention\.ms"):
        await configure_defaults(metadata, lambda _: {"retention.ms": "86399999"}, WAIT_S, validate_only=False)
    await configure_defaults(metadata, lambda _: {"retention.ms": "86400000"}, WAIT_S, validate_only=False)
