"""A repaired marker is locked as the manifest that it names, on a real MinIO."""

from __future__ import annotations

import random
from typing import Any

import pytest
from unit.tiering.worker.test_locked_history import (
    LONG,
    MINUTE_MS,
    Batches,
    Cluster,
    MadePartition,
    WatchedStore,
    bucket,
    object_lock,
    store,
)

from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import ManifestPointer, Topic
from stratalog_tiering.attach.attachment import AttachPorts, attach
from stratalog_tiering.attach.source import TopicSource
from stratalog_tiering.cold.bucket_scrub import BucketScrub, FoundTopic
from stratalog_tiering.cold.segment_check import unlimited
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.copies.repair import Repair, RepairedFrom, Repairer, RepairSources
from stratalog_tiering.format.object_keys import is_version_object, marker_key
from stratalog_tiering.offload.ownership import claim_bucket, cluster_id_in

pytestmark = pytest.mark.s3
__all__ = ["bucket", "object_lock", "store"]


async def test_a_repaired_marker_is_locked_as_its_manifest(
    cluster: Cluster, store: WatchedStore, make_batches: Batches, background: ThreadBackground
) -> None:
    clock: Any = SystemClock()
    await claim_bucket(store, cluster_id_in(cluster.metadata), clock.wall_ms())
    ports = AttachPorts(
        metadata=cluster.metadata, store=store, clock=clock, random=random.Random(4), background=background,
        settings=TieringSettings(worker_id="attach"),
    )  # fmt: skip
    source = TopicSource(name="source", partition_count=1, partitions={0: MadePartition(make_batches(0, [3, 3]))})
    topic = Topic(name="attached", topic_id=cluster.topic.topic_id, partition_count=1, replication_factor=1, configs=LONG)
    await attach(ports, topic, source)
    (pointer,) = cluster.metadata.view.all(ManifestPointer)
    assert not is_version_object(pointer.object_key)
    key = marker_key(pointer.object_key)
    assert (await store.head(key)).locked_until_ms == pointer.lock_until_ms > clock.wall_ms() + 9 * MINUTE_MS
    await store.put(key, [b"damaged"], if_absent=False)
    assert (await store.head(key)).locked_until_ms == 0
    scrub = BucketScrub(store, background, before_ms=0)
    sources = RepairSources(pointers={(topic.topic_id, 0): pointer}, has_metadata=True)
    repairer = Repairer(scrub, store, sources, CopyLimits(background=background, clock=clock, take=unlimited))
    found = FoundTopic(topic_id=topic.topic_id, name=topic.name, partition_count=1)
    _, repairs = await repairer.partition(found, 0)
    assert [*repairs.values()] == [Repair(source=RepairedFrom.METADATA)]
    assert (await store.head(key)).locked_until_ms == pointer.lock_until_ms
