"""One collection of all garbage: the list is what the deletion then deletes, and each guard keeps everything."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
import pytest_asyncio
from support.markers import is_marked
from unit.tiering.conftest import FaultyStore
from unit.tiering.worker.test_worker import Batches, Cluster, read_cold

from stratalog_core.errors import Conflict, Invalid, Refused
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.client.topic_deletion import delete_topic, finish_deletion
from stratalog_metadata.records import DeletedTopic, Topic, deleted_topic_key, manifest_pointer_key, topic_key
from stratalog_metadata.state.commands import Command, Delete, Put
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.core.garbage import RESTORABLE_TOPIC
from stratalog_tiering.core.partition import partition_snapshot
from stratalog_tiering.format.descriptor import DeletionMarker, OwnerDescriptor, encode_descriptor
from stratalog_tiering.format.object_keys import data_key_key, deletion_marker_key, owner_key, segment_key
from stratalog_tiering.maintenance.deletion import mark_deleted
from stratalog_tiering.maintenance.orphans import find_garbage
from stratalog_tiering.offload.locks import KnownLocks
from stratalog_tiering.offload.ownership import take_over
from stratalog_tiering.store import ObjectStore, open_store
from stratalog_tiering.worker import collection
from stratalog_tiering.worker.collection import UNCOMMITTED_MS, CollectorPorts, Found, delete_due, find_all

HOUR_MS = 3_600_000
_numbers = itertools.count()


@pytest_asyncio.fixture(params=["directory", "minio"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, background: ThreadBackground) -> AsyncIterator[ObjectStore]:
    url = str(tmp_path / "store")
    if request.param == "minio":
        server = request.getfixturevalue("minio_server")
        bucket = f"collection-{next(_numbers)}"
        server.make_bucket(bucket)
        url = f"s3://{bucket}?endpoint={server.endpoint}&region=us-east-1"
    made = open_store(url, background=background, clock=SystemClock(), random=random.Random(1))
    yield made
    await made.close()


only_in_a_directory = pytest.mark.parametrize("store", ["directory"], indirect=True)


def ports(cluster: Cluster) -> CollectorPorts:
    store = cluster.store
    return CollectorPorts(
        metadata=cluster.metadata, store=store, source=ManifestSource(store), locks=KnownLocks(store)
    )  # fmt: skip


async def found(cluster: Cluster, later_ms: int = 0, grace_ms: int = HOUR_MS) -> list[Found]:
    topics = [*cluster.metadata.view.all(Topic)]
    return await find_all(ports(cluster), topics, grace_ms, SystemClock().wall_ms() + later_ms)


async def objects(store: ObjectStore) -> set[str]:
    return {info.key async for info in store.list("")}


async def history(cluster: Cluster, make_batches: Batches) -> str:
    """Three segments of which the first has been removed by retention, and an orphan; returns the orphan's key."""
    orphan = segment_key(cluster.topic.topic_id, 0, 0, 0, 77)
    await cluster.store.put(orphan, [b"left by a worker that died"])
    worker = await cluster.start_worker()
    for base in (0, 3, 6):
        await cluster.add_ledger(make_batches(base, [3]), base)
        await cluster.until(lambda end=base + 3: (p := cluster.pointer()) is not None and p.end_offset == end)
    segment_bytes = cluster.pointer().cold_bytes // 3
    topic = msgspec.structs.replace(cluster.topic, configs={"retention.ms": "-1", "retention.bytes": str(2 * segment_bytes)})
    await cluster.metadata.propose(Command(updates=(Put(record=topic),)))
    await cluster.until(lambda: cluster.pointer().start_offset == 3 and not cluster.log().ledgers)
    await cluster.until(lambda: not cluster.pointer().content)  # its manifest is in the store
    assert await is_marked(cluster.store, cluster.pointer())
    await worker.close()
    return orphan


def due_keys(garbage: list[Found]) -> list[str]:
    return [each.key for partition in garbage for each in partition.due]


async def test_exactly_what_is_listed_as_due_is_deleted(cluster: Cluster, make_batches: Batches) -> None:
    orphan = await history(cluster, make_batches)
    (now,) = await found(cluster)
    assert (now.due, now.refused) == ((), "")
    (later,) = await found(cluster, UNCOMMITTED_MS + HOUR_MS)
    assert {each.key for each in now.waiting} == {each.key for each in later.due}
    assert (orphan, "orphan") in {(each.key, each.reason) for each in later.due}
    assert {"orphan", "old-manifest", "retention.bytes"} <= {each.reason for each in later.due}
    before = await objects(cluster.store)
    await delete_due(cluster.metadata, cluster.store, [later])
    assert before - await objects(cluster.store) == set(due_keys([later]))
    assert await found(cluster, UNCOMMITTED_MS + HOUR_MS) == []
    assert await read_cold(cluster) == b"".join(make_batches(3, [3])) + b"".join(make_batches(6, [3]))
    await cluster.start_worker("worker-2", grace_ms=0)  # forgets what is deleted already
    await cluster.until(lambda: cluster.pointer().manifest_version > 4 and cluster.last_error() == "")
    assert len(await read_cold(cluster)) == len(b"".join(make_batches(3, [3, 3])))


@only_in_a_directory
async def test_nothing_more_is_deleted_once_another_cluster_has_taken_the_bucket_over(
    cluster: Cluster, make_batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next owner keeps everything for a grace period, and serves from it what this cluster's last commits removed."""
    await history(cluster, make_batches)
    (later,) = await found(cluster, UNCOMMITTED_MS + HOUR_MS)
    monkeypatch.setattr(collection, "DELETES_AT_ONCE", 1)
    before, delete = await objects(cluster.store), cluster.store.delete

    async def delete_and_be_overtaken(keys: list[str]) -> None:
        await delete(keys)
        await take_over(cluster.store, "another", SystemClock().wall_ms())

    monkeypatch.setattr(cluster.store, "delete", delete_and_be_overtaken)
    with pytest.raises(Invalid, match="belongs to cluster another"):
        await delete_due(cluster.metadata, cluster.store, [later])
    assert before - await objects(cluster.store) == {due_keys([later])[0]}


@only_in_a_directory
async def test_nothing_is_judged_by_a_manifest_that_is_not_in_the_store_yet(cluster: Cluster, make_batches: Batches) -> None:
    """A restore from the bucket alone continues from the version before it, and reads what this version has removed."""
    await history(cluster, make_batches)
    pointer = cluster.pointer()
    content = await cluster.store.get(pointer.object_key)
    await cluster.store.delete([pointer.object_key])
    await cluster.metadata.propose(Command(updates=(Put(record=msgspec.structs.replace(pointer, content=content)),)))
    (later,) = await found(cluster, UNCOMMITTED_MS + HOUR_MS)
    assert not later.due
    assert not later.waiting
    assert "is committed and not in the store yet" in later.refused
    await cluster.start_worker("worker-2")
    await cluster.until(lambda: not cluster.pointer().content)
    (later,) = await found(cluster, UNCOMMITTED_MS + HOUR_MS)
    assert {"orphan", "old-manifest", "retention.bytes"} <= {each.reason for each in later.due}


@only_in_a_directory
async def test_what_may_be_written_for_a_commit_is_no_orphan_yet(cluster: Cluster, make_batches: Batches) -> None:
    """A segment whose upload takes hours, and the data key that was written before it: nothing refers to them."""
    orphan = await history(cluster, make_batches)
    await cluster.store.put(data_key_key(orphan), [b"the key of a segment that is being uploaded"])
    (later,) = await found(cluster, 2 * HOUR_MS)
    assert {each.key for each in later.waiting} == {orphan, data_key_key(orphan)}
    assert {each.reason for each in later.due} >= {"old-manifest", "retention.bytes"}
    (next_day,) = await found(cluster, UNCOMMITTED_MS + HOUR_MS)
    assert {orphan, data_key_key(orphan)} <= {each.key for each in next_day.due}


async def test_a_deleted_topic_waits_for_the_end_of_all_its_periods(cluster: Cluster, make_batches: Batches) -> None:
    await history(cluster, make_batches)
    view, now_ms = cluster.metadata.view, SystemClock().wall_ms()
    stored = view.get(topic_key(cluster.topic.name))
    await cluster.metadata.propose(delete_topic(view, stored.record, stored.version, now_ms, HOUR_MS))
    (restorable,) = await found(cluster, 1000 * HOUR_MS)
    assert restorable.due == ()
    assert {each.reason for each in restorable.waiting} == {RESTORABLE_TOPIC}
    stored = view.get(deleted_topic_key(cluster.topic.topic_id))
    (part,) = finish_deletion(view, stored.record)
    await cluster.metadata.propose(part.command(stored.version))
    (unmarked,) = await found(cluster, 1000 * HOUR_MS)
    assert unmarked.due == (), "the period begins when a worker writes the marker"
    deleted = view.find(DeletedTopic, deleted_topic_key(cluster.topic.topic_id))
    await mark_deleted(cluster.store, deleted, now_ms, cluster_id="")
    assert due_keys(await found(cluster)) == []
    await delete_due(cluster.metadata, cluster.store, await found(cluster, 2 * HOUR_MS))
    assert await objects(cluster.store) == {owner_key(0), deletion_marker_key(cluster.topic.topic_id)}


@only_in_a_directory
async def test_a_marker_of_a_later_release_keeps_its_topic_only(cluster: Cluster, make_batches: Batches) -> None:
    await history(cluster, make_batches)
    deleted = DeletedTopic(topic_id=UUID(int=5), name="trains", deleted_at_ms=1)
    await cluster.metadata.propose(Command(updates=(Put(record=deleted),)))
    marker = DeletionMarker(topic_id=deleted.topic_id, deleted_at_ms=1, format_version=9)
    await cluster.store.put(deletion_marker_key(deleted.topic_id), [encode_descriptor(marker)])
    judged = {(each.topic, each.partition): each for each in await found(cluster, later_ms=10 * UNCOMMITTED_MS)}
    assert "upgrade it" in judged["trains", -1].refused
    assert judged["flights", 0].due


@only_in_a_directory
async def test_nothing_is_judged_in_a_bucket_of_another_cluster(cluster: Cluster, store: ObjectStore) -> None:
    with pytest.raises(Invalid, match="belongs to no cluster"):
        await found(cluster)
    await store.put(owner_key(0), [encode_descriptor(OwnerDescriptor(cluster_id="another", number=0, taken_at_ms=1))])
    with pytest.raises(Invalid, match="belongs to cluster another"):
        await found(cluster)


@only_in_a_directory
async def test_nothing_is_due_of_a_forked_history(cluster: Cluster, make_batches: Batches) -> None:
    await history(cluster, make_batches)
    await cluster.metadata.propose(Command(updates=(Delete(key=manifest_pointer_key(cluster.topic.topic_id, 0)),)))
    (forked,) = await found(cluster, 1000 * HOUR_MS)
    assert "has forked" in forked.refused
    assert forked.due == forked.waiting == ()


@only_in_a_directory
async def test_a_topic_that_is_deleted_during_the_listing_has_no_orphans(cluster: Cluster, make_batches: Batches) -> None:
    await history(cluster, make_batches)
    view: Any = cluster.metadata.view
    state = partition_snapshot(view, cluster.topic, 0)
    assert state is not None
    stored = view.get(topic_key(cluster.topic.name))
    await cluster.metadata.propose(delete_topic(view, stored.record, stored.version, 0, 0))
    stored = view.get(deleted_topic_key(cluster.topic.topic_id))
    (part,) = finish_deletion(view, stored.record)
    await cluster.metadata.propose(part.command(stored.version))
    with pytest.raises(Conflict, match="was deleted while its objects were listed"):
        await find_garbage(ports(cluster), state, 0, 0)


@only_in_a_directory
async def test_a_store_that_refuses_to_answer_ends_the_judgement(cluster: Cluster, make_batches: Batches) -> None:
    """As with credentials that expire meanwhile: it is no property of a partition."""
    await history(cluster, make_batches)
    store = cluster.store = FaultyStore(cluster.store)

    def expired_at(request: int) -> Callable[[str, str], BaseException | None]:
        return lambda name, key: Refused("expired") if len(store.calls) == request else None

    await found(cluster)
    for request in range(1, len(store.calls) + 1):
        store.calls.clear()
        store.before = expired_at(request)
        with pytest.raises(Refused, match="expired"):
            await found(cluster)
