"""A worker's work on deleted topics: hidden at once, kept while they can be restored, then deleted for good."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from unit.tiering.worker.test_worker import Batches, Cluster, files_in

from stratalog_core.errors import Conflict, Unavailable
from stratalog_core.system import SystemClock
from stratalog_metadata.client import topic_deletion
from stratalog_metadata.client.topic_deletion import delete_topic, restore_topic
from stratalog_metadata.records import (
    DeletedTopic,
    Ledger,
    Log,
    ManifestPointer,
    Topic,
    deleted_topic_key,
    restored_topic_key,
    topic_key,
)
from stratalog_metadata.state.commands import Command, Delete, Put
from stratalog_tiering.cold.archive import deleted_topics, live_topics, readable_topics
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.copies.deletions import mark_deletion
from stratalog_tiering.format import object_keys
from stratalog_tiering.format.descriptor import DeletionMarker, decode_descriptor, encode_descriptor
from stratalog_tiering.format.object_keys import deletion_marker_key, owner_key, segment_key, version_key
from stratalog_tiering.maintenance import deletion
from stratalog_tiering.maintenance.deletion import LateMarkers, collect_deleted_topic, mark_deleted
from stratalog_tiering.offload.locks import may_have_locked
from stratalog_tiering.offload.ports import WorkerPorts, worker_ports
from stratalog_tiering.offload.topic_descriptors import describe_topic
from stratalog_tiering.store import ObjectStore
from stratalog_tiering.worker.leases import WorkerLeases, deletion_lease
from stratalog_tiering.worker.worker import TieringWorker

DAY_MS = 86_400_000


async def delete(cluster: Cluster, restorable_ms: int, deleted_at_ms: int | None = None) -> None:
    now_ms = SystemClock().wall_ms() if deleted_at_ms is None else deleted_at_ms
    stored = cluster.metadata.view.get(topic_key(cluster.topic.name))
    assert stored is not None
    assert isinstance(stored.record, Topic)
    command = delete_topic(cluster.metadata.view, stored.record, stored.version, now_ms, restorable_ms)
    await cluster.metadata.propose(command)


async def restore(cluster: Cluster, name: str) -> None:
    stored = cluster.metadata.view.get(deleted_topic_key(cluster.topic.topic_id))
    assert stored is not None
    assert isinstance(stored.record, DeletedTopic)
    await cluster.metadata.propose(restore_topic(stored.record, stored.version, name))


async def until_hidden(cluster: Cluster, directory: Path) -> None:
    marker = Path(deletion_marker_key(cluster.topic.topic_id)).name
    async with asyncio.timeout(60):
        while marker not in files_in(directory):  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.02)


async def hide_cold_topic(cluster: Cluster, batches: list[bytes], directory: Path, **settings: int) -> TieringWorker:
    """Delete the topic once its history is only in the store, so that it can be restored for a day. Return the worker."""
    await cluster.add_ledger(batches, 0)
    worker: TieringWorker = await cluster.start_worker(grace_ms=0, **settings)
    await cluster.until(lambda: not cluster.log().ledgers)
    await delete(cluster, DAY_MS)
    await until_hidden(cluster, directory)
    return worker


async def names(store: ObjectStore) -> list[str]:
    return [topic.name for topic in await live_topics(store)]


async def test_a_marker_that_is_there_is_not_written_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write whose answer is lost may take effect after the marker has been deleted as the topic's last object."""
    deleted = DeletedTopic(topic_id=cluster.topic.topic_id, name="flights", deleted_at_ms=9)
    written = await mark_deleted(cluster.store, deleted, now_ms=10, cluster_id="")

    async def put(*args: Any, **named: Any) -> None:
        raise AssertionError("it is there")

    monkeypatch.setattr(cluster.store, "put", put)
    assert await mark_deleted(cluster.store, deleted, now_ms=11, cluster_id="") == written


async def test_a_damaged_marker_is_written_again(cluster: Cluster, store_directory: Path, second: ObjectStore) -> None:
    deleted = DeletedTopic(topic_id=cluster.topic.topic_id, name="flights", deleted_at_ms=9)
    await describe_topic(second, cluster.topic)
    key = deletion_marker_key(deleted.topic_id)
    for store in (cluster.store, second):
        await store.put(key, [b"{"])
    marker = await mark_deleted(cluster.store, deleted, now_ms=10, cluster_id="", version=7)
    assert (marker.deleted_at_ms, marker.deletion_version) == (10, 7)
    await mark_deletion(second, deleted, 10, "", 7)
    assert decode_descriptor(await second.get(key), DeletionMarker, key) == marker


async def test_a_topic_whose_descriptor_cannot_be_read_may_have_locks(cluster: Cluster) -> None:
    await describe_topic(cluster.store, cluster.topic)
    assert not await may_have_locked(cluster.store, cluster.topic.topic_id, {})
    key = object_keys.topic_key(cluster.topic.topic_id, 1)
    altered = (await cluster.store.get(key)).replace(b'"format_version": 1', b'"format_version": 9')
    await cluster.store.put(key, [altered], if_absent=False)
    assert await may_have_locked(cluster.store, cluster.topic.topic_id, {})


async def test_a_deleted_topic_is_hidden_and_keeps_all_it_has_until_the_window_ends(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(grace_ms=0, sweep_interval_ms=10, retention_interval_ms=10)
    await cluster.until(lambda: not cluster.log().ledgers)
    await cluster.add_ledger(make_batches(3, [3]), 3, closed=False)
    segments = {name for name in files_in(store_directory) if name.endswith(".segment")}
    view = cluster.metadata.view
    await delete(cluster, DAY_MS, deleted_at_ms=SystemClock().wall_ms() - 2 * DAY_MS)  # by a clock that is behind
    await until_hidden(cluster, store_directory)
    assert await names(cluster.store) == []
    assert segments
    assert segments <= set(files_in(store_directory))
    assert len([*view.all(Ledger)]) == len([*view.all(ManifestPointer)]) == 1
    assert [each.is_final for each in view.all(DeletedTopic)] == [False]


async def test_the_deletion_becomes_final_when_the_window_ends(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(grace_ms=0)
    await cluster.until(lambda: not cluster.log().ledgers)
    view, now_ms = cluster.metadata.view, SystemClock().wall_ms()
    await delete(cluster, 500)
    await cluster.until(lambda: not [*view.all(DeletedTopic)])
    assert [*view.all(Log), *view.all(Ledger), *view.all(ManifestPointer)] == []
    assert SystemClock().wall_ms() >= now_ms + 500
    assert files_in(store_directory) == [Path(owner_key(0)).name]


@pytest.mark.parametrize("kind", ["segments/", "topics/"])
async def test_an_object_under_a_hold_stays_with_what_says_that_its_topic_is_deleted(
    cluster: Cluster, make_batches: Batches, store_directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Without the marker, a descriptor that stays would name a live topic."""
    monkeypatch.setattr(deletion, "HELD_PAUSE_MS", 100)
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(grace_ms=0)
    await cluster.until(lambda: not cluster.log().ledgers)
    marker = deletion_marker_key(cluster.topic.topic_id)
    cluster.store.held = lambda key: key.startswith(kind) and key != marker
    await delete(cluster, 0)
    async with asyncio.timeout(60):
        while [info async for info in cluster.store.list("manifests/")]:  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.02)
    view = cluster.metadata.view
    assert [info async for info in cluster.store.list(kind)]
    assert (len([*view.all(DeletedTopic)]), await names(cluster.store)) == (1, [])
    cluster.store.held = lambda key: False
    await cluster.until(lambda: not [*view.all(DeletedTopic)])
    assert files_in(store_directory) == [Path(owner_key(0)).name]


async def test_objects_that_are_written_late_are_deleted_too(
    cluster: Cluster, make_batches: Batches, store_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write whose answer was lost may take effect after the objects of its topic were deleted."""
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(grace_ms=500)
    await cluster.until(lambda: not cluster.log().ledgers)
    topic_id = cluster.topic.topic_id
    descriptor = await cluster.store.get(object_keys.topic_key(topic_id, 1))
    late, delete_objects = [object_keys.topic_key(topic_id, 2), segment_key(topic_id, 0, 0, 1, 2)], cluster.store.delete

    async def deleted_before_they_are_written(keys: Sequence[str]) -> None:
        await delete_objects(keys)
        if any(key.endswith(".segment") for key in keys):
            while late:
                await cluster.store.put(late.pop(), [descriptor])

    monkeypatch.setattr(cluster.store, "delete", deleted_before_they_are_written)
    await delete(cluster, 0)
    await cluster.until(lambda: not [*cluster.metadata.view.all(DeletedTopic)])
    assert late == []
    assert files_in(store_directory) == [Path(owner_key(0)).name]


async def test_the_bucket_lists_its_deleted_topics_also_if_a_marker_cannot_be_read(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    worker = await hide_cold_topic(cluster, make_batches(0, [3]), store_directory)
    await worker.close()
    ((topic, marker),) = await deleted_topics(cluster.store, await readable_topics(cluster.store))
    assert (topic.name, topic.topic_id) == (cluster.topic.name, cluster.topic.topic_id)
    assert marker is not None
    assert marker.restorable_ms == DAY_MS
    await cluster.store.put(deletion_marker_key(topic.topic_id), [b"damaged"], if_absent=False)
    assert await deleted_topics(cluster.store, await readable_topics(cluster.store)) == [(topic, None)]


async def test_a_topic_that_another_worker_has_shown_is_not_hidden_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker saw the deletion, and gets the lease once the topic is restored and another worker has removed the marker."""
    topic_id, hold, release = cluster.topic.topic_id, WorkerLeases.hold, WorkerLeases.release
    shown, released = asyncio.Event(), asyncio.Event()

    async def hold_late(self: WorkerLeases, name: str) -> Any:
        if name == deletion_lease(topic_id) and not shown.is_set():
            await restore(cluster, cluster.topic.name)
            await cluster.metadata.propose(Command(updates=(Delete(key=restored_topic_key(topic_id)),)))
            shown.set()
        return await hold(self, name)

    async def release_then(self: WorkerLeases, name: str) -> None:
        await release(self, name)
        if name == deletion_lease(topic_id) and shown.is_set():
            released.set()

    monkeypatch.setattr(WorkerLeases, "hold", hold_late)
    monkeypatch.setattr(WorkerLeases, "release", release_then)
    await delete(cluster, DAY_MS)
    await cluster.start_worker(grace_ms=0)
    async with asyncio.timeout(60):
        await released.wait()
    assert ("put", deletion_marker_key(topic_id)) not in cluster.store.calls


async def test_a_restored_topic_is_seen_again_under_its_new_name_and_goes_on(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    await hide_cold_topic(cluster, make_batches(0, [3]), store_directory)
    await restore(cluster, "renamed")
    view, restored = cluster.metadata.view, restored_topic_key(cluster.topic.topic_id)
    await cluster.until(lambda: view.get(restored) is None)
    assert await names(cluster.store) == ["renamed"]
    cluster.topic = msgspec.structs.replace(cluster.topic, name="renamed")
    await cluster.add_ledger(make_batches(3, [3]), 3)
    await cluster.until(lambda: not cluster.log().ledgers)
    assert [pointer.end_offset for pointer in view.all(ManifestPointer)] == [6]


async def test_the_window_begins_again_when_a_restored_topic_is_deleted_again(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    """The marker in the bucket is that of the first deletion: no worker has removed it. The broker's clock is behind."""
    worker = await hide_cold_topic(cluster, make_batches(0, [3]), store_directory)
    await worker.close()
    await restore(cluster, cluster.topic.name)
    await asyncio.sleep(0.5)
    again_ms, view = SystemClock().wall_ms(), cluster.metadata.view
    await delete(cluster, 500, deleted_at_ms=again_ms - 2 * DAY_MS)
    await cluster.start_worker("worker-2", grace_ms=DAY_MS)
    await cluster.until(lambda: [each.is_final for each in view.all(DeletedTopic)] == [True])
    assert SystemClock().wall_ms() >= again_ms + 500
    assert await names(cluster.store) == []
    assert view.get(restored_topic_key(cluster.topic.topic_id)) is None


async def test_the_window_begins_again_if_the_first_marker_was_written_late(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    """The answer to the first write was lost, and it took effect after a worker had removed the marker."""
    await hide_cold_topic(cluster, make_batches(0, [3]), store_directory)
    key, view = deletion_marker_key(cluster.topic.topic_id), cluster.metadata.view
    first = await cluster.store.get(key)
    await restore(cluster, cluster.topic.name)
    await cluster.until(lambda: view.get(restored_topic_key(cluster.topic.topic_id)) is None)
    await cluster.store.put(key, [first])
    await asyncio.sleep(0.5)
    again_ms = SystemClock().wall_ms()
    await delete(cluster, 500, deleted_at_ms=again_ms - 2 * DAY_MS)  # by a broker whose clock is behind
    await cluster.until(lambda: not [*view.all(DeletedTopic)])
    assert SystemClock().wall_ms() >= again_ms + 500


@pytest.mark.parametrize("damage", ["", "{", "format version 9"])
async def test_a_marker_that_was_written_late_does_not_hide_a_restored_topic(
    cluster: Cluster, make_batches: Batches, store_directory: Path, damage: str
) -> None:
    """Also if it cannot be read: nothing that it could say hides a topic which metadata has."""
    await hide_cold_topic(cluster, make_batches(0, [3]), store_directory, sweep_interval_ms=10)
    key = deletion_marker_key(cluster.topic.topic_id)
    first = await cluster.store.get(key)
    await restore(cluster, cluster.topic.name)
    await cluster.until(lambda: cluster.metadata.view.get(restored_topic_key(cluster.topic.topic_id)) is None)
    later = first.replace(b'"format_version": 1', b'"format_version": 9')
    await cluster.store.put(key, [{"": first, "{": b"{"}.get(damage, later)])
    async with asyncio.timeout(60):
        while Path(key).name in files_in(store_directory):  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.02)
    assert await names(cluster.store) == [cluster.topic.name]


# --- requests -----------------------------------------------------------------------------------------------------------


class SetClock(SystemClock):
    """Its monotonic time is what a test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


def ports_of(cluster: Cluster, clock: SystemClock, **settings: Any) -> WorkerPorts:
    return worker_ports(
        TieringSettings(worker_id="worker-1", **settings), cluster.metadata, cluster.store, cluster.ledgers, clock,
        random.Random(1), cluster.background,
    )  # fmt: skip


class Turns:
    """Turns of a worker on a deleted topic, taken one by one, without a grace period."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.ports = ports_of(cluster, SystemClock(), grace_ms=0, deletes_per_s=100_000)

    async def next(self) -> int | None:
        """Return the wall time of the next turn; None after the last one."""
        stored = self.cluster.metadata.view.get(deleted_topic_key(self.cluster.topic.topic_id))
        await self.ports.bucket.ensure()
        self.cluster.store.calls.clear()
        again_ms: int | None = await collect_deleted_topic(self.ports, stored.record, stored.version, ())
        return again_ms

    def reads_of_the_marker(self) -> int:
        key = deletion_marker_key(self.cluster.topic.topic_id)
        return sum(call == ("get", key) for call in self.cluster.store.calls)


async def test_a_turn_of_a_deletion_reads_the_marker_once(cluster: Cluster) -> None:
    turns = Turns(cluster)
    await delete(cluster, DAY_MS)
    await turns.next()
    for _ in range(2):
        due_ms = await turns.next()
        assert due_ms is not None
        assert due_ms > SystemClock().wall_ms()
        assert turns.reads_of_the_marker() == len(turns.cluster.store.calls) == 1


async def test_a_turn_that_began_before_the_restore_neither_hides_the_topic_nor_ends_the_restore(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    """The topic is restored while the worker asks who owns the bucket: its marker is still in the bucket, or not yet."""
    worker = await hide_cold_topic(cluster, make_batches(0, [3]), store_directory)
    await worker.close()
    turns, view, topic_id = Turns(cluster), cluster.metadata.view, cluster.topic.topic_id
    stored = view.get(deleted_topic_key(topic_id))
    await turns.ports.bucket.ensure()
    await restore(cluster, cluster.topic.name)
    await cluster.store.delete([deletion_marker_key(topic_id)])
    with pytest.raises(Conflict, match="restored"):
        await collect_deleted_topic(turns.ports, stored.record, stored.version, ())
    assert await names(cluster.store) == [cluster.topic.name]
    assert view.get(restored_topic_key(topic_id)) is not None


async def final_topic_with_history(cluster: Cluster, directory: Path, partitions: int, configs: dict[str, str]) -> int:
    """Delete the topic for good, with a segment and a manifest in each of its partitions; return how many objects it has."""
    topic = msgspec.structs.replace(cluster.topic, partition_count=partitions, configs=configs)
    await describe_topic(cluster.store, topic)
    for partition in range(partitions):
        for key in (segment_key(topic.topic_id, partition, 0, 1, 2), version_key(topic.topic_id, partition, 1)):
            path = directory / key
            path.parent.mkdir(parents=True)
            path.write_bytes(b"object")
    record = DeletedTopic(topic_id=topic.topic_id, name=topic.name, deleted_at_ms=1)
    await cluster.metadata.propose(Command(updates=(Delete(key=topic_key(topic.name)), Put(record=record))))
    return 2 * partitions


async def test_no_object_is_deleted_before_metadata_has_forgotten_all_partitions(
    cluster: Cluster, store_directory: Path, make_batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker dies after the first command of a final deletion; the next one goes on with the others."""
    monkeypatch.setattr(topic_deletion, "PART_RECORDS_MAX", 1)
    view, propose = cluster.metadata.view, cluster.metadata.propose
    worker = await hide_cold_topic(cluster, make_batches(0, [3]), store_directory)
    await worker.close()
    topic_id, segments = cluster.topic.topic_id, {name for name in files_in(store_directory) if name.endswith(".segment")}
    partitions = [Put(record=Log(topic_id=topic_id, index=index)) for index in (1, 2)]
    stored = view.get(deleted_topic_key(topic_id))
    wider = msgspec.structs.replace(
        stored.record, restorable_ms=0, topic=msgspec.structs.replace(stored.record.topic, partition_count=3)
    )
    await propose(Command(updates=(*partitions, Put(record=wider))))
    done = 0

    async def propose_once(*args: Any) -> Any:
        nonlocal done
        done += 1
        if done > 1:
            raise Unavailable("the worker is dead")
        return await propose(*args)

    turns = Turns(cluster)
    monkeypatch.setattr(cluster.metadata, "propose", propose_once)
    with pytest.raises(Unavailable):
        await turns.next()
    monkeypatch.undo()
    monkeypatch.setattr(topic_deletion, "PART_RECORDS_MAX", 1)
    deleted = view.find(DeletedTopic, deleted_topic_key(topic_id))
    assert (deleted.is_final, deleted.partitions_left) == (True, 2)
    again_ms = await Turns(cluster).next()
    assert again_ms is not None
    assert view.find(DeletedTopic, deleted_topic_key(topic_id)).partitions_left == 0
    assert [*view.all(Log), *view.all(ManifestPointer)] == []
    assert segments
    assert segments <= set(files_in(store_directory))
    assert await Turns(cluster).next() is None
    assert files_in(store_directory) == [Path(owner_key(0)).name]


@pytest.mark.parametrize("lock_mode", ["none", "governance"])
async def test_what_the_deletion_of_a_topic_with_many_partitions_asks_of_the_store(
    cluster: Cluster, store_directory: Path, monkeypatch: pytest.MonkeyPatch, lock_mode: str
) -> None:
    """Requests are by the thousand objects, not by the partition; only where locks are used each object is asked for once."""
    configs = {"stratalog.tier.lock.mode": lock_mode, "stratalog.tier.lock.ms": "10000"}
    objects = await final_topic_with_history(cluster, store_directory, 1000, configs)
    sizes, delete_objects = [], cluster.store.delete

    async def counting(keys: Sequence[str]) -> None:
        sizes.append(len(keys))
        await delete_objects(keys)

    monkeypatch.setattr(cluster.store, "delete", counting)
    turns = Turns(cluster)
    assert await turns.next() is None
    assert files_in(store_directory) == [Path(owner_key(0)).name]
    count = cluster.store.count
    # Before each request the worker asks whether another cluster has taken the bucket over.
    claims, asked = len([size for size in sizes if size]), objects if lock_mode != "none" else 0
    assert sum(sizes) == objects + 2, "the descriptor and the marker too"
    assert len(sizes) <= objects / 200 + 10
    assert count("head") <= asked + claims
    assert count("list") + count("get") <= 20


async def test_a_late_marker_is_looked_for_once_for_all_partitions(cluster: Cluster) -> None:
    """Each partition's sweep asks. The next one searches again after a failure, and once half an interval is over."""
    clock = SetClock()
    markers = LateMarkers(ports_of(cluster, clock, sweep_interval_ms=10_000))
    key = deletion_marker_key(cluster.topic.topic_id)
    restored, view, store = restored_topic_key(cluster.topic.topic_id), cluster.metadata.view, cluster.store

    async def sweep() -> None:
        for _ in range(cluster.topic.partition_count):
            await markers.find(cluster.topic, ())

    await sweep()
    assert store.calls == [("get", key)]
    store.before = lambda name, key: Unavailable("no answer")
    clock.seconds += 5
    with pytest.raises(Unavailable):
        await sweep()
    store.before = lambda name, key: None
    await store.put(key, [encode_descriptor(DeletionMarker(topic_id=cluster.topic.topic_id, deleted_at_ms=1))])
    assert view.get(restored) is None
    await sweep()
    assert view.get(restored) is not None
    assert store.count("get") == 3
