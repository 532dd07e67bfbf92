"""A creation that is proposed again after a lost answer, while others delete the topic and restore it under another name."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import NewTopic
from unit.broker.admin.test_topic_administration import admin_of, refused
from unit.broker.mini_cluster import WAIT_S, MiniCluster, in_thread
from unit.metadata.watching import until

from stratalog_core.errors import OutcomeUnknown
from stratalog_metadata.client.topic_deletion import delete_topic, restore_topic
from stratalog_metadata.records import (
    NO_OWNER,
    DeletedTopic,
    Log,
    Partition,
    Topic,
    deleted_topic_key,
    log_key,
    partition_key,
    topic_key,
)
from stratalog_metadata.state.commands import Applied, Command, Put


async def test_a_creation_proposed_again_does_not_reset_the_topic_under_its_next_name(
    mini_cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would empty the logs of a topic with records, and let leader epochs begin again."""
    view, propose = mini_cluster.metadata.view, mini_cluster.broker.metadata.propose
    left = iter([OutcomeUnknown("the answer was lost")])
    written: list[Log] = []

    def owned() -> bool:
        partitions = list(view.all(Partition))
        return bool(partitions) and all(partition.owner != NO_OWNER for partition in partitions)

    async def rename(timeout_s: float) -> None:
        await until(mini_cluster.metadata, owned, WAIT_S)
        stored = view.get(topic_key("flights"))
        assert stored is not None
        assert isinstance(stored.record, Topic)
        topic = stored.record
        log = Log(topic_id=topic.topic_id, index=0, log_start_offset=7)
        await propose(Command(updates=(Put(record=log),)), timeout_s)
        await propose(delete_topic(view, topic, stored.version, 0, 60_000), timeout_s)
        deleted = view.get(deleted_topic_key(topic.topic_id))
        assert deleted is not None
        assert isinstance(deleted.record, DeletedTopic)
        await propose(restore_topic(deleted.record, deleted.version, "voyages"), timeout_s)
        written.append(log)

    async def propose_and_rename(command: Command, timeout_s: float = 10.0) -> Applied:
        applied = await propose(command, timeout_s)
        if any(isinstance(update, Put) and isinstance(update.record, Topic) for update in command.updates):
            for lost in left:
                await rename(timeout_s)
                raise lost
        return applied

    monkeypatch.setattr(mini_cluster.broker.metadata, "propose", propose_and_rename)
    admin = admin_of(mini_cluster)
    error = await in_thread(lambda: refused(admin.create_topics([NewTopic("flights", 1, 1)])))
    assert error.code() == KafkaError.REQUEST_TIMED_OUT
    (topic,) = [each for each in view.all(Topic) if not each.internal]
    assert topic.name == "voyages"
    assert view.find(Log, log_key(topic.topic_id, 0)) == written[0]
    partition = view.find(Partition, partition_key(topic.topic_id, 0))
    assert partition is not None
    assert partition.leader_epoch > 1
