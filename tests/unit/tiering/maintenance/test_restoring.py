"""A bucket is restored into a new cluster: what returns, who may write and delete then, and what is refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.embedded_quorum import embedded_quorum

from stratalog_core.errors import Conflict, Invalid, NotFound
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock
from stratalog_metadata.client.topic_deletion import delete_topic
from stratalog_metadata.records import (
    CLUSTER_KEY,
    PRODUCER_IDS,
    Counter,
    Log,
    Partition,
    Topic,
    counter_key,
    log_key,
    partition_key,
    topic_key,
)
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.archive import live_topics, read_owner
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.restoring import EPOCH_GAP, PRODUCER_IDS_GAP, restore_epoch, restored_topic
from stratalog_tiering.format import object_keys
from stratalog_tiering.format.descriptor import OwnerDescriptor, TopicDescriptor, encode_descriptor
from stratalog_tiering.format.manifest import empty_manifest, pointer_to
from stratalog_tiering.format.object_keys import manifest_key, owner_key, segment_key
from stratalog_tiering.maintenance.cutting import CutPorts
from stratalog_tiering.maintenance.restoring import (
    read_history,
    restore_history,
    restore_topics,
    skip_producer_ids,
    wanted_topics,
)
from stratalog_tiering.offload.ownership import COMMITS_SHARE_S, cluster_id_in, take_over
from stratalog_tiering.offload.ports import worker_ports
from stratalog_tiering.offload.version_objects import ensure_in_store

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]


async def offload(cluster: Cluster, batches: list[bytes], base_offset: int, end_offset: int, **ledger: int) -> None:
    await cluster.add_ledger(batches, base_offset, **ledger)
    await cluster.until(lambda: (p := cluster.pointer()) is not None and p.end_offset == end_offset)
    # A hot copy goes after the commit marker was written.
    await cluster.until(lambda: not cluster.log().ledgers)


@asynccontextmanager
async def new_cluster(old: Cluster, directory: Path) -> AsyncIterator[Cluster]:
    """A cluster with empty metadata over the bucket of ``old``."""
    transport = TcpTransport()
    async with embedded_quorum(directory, transport) as quorum:
        made = type(old)(quorum.client, old.store, old.topic, old.background)
        await made.until(lambda: quorum.client.view.get(CLUSTER_KEY) is not None)
        yield made
        await made.close()
    await transport.close()


def cut_ports(cluster: Cluster) -> CutPorts:
    return CutPorts(
        store=cluster.store, clock=SystemClock(), background=cluster.background, random_id=lambda: 1,
        cluster_id=cluster_id_in(cluster.metadata),
    )  # fmt: skip


async def restore_all(cluster: Cluster) -> int:
    """Take the bucket over and restore all topics; returns the owner's number."""
    owner = await take_over(cluster.store, cluster_id_in(cluster.metadata), SystemClock().wall_ms())
    histories = await read_history(cluster.store, await wanted_topics(cluster.store, ()))
    for history in histories:
        assert await restore_history(cluster.metadata, history, history.descriptor.name, None, owner.number)
    number: int = owner.number
    return number


async def test_a_new_cluster_continues_the_history_of_the_bucket(
    cluster: Cluster, make_batches: Batches, tmp_path: Path
) -> None:
    await cluster.start_worker()
    await offload(cluster, make_batches(0, [3], epoch=7), 0, 3, leader_epoch=7)
    await cluster.close()
    async with new_cluster(cluster, tmp_path / "new") as new:
        assert await restore_all(new) == 1
        view = new.metadata.view
        await new.until(lambda: new.pointer() is not None)
        assert new.pointer() == cluster.pointer()
        assert view.find(Topic, topic_key("flights")) == cluster.topic
        assert view.find(Log, log_key(cluster.topic.topic_id, 0)).ledgers == ()
        partition = view.find(Partition, partition_key(cluster.topic.topic_id, 0))
        assert partition.leader_epoch == 2 * EPOCH_GAP, "above all epochs that the bucket's first owner can have used"
        await new.start_worker("new-worker")
        await offload(new, make_batches(3, [2], epoch=partition.leader_epoch), 3, 5, leader_epoch=partition.leader_epoch)
        assert new.last_error() == ""


async def test_the_previous_owners_worker_neither_commits_nor_deletes(
    cluster: Cluster, make_batches: Batches, tmp_path: Path
) -> None:
    await cluster.start_worker(grace_ms=0, retention_interval_ms=20)
    await offload(cluster, make_batches(0, [3]), 0, 3)
    async with new_cluster(cluster, tmp_path / "new") as new:
        await restore_all(new)
        orphan = segment_key(cluster.topic.topic_id, 0, 3, 9, 0xBAD)
        await cluster.store.put(orphan, [b"an object of the new owner"])
        await cluster.add_ledger(make_batches(3, [3]), 3)
        await cluster.until(lambda: "belongs to cluster" in cluster.last_error())
        assert cluster.pointer().end_offset == 3
        assert len(cluster.log().ledgers) == 1, "the only copy of the new records stays"
        assert (await cluster.store.head(orphan)).key == orphan


async def test_nothing_is_deleted_for_a_grace_period_after_a_takeover(
    cluster: Cluster, make_batches: Batches, tmp_path: Path
) -> None:
    await cluster.start_worker()
    await offload(cluster, make_batches(0, [3]), 0, 3)
    await cluster.close()
    orphan = segment_key(cluster.topic.topic_id, 0, 3, 9, 0xBAD)
    await cluster.store.put(orphan, [b"left by the previous owner"])
    async with new_cluster(cluster, tmp_path / "new") as new:
        await restore_all(new)
        await new.metadata.refresh(60)
        worker = await new.start_worker(grace_ms=1_500)
        cluster.store.deleted.clear()
        owner = await read_owner(new.store)
        assert owner is not None
        await cluster.store.deleted.wait()
        assert SystemClock().wall_ms() >= owner.taken_at_ms + 1_500
        assert worker.metrics()


async def test_a_restore_can_be_repeated_and_refuses_a_name_that_is_taken(
    cluster: Cluster, make_batches: Batches, tmp_path: Path
) -> None:
    await cluster.start_worker()
    await offload(cluster, make_batches(0, [3]), 0, 3)
    await cluster.close()
    async with new_cluster(cluster, tmp_path / "new") as new:
        other = msgspec.structs.replace(cluster.topic, topic_id=UUID(int=0xBB))
        await new.metadata.propose(Command(updates=(Put(record=other),)))
        (history,) = await read_history(new.store, await wanted_topics(new.store, ["flights"]))
        with pytest.raises(Conflict, match="--as"):
            await restore_history(new.metadata, history, "flights", None, 1)
        assert await restore_history(new.metadata, history, "flights-2025", 1, 1)
        assert not await restore_history(new.metadata, history, "flights-2025", 1, 1)
        with pytest.raises(NotFound, match="contains no topic 'trains'; it contains flights"):
            await wanted_topics(new.store, ["trains"])


async def test_a_topic_that_appears_until_the_takeover_is_restored(
    cluster: Cluster, make_batches: Batches, tmp_path: Path
) -> None:
    """The previous cluster has described it since the first look of the restore."""
    await cluster.start_worker()
    await offload(cluster, make_batches(0, [3]), 0, 3)
    await cluster.close()
    late = TopicDescriptor(topic_id=UUID(int=0xCC), name="late", partition_count=1, replication_factor=1)
    path = Path(cluster.store.url.removeprefix("file://")) / object_keys.topic_key(late.topic_id, 1)

    def described(name: str, key: str) -> BaseException | None:
        if name == "put" and key == owner_key(1):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode_descriptor(late))
        return None

    cluster.store.before = described
    async with new_cluster(cluster, tmp_path / "new") as new:
        made = cut_ports(new)
        restored = await restore_topics(new.metadata, made, ())
        assert [(history.descriptor.name, done) for history, done in restored.topics] == [("flights", True), ("late", True)]


async def test_a_restore_is_refused_if_another_cluster_has_taken_the_bucket_over_since(
    cluster: Cluster, make_batches: Batches, tmp_path: Path
) -> None:
    await cluster.start_worker()
    await offload(cluster, make_batches(0, [3]), 0, 3)
    await cluster.close()
    path = Path(cluster.store.url.removeprefix("file://")) / owner_key(2)

    def taken_over(name: str, key: str) -> BaseException | None:
        if name == "list" and key.startswith("manifests/"):
            path.write_bytes(encode_descriptor(OwnerDescriptor(cluster_id="rival", number=2, taken_at_ms=3)))
        return None

    async with new_cluster(cluster, tmp_path / "new") as new:
        cluster.store.before = taken_over
        made = cut_ports(new)
        with pytest.raises(Conflict, match="another cluster has taken"):
            await restore_topics(new.metadata, made, ())
        assert [*new.metadata.view.all(Topic)] == []


async def test_the_previous_owner_does_not_hide_a_topic_that_was_restored(
    cluster: Cluster, make_batches: Batches, tmp_path: Path
) -> None:
    worker = await cluster.start_worker()
    await offload(cluster, make_batches(0, [3]), 0, 3)
    async with new_cluster(cluster, tmp_path / "new") as new:
        await restore_all(new)
        stored = cluster.metadata.view.get(topic_key("flights"))
        await cluster.metadata.propose(delete_topic(cluster.metadata.view, stored.record, stored.version, 1, 0))
        async with asyncio.timeout(60):
            while next(iter(worker.metrics())).failures == 0:  # noqa: ASYNC110 - a counter has no event
                await asyncio.sleep(0.05)
        assert [topic.name for topic in await live_topics(new.store)] == ["flights"]


async def test_the_previous_owner_marks_no_version_as_committed(cluster: Cluster) -> None:
    """It has restored its topic up to a point, and was taken over before the marker of the cut was written."""
    ports = worker_ports(
        TieringSettings(worker_id="worker-1"), cluster.metadata, cluster.store, cluster.ledgers, SystemClock(),
        random.Random(1), cluster.background,
    )  # fmt: skip
    await cluster.until(lambda: cluster.metadata.view.get(CLUSTER_KEY) is not None)
    await ports.bucket.ensure()
    await cluster.store.put(owner_key(1), [encode_descriptor(OwnerDescriptor(cluster_id="next", number=1, taken_at_ms=2))])
    cut = empty_manifest(cluster.topic.topic_id, "flights", 0, 12)
    key = manifest_key(cut.topic_id, 0, 12, 0xC)
    with pytest.raises(Invalid, match="belongs to cluster next"):
        await ensure_in_store(ports, pointer_to(cut, key, bytes(32)))
    assert [info.key async for info in cluster.store.list("manifests/")] == []


async def test_a_restore_that_is_repeated_waits_for_commits_of_the_previous_owner(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt before it ended just after it had taken the bucket over."""
    await store.put(owner_key(0), [encode_descriptor(OwnerDescriptor(cluster_id="first", number=0, taken_at_ms=1))])
    await store.put(owner_key(1), [encode_descriptor(OwnerDescriptor(cluster_id="mine", number=1, taken_at_ms=2))])
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def paused(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", paused)
    assert (await take_over(store, "mine", 3)).number == 1
    assert max(pauses, default=0.0) > COMMITS_SHARE_S, "a commit that shares an earlier look may still be under way"


async def test_one_of_two_clusters_that_take_a_bucket_over_at_once_is_refused(store: Any) -> None:
    await store.put(owner_key(0), [encode_descriptor(OwnerDescriptor(cluster_id="first", number=0, taken_at_ms=1))])
    rival = OwnerDescriptor(cluster_id="rival", number=1, taken_at_ms=2, previous_cluster_id="first")
    waiting = [rival]

    def overtake(name: str, key: str) -> BaseException | None:
        if name == "put" and key == owner_key(1) and waiting:
            path = Path(store.url.removeprefix("file://")) / owner_key(1)
            path.write_bytes(encode_descriptor(waiting.pop()))
        return None

    store.before = overtake
    with pytest.raises(Conflict, match="cluster rival has taken"):
        await take_over(store, "mine", 3)
    assert (await take_over(store, "rival", 4)).taken_at_ms == 2, "it is the owner already"
    assert (await take_over(store, "mine", 5)).number == 2


async def test_producer_ids_of_earlier_owners_are_not_allocated_again(cluster: Cluster) -> None:
    def counter() -> Counter:
        found = cluster.metadata.view.find(Counter, counter_key(PRODUCER_IDS))
        assert isinstance(found, Counter)
        return found

    await skip_producer_ids(cluster.metadata, 2)
    await cluster.metadata.refresh(60)
    assert counter().next_value == 2 * PRODUCER_IDS_GAP
    await skip_producer_ids(cluster.metadata, 1)
    await cluster.metadata.refresh(60)
    assert counter().next_value == 2 * PRODUCER_IDS_GAP


@given(st.integers(0, 3 * EPOCH_GAP), st.integers(1, 1000))
def test_a_restored_partition_begins_above_all_epochs_before(last_epoch: int, number: int) -> None:
    assert restore_epoch(last_epoch, number) > last_epoch
    assert restore_epoch(0, number + 1) >= restore_epoch(0, number) + EPOCH_GAP


def test_min_insync_replicas_is_lowered_to_the_factor() -> None:
    descriptor = TopicDescriptor(
        topic_id=UUID(int=1), name="t", partition_count=1, replication_factor=3,
        configs={"min.insync.replicas": "2", "retention.ms": "5"},
    )  # fmt: skip
    assert restored_topic(descriptor, "t", 1).configs == {"min.insync.replicas": "1", "retention.ms": "5"}
    assert restored_topic(descriptor, "t", None).configs == descriptor.configs
