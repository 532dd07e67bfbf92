"""Topics that an earlier owner of the bucket deleted: the next owner, whose metadata never had them, collects them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from support.embedded_quorum import embedded_quorum
from unit.tiering.worker.test_deleted_topics import restore

from stratalog_core.errors import Conflict, Invalid, NotFound, Refused, StratalogError
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock
from stratalog_metadata.client.topic_deletion import delete_topic
from stratalog_metadata.records import CLUSTER_KEY, DeletedTopic, Partition, restored_topic_key, topic_key
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.attach.detachment import detach
from stratalog_tiering.cold.archive import deleted_topics, live_topics, read_owner, readable_topics
from stratalog_tiering.cold.bucket_scrub import BucketScrub
from stratalog_tiering.cold.lease import HeldLease
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.deletion_markers import deletion_marker, earlier_deletion, is_of_earlier_owner
from stratalog_tiering.core.garbage import DELETED_TOPIC, EARLIER_DELETION
from stratalog_tiering.format.descriptor import DeletionMarker, OwnerDescriptor, decode_descriptor, encode_descriptor
from stratalog_tiering.format.object_keys import (
    LEASES_PREFIX,
    OWNERS_PREFIX,
    deletion_marker_key,
    topic_prefix,
    version_key,
)
from stratalog_tiering.maintenance.earlier_deletions import confirm_deletion, earlier_deletions, learn_earlier_deletions
from stratalog_tiering.offload.locks import KnownLocks
from stratalog_tiering.offload.ownership import cluster_id_in, take_over
from stratalog_tiering.offload.ports import WorkerPorts, worker_ports
from stratalog_tiering.offload.topic_descriptors import describe_topic
from stratalog_tiering.store import Upload
from stratalog_tiering.worker import session
from stratalog_tiering.worker.collection import CollectorPorts, Found, find_all
from stratalog_tiering.worker.leases import BUCKET_LEASE

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]
HOUR_MS = 3_600_000


async def hide_topic_with_history(cluster: Cluster, batches: list[bytes], restorable_ms: int) -> None:
    """Offload records, delete their topic, and end when the bucket says so and the worker has ended."""
    worker = await cluster.start_worker()
    await cluster.add_ledger(batches, 0)
    await cluster.until(lambda: not cluster.log().ledgers)
    view = cluster.metadata.view
    stored = view.get(topic_key(cluster.topic.name))
    await cluster.metadata.propose(
        delete_topic(view, stored.record, stored.version, SystemClock().wall_ms(), restorable_ms)
    )  # fmt: skip
    async with asyncio.timeout(60):
        while deletion_marker_key(cluster.topic.topic_id) not in await keys_in(cluster):  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.02)
    await worker.close()


async def keys_in(cluster: Cluster) -> set[str]:
    return {info.key async for info in cluster.store.list("")}


async def owner_of(cluster: Cluster) -> OwnerDescriptor:
    found = await read_owner(cluster.store)
    assert found is not None
    return found


@asynccontextmanager
async def next_owner(old: Cluster, directory: Path) -> AsyncIterator[Cluster]:
    """A cluster with empty metadata that has taken the bucket of ``old`` over."""
    transport = TcpTransport()
    async with embedded_quorum(directory, transport) as quorum:
        made = type(old)(quorum.client, old.store, old.topic, old.background)
        await made.until(lambda: quorum.client.view.get(CLUSTER_KEY) is not None)
        await take_over(old.store, cluster_id_in(quorum.client), SystemClock().wall_ms())
        yield made
        await made.close()
    await transport.close()


def ports_of(cluster: Cluster) -> WorkerPorts:
    return worker_ports(
        TieringSettings(worker_id="worker-1"), cluster.metadata, cluster.store, cluster.ledgers, SystemClock(),
        random.Random(1), cluster.background,
    )  # fmt: skip


async def found(cluster: Cluster, later_ms: int) -> list[Found]:
    store = cluster.store
    ports = CollectorPorts(
        metadata=cluster.metadata, store=store, source=ManifestSource(store), locks=KnownLocks(store)
    )  # fmt: skip
    return await find_all(ports, [], HOUR_MS, SystemClock().wall_ms() + later_ms)


async def test_nothing_is_left_of_a_topic_that_an_earlier_owner_deleted(
    cluster: Cluster, make_batches: Batches, tmp_path: Path
) -> None:
    await hide_topic_with_history(cluster, make_batches(0, [3]), 500)
    async with next_owner(cluster, tmp_path / "new") as new:
        await new.start_worker("new-worker", grace_ms=0)
        async with asyncio.timeout(60):
            while not all(key.startswith(OWNERS_PREFIX) for key in await keys_in(cluster)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await new.until(lambda: not [*new.metadata.view.all(DeletedTopic)])


@pytest.mark.parametrize("failure", [Refused("it is not allowed"), Invalid("the store does not offer the request")])
async def test_nothing_else_waits_for_uploads_that_cannot_be_listed_and_leases_that_cannot_be_deleted(
    cluster: Cluster, make_batches: Batches, tmp_path: Path, store_directory: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, failure: StratalogError,
) -> None:  # fmt: skip
    async def fail() -> AsyncIterator[Upload]:
        raise failure
        yield

    await hide_topic_with_history(cluster, make_batches(0, [3]), HOUR_MS)
    monkeypatch.setattr(cluster.store, "list_uploads", fail)
    for number in range(3):
        await HeldLease(cluster.store, SystemClock(), number, "audit", [], HOUR_MS).acquire()
    kept, ended, in_force = [key async for key in cluster.store.list_keys(LEASES_PREFIX)]
    for key in (kept, ended):
        os.utime(store_directory / key, times=(0, 0))
    cluster.store.held = lambda key: key == kept
    async with next_owner(cluster, tmp_path / "new") as new:
        await new.start_worker("new-worker")
        await new.until(lambda: bool([*new.metadata.view.all(DeletedTopic)]), 5)
    assert [key async for key in cluster.store.list_keys(LEASES_PREFIX)] == [kept, in_force]
    assert f"stale uploads are not aborted: {failure}" in caplog.text
    assert "readers' leases that have ended are not deleted: held" in caplog.text


async def test_another_owner_of_the_bucket_ends_the_work_on_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no refusal of one of the tasks: the others belong to the other owner, too."""
    asked = list[str]()

    async def uploads() -> AsyncIterator[Upload]:
        asked.append("uploads")
        await take_over(cluster.store, "another", SystemClock().wall_ms())
        return
        yield

    async def learn(*ignored: object) -> None:
        asked.append("deletions")

    monkeypatch.setattr(cluster.store, "list_uploads", uploads)
    monkeypatch.setattr(session, "learn_earlier_deletions", learn)
    await cluster.start_worker()
    async with asyncio.timeout(30):
        while f"{BUCKET_LEASE}: Invalid: " not in caplog.text:  # noqa: ASYNC110 - the log tells nobody
            await asyncio.sleep(0.01)
    assert asked == ["uploads"]


async def test_it_is_listed_with_its_date_and_waits_for_all_its_periods(
    cluster: Cluster, make_batches: Batches, tmp_path: Path
) -> None:
    await hide_topic_with_history(cluster, make_batches(0, [3]), 5 * HOUR_MS)
    marker_ms = (await cluster.store.head(deletion_marker_key(cluster.topic.topic_id))).last_modified_ms
    async with next_owner(cluster, tmp_path / "new") as new:
        (unrecorded,) = await found(new, 1000 * HOUR_MS)
        assert (unrecorded.topic, unrecorded.due, unrecorded.refused) == (cluster.topic.name, (), "")
        assert {each.reason for each in unrecorded.waiting} == {EARLIER_DELETION}
        await learn_earlier_deletions(ports_of(new), ())
        (deleted,) = new.metadata.view.all(DeletedTopic)
        assert deleted.is_final
        assert deleted.deleted_at_ms >= marker_ms + 5 * HOUR_MS
        assert [each.due for each in await found(new, 5 * HOUR_MS)] == [()], "the grace period has just begun"
        (due,) = await found(new, 7 * HOUR_MS)
        assert due.waiting == ()
        assert {each.reason for each in due.due} == {DELETED_TOPIC}
        assert {each.key for each in due.due} == {each.key for each in unrecorded.waiting}
        await learn_earlier_deletions(ports_of(new), ())
        assert [*new.metadata.view.all(DeletedTopic)] == [deleted]


async def test_history_that_went_on_after_the_marker_is_left_to_the_operator(
    cluster: Cluster, make_batches: Batches, tmp_path: Path
) -> None:
    """The earlier owner may have restored the topic just before it was lost, or had another one attached to it."""
    await hide_topic_with_history(cluster, make_batches(0, [3]), 0)
    marker_ms = (await cluster.store.head(deletion_marker_key(cluster.topic.topic_id))).last_modified_ms
    committed, newest_ms = version_key(cluster.topic.topic_id, 0, 999), 0
    async with asyncio.timeout(60):
        while newest_ms <= marker_ms:  # stores may keep whole seconds
            await cluster.store.put(committed, [b"a manifest"], if_absent=False)
            newest_ms = (await cluster.store.head(committed)).last_modified_ms
    async with next_owner(cluster, tmp_path / "new") as new:
        await learn_earlier_deletions(ports_of(new), ())
        assert [*new.metadata.view.all(DeletedTopic)] == []
        (refused,) = await found(new, 1000 * HOUR_MS)
        assert (refused.topic, refused.due, refused.waiting) == (cluster.topic.name, (), ())
        assert "history went on after its deletion" in refused.refused
        owner = await owner_of(new)
        with pytest.raises(NotFound, match="waits for a decision"):
            await confirm_deletion(new.store, new.metadata, owner, UUID(int=99), 1)
        await asyncio.sleep(0.01)  # no store can tell two writes of one millisecond apart
        later_ms = SystemClock().wall_ms() + HOUR_MS
        await confirm_deletion(new.store, new.metadata, owner, cluster.topic.topic_id, later_ms)
        await learn_earlier_deletions(ports_of(new), ())
        (deleted,) = new.metadata.view.all(DeletedTopic)
        assert deleted.deleted_at_ms == later_ms, "its periods begin again"


async def test_a_marker_that_is_written_after_its_topic_was_restored_and_detached_deletes_nothing(
    cluster: Cluster, make_batches: Batches, tmp_path: Path
) -> None:
    """A write that got no answer takes effect late. The bucket's next owner keeps the topic, and can restore it."""
    await hide_topic_with_history(cluster, make_batches(0, [3]), HOUR_MS)
    key, topic_id = deletion_marker_key(cluster.topic.topic_id), cluster.topic.topic_id
    late = await cluster.store.get(key)
    await restore(cluster, "flights")
    await cluster.start_worker("worker-2")
    await cluster.until(lambda: cluster.metadata.view.get(restored_topic_key(topic_id)) is None)
    await detach(cluster.metadata, cluster.store, SystemClock(), cluster.topic, 10)
    await cluster.store.put(key, [late])
    assert [topic.topic_id for topic in await live_topics(cluster.store)] == [topic_id]
    assert await deleted_topics(cluster.store, await readable_topics(cluster.store)) == []
    inventory = await BucketScrub(cluster.store, cluster.background, before_ms=0).inventory()
    assert [topic.topic_id for topic in inventory.topics] == [topic_id]
    async with next_owner(cluster, tmp_path / "new") as new:
        await learn_earlier_deletions(ports_of(new), ())
        assert [*new.metadata.view.all(DeletedTopic)] == []
        assert await found(new, 1000 * HOUR_MS) == []
        # Its worker describes the topic once it is restored, before a sweep removes the marker.
        await describe_topic(new.store, msgspec.structs.replace(cluster.topic, configs={"retention.ms": "1"}))
        assert [topic.configs for topic in await live_topics(new.store)] == [{"retention.ms": "1"}]
        # A deletion that comes later counts.
        later = msgspec.structs.replace(decode_descriptor(late, DeletionMarker, key), deletion_version=2**40)
        await new.store.put(key, [encode_descriptor(later)], if_absent=False)
        assert await live_topics(new.store) == []
        await learn_earlier_deletions(ports_of(new), ())
        assert [deleted.topic_id for deleted in new.metadata.view.all(DeletedTopic)] == [topic_id]


async def test_a_marker_that_cannot_be_read_deletes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    async with next_owner(cluster, tmp_path / "other") as earlier:
        await earlier.store.put(deletion_marker_key(cluster.topic.topic_id), [b"{"])
        async with next_owner(cluster, tmp_path / "new") as new:
            await learn_earlier_deletions(ports_of(new), ())
            assert [*new.metadata.view.all(DeletedTopic)] == []
            (refused,) = await found(new, 1000 * HOUR_MS)
            assert "is not a DeletionMarker" in refused.refused


async def test_a_topic_whose_descriptor_cannot_be_read_is_not_deleted(cluster: Cluster, tmp_path: Path) -> None:
    """The descriptor may say that the topic was restored and detached, so that the marker does not count."""
    deleted = DeletedTopic(topic_id=cluster.topic.topic_id, name="flights", deleted_at_ms=1)
    async with next_owner(cluster, tmp_path / "earlier"), next_owner(cluster, tmp_path / "new") as new:
        await describe_topic(new.store, cluster.topic)
        (key,) = [info.key async for info in new.store.list(topic_prefix(deleted.topic_id))]
        await new.store.put(key, [b"{"], if_absent=False)
        await new.store.put(
            deletion_marker_key(deleted.topic_id), [encode_descriptor(deletion_marker(deleted, 2, "another"))]
        )  # fmt: skip
        await learn_earlier_deletions(ports_of(new), ())
        assert [*new.metadata.view.all(DeletedTopic)] == []
        (refused,) = await found(new, 1000 * HOUR_MS)
        assert "is not a TopicDescriptor" in refused.refused


async def test_a_marker_that_the_store_refuses_to_read_waits_for_no_decision(
    cluster: Cluster, make_batches: Batches, tmp_path: Path
) -> None:
    """As with credentials that expire meanwhile. Neither is the topic recorded under its id instead of its name."""
    await hide_topic_with_history(cluster, make_batches(0, [3]), 500)
    async with next_owner(cluster, tmp_path / "new") as new:
        owner, store = await owner_of(new), new.store
        store.calls.clear()
        (deletion,) = await earlier_deletions(store, new.metadata, owner)
        assert (deletion.deleted.name, deletion.refused) == ("flights", "")
        for refused in range(len(store.calls)):
            store.calls.clear()
            store.before = lambda name, key, n=refused: Refused("expired") if len(store.calls) == n + 1 else None
            with pytest.raises(Refused, match="expired"):
                await earlier_deletions(store, new.metadata, owner)
        store.before = lambda name, key: None


async def test_an_owner_whose_metadata_is_an_old_copy_does_not_judge_its_own_markers(
    cluster: Cluster, tmp_path: Path
) -> None:  # fmt: skip
    """Such metadata does not know topics that were created since, nor that they were restored after their deletion."""
    async with next_owner(cluster, tmp_path / "earlier"), next_owner(cluster, tmp_path / "new") as new:
        cluster_id = cluster_id_in(new.metadata)
        deleted = DeletedTopic(topic_id=cluster.topic.topic_id, name="flights", deleted_at_ms=1)
        marker = deletion_marker(deleted, 2, cluster_id)
        await new.store.put(deletion_marker_key(deleted.topic_id), [encode_descriptor(marker)])
        owner = await owner_of(new)
        assert await earlier_deletions(new.store, new.metadata, owner) == []


async def test_a_topic_that_the_cluster_has_is_not_recorded_as_deleted(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if it becomes known between the look and the command."""
    async with next_owner(cluster, tmp_path / "earlier"), next_owner(cluster, tmp_path / "new") as new:
        deleted = DeletedTopic(topic_id=cluster.topic.topic_id, name="flights", deleted_at_ms=1)
        await new.store.put(
            deletion_marker_key(deleted.topic_id), [encode_descriptor(deletion_marker(deleted, 2, "another"))]
        )  # fmt: skip
        owner, topic = await owner_of(new), new.topic
        assert [each.deleted.topic_id for each in await earlier_deletions(new.store, new.metadata, owner)] == [topic.topic_id]
        refresh = new.metadata.refresh

        async def become_known_after(timeout_s: float) -> None:
            await refresh(timeout_s)
            partition = Partition(topic_id=topic.topic_id, index=0)
            await new.metadata.propose(Command(updates=(Put(record=partition),)))

        monkeypatch.setattr(new.metadata, "refresh", become_known_after)
        with pytest.raises(Conflict):
            await learn_earlier_deletions(ports_of(new), ())
        monkeypatch.undo()
        assert [*new.metadata.view.all(DeletedTopic)] == []
        await new.metadata.propose(Command(updates=(Put(record=topic),)))
        assert await earlier_deletions(new.store, new.metadata, owner) == []


def marker_of(cluster_id: str, deleted_at_ms: int) -> DeletionMarker:
    return DeletionMarker(
        topic_id=UUID(int=1), deleted_at_ms=deleted_at_ms, cluster_id=cluster_id, restorable_ms=100
    )  # fmt: skip


def test_whose_deletion_it_was() -> None:
    owner = OwnerDescriptor(cluster_id="new", number=1, taken_at_ms=1000)
    assert is_of_earlier_owner(marker_of("old", 2000), owner), "its worker's write was late, or its clock is ahead"
    assert not is_of_earlier_owner(marker_of("new", 500), owner)
    assert is_of_earlier_owner(marker_of("", 999), owner)
    assert not is_of_earlier_owner(marker_of("", 1000), owner), "it may be the present owner's"


def test_the_grace_period_begins_when_nobody_can_restore_the_topic() -> None:
    owner = OwnerDescriptor(cluster_id="new", number=1, taken_at_ms=1000)
    for deleted_at_ms, written_ms, begins_ms in ((950, 940, 1050), (800, 980, 1080), (100, 100, 1000)):
        deleted = earlier_deletion(marker_of("old", deleted_at_ms), written_ms, "flights", owner)
        assert (deleted.deleted_at_ms, deleted.is_final, deleted.partitions_left) == (begins_ms, True, 0)
