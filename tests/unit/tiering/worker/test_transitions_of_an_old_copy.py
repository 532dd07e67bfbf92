"""Metadata is restored from a copy that was made while a topic was deleted or attached: its history is not deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.tiering.attach.test_attach import claim, log_directory, new_topic, pending, ports, write_logs
from unit.tiering.worker.test_deleted_topics import DAY_MS, delete, restore
from unit.tiering.worker.test_worker import files_in

from stratalog_core.system import ThreadBackground
from stratalog_metadata.records import (
    DeletedTopic,
    PendingTopic,
    RestoredTopic,
    Topic,
    deleted_topic_key,
    log_key,
    manifest_pointer_key,
    partition_key,
    restored_topic_key,
    topic_key,
)
from stratalog_metadata.state.commands import Command, Delete, Put
from stratalog_tiering.attach.attachment import AttachPorts, attach
from stratalog_tiering.attach.kafka_logs import kafka_topic

__all__ = ["log_directory", "ports"]
Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]
MakePorts = Callable[..., AttachPorts]


async def test_a_deletion_that_was_undone_since_metadata_was_copied_deletes_nothing(
    cluster: Cluster, make_batches: Batches, store_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Metadata is restored from a copy that was made while the topic was deleted."""
    view, topic_id = cluster.metadata.view, cluster.topic.topic_id
    await cluster.add_ledger(make_batches(0, [3]), 0)
    worker = await cluster.start_worker(grace_ms=0)
    await cluster.until(lambda: not cluster.log().ledgers and not cluster.pointer().content)
    await worker.close()
    await delete(cluster, 0)
    copied = [view.get(key).record for key in (deleted_topic_key(topic_id), cluster.log().key(), cluster.pointer().key())]
    await restore(cluster, cluster.topic.name)
    worker = await cluster.start_worker("worker-2", grace_ms=DAY_MS)
    await cluster.until(lambda: view.get(restored_topic_key(topic_id)) is None)
    await cluster.add_ledger(make_batches(3, [3]), 3)
    await cluster.until(lambda: not cluster.log().ledgers and not cluster.pointer().content)
    await worker.close()
    history = {name for name in files_in(store_directory) if name.endswith((".segment", ".version"))}
    forgotten = [Delete(key=topic_key(cluster.topic.name)), *(Delete(key=partition_key(topic_id, n)) for n in range(2))]
    await cluster.metadata.propose(Command(updates=(*forgotten, *(Put(record=record) for record in copied))))
    await cluster.start_worker("worker-3", grace_ms=0)
    async with asyncio.timeout(30):
        while f"run `stratalog topic undelete {topic_id}`" not in caplog.text:  # noqa: ASYNC110 - the log tells nobody
            await asyncio.sleep(0.02)
    assert [each.is_final for each in view.all(DeletedTopic)] == [False]
    assert history <= set(files_in(store_directory))


@pytest.fixture
async def attached(
    cluster: Cluster, ports: MakePorts, log_directory: Path, make_batches: Batches, background: ThreadBackground
) -> Topic:
    """A topic that was just attached."""
    write_logs(log_directory, "flights-0", {0: make_batches(0, [2])})
    await claim(cluster)
    source = kafka_topic([log_directory], None, background)
    topic = new_topic(source)
    await attach(ports(), topic, source)
    return topic


async def test_a_topic_that_was_attached_since_metadata_was_copied_is_not_given_up(cluster: Cluster, attached: Topic) -> None:
    """Metadata is restored from a copy that was made while the topic was being attached."""
    view = cluster.metadata.view
    worker = await cluster.start_worker()
    await cluster.until(lambda: not [*view.all(RestoredTopic)])
    await worker.close()
    keys = [topic_key(attached.name), *(make(attached.topic_id, 0) for make in (log_key, manifest_pointer_key, partition_key))]
    reserved = PendingTopic(topic_id=attached.topic_id, name=attached.name, expires_at_ms=1)
    await cluster.metadata.propose(Command(updates=(*(Delete(key=key) for key in keys), Put(record=reserved))))
    await cluster.start_worker("worker-2", grace_ms=0)
    await cluster.until(lambda: pending(cluster) == [])
    assert [*view.all(DeletedTopic)] == []
    assert [key async for key in cluster.store.list_keys(f"segments/{attached.topic_id.hex}/")]


async def test_a_topic_that_exists_is_not_given_up(cluster: Cluster, attached: Topic) -> None:
    """Its reservation was written late, by a build that did not refuse that, before a worker showed the topic."""
    view = cluster.metadata.view
    reserved = PendingTopic(topic_id=attached.topic_id, name=attached.name, expires_at_ms=1)
    await cluster.metadata.propose(Command(updates=(Delete(key=restored_topic_key(attached.topic_id)), Put(record=reserved))))
    await cluster.start_worker(grace_ms=0)
    await cluster.until(lambda: pending(cluster) == [])
    assert [*view.all(DeletedTopic)] == []
