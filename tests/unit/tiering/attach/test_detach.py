"""A topic leaves metadata only when all of it is in the bucket, and only as it was looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from stratalog_core.errors import Conflict, Unavailable
from stratalog_core.system import SystemClock
from stratalog_metadata.client.topic_deletion import delete_topic
from stratalog_metadata.records import DeletedTopic, Ledger, Log, ManifestPointer, TierStatus, Topic
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.attach import detachment
from stratalog_tiering.core.detaching import committed_pointers, detach_topic
from stratalog_tiering.core.partition import PartitionSnapshot, partition_snapshot

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]


def snapshots(cluster: Cluster) -> list[PartitionSnapshot]:
    found = [partition_snapshot(cluster.metadata.view, cluster.topic, index) for index in range(2)]
    return [state for state in found if state is not None]


def detach(cluster: Cluster) -> Command:
    return detach_topic(cluster.topic, snapshots(cluster))


async def test_a_topic_that_is_cold_leaves_nothing_in_metadata(cluster: Cluster, make_batches: Batches) -> None:
    await cluster.start_worker()
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.until(lambda: cluster.pointer() is not None and not cluster.log().ledgers)
    assert [pointer.end_offset for pointer in committed_pointers(snapshots(cluster))] == [3]
    await cluster.metadata.propose(detach(cluster))
    view = cluster.metadata.view
    kinds: tuple[type, ...] = (Topic, Log, Ledger, ManifestPointer, TierStatus)
    assert [record for kind in kinds for record in view.all(kind)] == []
    segments = [info.key async for info in cluster.store.list("segments/")]
    assert len(segments) == 1


async def test_hot_records_keep_a_topic_attached(cluster: Cluster, make_batches: Batches) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    with pytest.raises(Conflict, match="is not in the bucket yet"):
        detach(cluster)
    await cluster.start_worker(deletion_lag_ms=3_600_000)
    await cluster.until(lambda: cluster.pointer() is not None and not cluster.pointer().content)
    command = detach(cluster)  # the hot copy is still there, and goes with the topic
    await cluster.metadata.propose(command)
    assert [*cluster.metadata.view.all(Ledger)] == []


async def test_a_manifest_that_is_in_metadata_alone_keeps_a_topic_attached(cluster: Cluster, make_batches: Batches) -> None:
    cluster.store.before = lambda name, key: Unavailable("away") if name == "put" and key.endswith(".version") else None
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(deletion_lag_ms=0)
    await cluster.until(lambda: "away" in cluster.last_error())
    with pytest.raises(Conflict, match="manifest version 1 of flights-0 is not in the bucket yet"):
        detach(cluster)


async def test_an_open_ledger_or_one_that_came_meanwhile_keeps_it_attached(cluster: Cluster, make_batches: Batches) -> None:
    command = detach(cluster)
    await cluster.add_ledger(make_batches(0, [3]), 0, closed=False)
    with pytest.raises(Conflict):
        await cluster.metadata.propose(command)
    with pytest.raises(Conflict, match="is not in the bucket yet"):
        detach(cluster)
    assert [*cluster.metadata.view.all(Topic)] == [cluster.topic]


async def test_a_topic_stays_attached_while_only_its_log_tells_the_next_offset(cluster: Cluster, make_batches: Batches) -> None:
    """Its newest records have expired before they were offloaded; restored, it would assign their offsets again."""
    await cluster.start_worker()
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.until(lambda: cluster.pointer() is not None and not cluster.log().ledgers)
    expired = msgspec.structs.replace(cluster.log(), log_start_offset=6)
    await cluster.metadata.propose(Command(updates=(Put(record=expired),)))
    with pytest.raises(Conflict, match="flights-0 goes on at offset 6, but its history in the bucket ends at 3"):
        detach(cluster)
    await cluster.add_ledger(make_batches(6, [2]), 6)
    await cluster.until(lambda: cluster.pointer().end_offset == 8 and not cluster.log().ledgers)
    await cluster.metadata.propose(detach(cluster))
    assert [*cluster.metadata.view.all(Log)] == []


async def test_a_topic_that_is_deleted_meanwhile_is_not_reported_as_detached(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def delete(store: object, topic: Topic, detached: object) -> None:
        found = cluster.metadata.view.get(topic.key())
        await cluster.metadata.propose(delete_topic(cluster.metadata.view, topic, found.version, 1, 86_400_000))

    monkeypatch.setattr(detachment, "describe_topic", delete)
    with pytest.raises(Conflict, match="was deleted"):
        await detachment.detach(cluster.metadata, cluster.store, SystemClock(), cluster.topic, 10)
    assert [deleted.name for deleted in cluster.metadata.view.all(DeletedTopic)] == ["flights"]


async def test_a_topic_that_got_partitions_or_configs_since_it_was_looked_at_stays(cluster: Cluster) -> None:
    """What the caller has offloaded and asked is that of the record it looked at."""
    for changes in ({"partition_count": 3}, {"configs": {"stratalog.deletion.protection": "true"}}):
        changed = msgspec.structs.replace(cluster.topic, **changes)
        log = Log(topic_id=cluster.topic.topic_id, index=2)
        await cluster.metadata.propose(Command(updates=(Put(record=changed), Put(record=log))))
        with pytest.raises(Conflict, match="has changed since its detachment was decided"):
            await detachment.detach(cluster.metadata, cluster.store, SystemClock(), cluster.topic, 10)
        assert [*cluster.metadata.view.all(Topic)] == [changed]
        assert [key async for key in cluster.store.list_keys("topics/")] == []
