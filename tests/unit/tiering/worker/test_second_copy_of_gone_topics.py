"""The second copy of topics that left the cluster: detached ones are whole, deleted ones go once, and completely."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from support.directory_store import object_contents
from unit.tiering.worker.test_copying import (
    DAY_MS,
    MovedClock,
    counters,
    findings,
    is_copied,
    segments_of,
    until,
)
from unit.tiering.worker.test_deleted_topics import delete, restore
from unit.tiering.worker.test_worker import Batches, Cluster

from stratalog_core.errors import Refused, Unavailable
from stratalog_core.system import SystemClock
from stratalog_metadata.records import DeletedTopic, ManifestPointer, deleted_topic_key
from stratalog_tiering.attach.detachment import detach
from stratalog_tiering.cold.archive import Archive, live_topics
from stratalog_tiering.copies.deletions import apply_deletions
from stratalog_tiering.copies.detached import copy_detached_topics
from stratalog_tiering.format.descriptor import DeletionMarker, Detachment, TopicDescriptor, encode_descriptor
from stratalog_tiering.format.object_keys import deletion_marker_key, marker_key, owner_key, segment_key, topic_key
from stratalog_tiering.offload.ownership import take_over
from stratalog_tiering.store import ObjectStore, Upload
from stratalog_tiering.store.base import ObjectInfo
from stratalog_tiering.worker import copying


async def away(*_: Any, **__: Any) -> None:
    raise Unavailable("the second store does not answer")


def is_forgotten(cluster: Cluster) -> bool:
    return cluster.metadata.view.find(DeletedTopic, deleted_topic_key(cluster.topic.topic_id)) is None


async def detach_after_another_version(cluster: Cluster, make_batches: Batches) -> ManifestPointer:
    """Commit offsets 10 to 20 and detach the topic; return its last version."""
    await cluster.add_ledger(make_batches(10, [10]), 10)
    await cluster.until(lambda: cluster.pointer().end_offset == 20 and not cluster.log().ledgers)
    last: ManifestPointer = cluster.pointer()
    await detach(cluster.metadata, cluster.store, SystemClock(), cluster.topic, 10)
    return last


async def until_last_version(second: ObjectStore, last: ManifestPointer) -> None:
    """Wait until ``last`` is the only topic's newest version in the second copy."""
    archive = Archive(second)
    async with asyncio.timeout(60):
        while await archive.pointer((await archive.topics())[0], 0) != last:  # noqa: ASYNC110 - stores tell nobody
            await asyncio.sleep(0.02)


async def test_what_was_committed_just_before_a_topic_was_detached_is_copied(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await cluster.start_worker(second=second, retry_ms_max=100)
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await until(lambda: is_copied(cluster, second_directory))
    with monkeypatch.context() as patched:
        patched.setattr(second, "put", away)
        last = await detach_after_another_version(cluster, make_batches)
        await until(lambda: counters(worker).failures > 1)
    await until_last_version(second, last)
    assert await Archive(second).topics() == await live_topics(cluster.store)
    assert await findings(second, cluster.background) == []


async def test_a_detached_topic_is_copied_although_a_listing_does_not_show_its_last_version_at_first(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, put = list[int](), second.put

    async def counted(*args: Any) -> int:
        passes.append(await copy_detached_topics(*args))
        return passes[-1]

    monkeypatch.setattr(copying, "copy_detached_topics", counted)
    worker = await cluster.start_worker(second=second, sweep_interval_ms=50, retry_ms_max=100)
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await until(lambda: is_copied(cluster, second_directory))
    with monkeypatch.context() as patched:
        patched.setattr(second, "put", away)
        last = await detach_after_another_version(cluster, make_batches)
        await until(lambda: counters(worker).failures > 1)
        listed = cluster.store.list

        async def lagging(prefix: str) -> AsyncIterator[ObjectInfo]:
            async for info in listed(prefix):
                if info.key != marker_key(last.object_key):
                    yield info

        patched.setattr(cluster.store, "list", lagging)
        patched.setattr(second, "put", put)
        before = len(passes)
        await until(lambda: len(passes) > before)
    await until_last_version(second, last)


async def test_a_topic_that_cannot_be_read_does_not_keep_others_from_the_copy(
    cluster: Cluster, second: ObjectStore, second_directory: Path
) -> None:
    """Its altered descriptor looks like one of a later release."""
    first, other = (
        TopicDescriptor(
            topic_id=UUID(int=number), name=f"t{number}", partition_count=1, replication_factor=1,
            detached=Detachment(cluster_id="c", topic_version=1),
        )
        for number in (1, 2)
    )  # fmt: skip
    altered = encode_descriptor(first).replace(b'"format_version": 1', b'"format_version": 9')
    await cluster.store.put(topic_key(first.topic_id, 1), [altered])
    await cluster.store.put(topic_key(other.topic_id, 1), [encode_descriptor(other)])
    await cluster.start_worker(second=second, sweep_interval_ms=50, retry_ms_max=100)
    await until((second_directory / topic_key(other.topic_id, 1)).exists)
    assert not (second_directory / topic_key(first.topic_id, 1)).exists()


async def test_the_grace_period_of_a_second_deletion_begins_with_it(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second store is away while the topic is restored, so that it has the marker of the first deletion."""
    passes = list[None]()

    async def counted(*args: Any) -> None:
        await apply_deletions(*args)
        passes.append(None)

    monkeypatch.setattr(copying, "apply_deletions", counted)
    clock = MovedClock()
    await cluster.add_ledger(make_batches(0, [10]), 0)
    worker = await cluster.start_worker(
        second=second, clock=clock, grace_ms=0, copy_grace_ms=DAY_MS, sweep_interval_ms=50, retry_ms_max=50
    )
    await until(lambda: is_copied(cluster, second_directory))
    segments = segments_of(second_directory)
    marker = second_directory / deletion_marker_key(cluster.topic.topic_id)
    await delete(cluster, 10 * DAY_MS)
    await until(marker.exists)
    with monkeypatch.context() as patched:
        patched.setattr(second, "delete", away)
        await restore(cluster, "flights")
        failures = counters(worker).failures
        await until(lambda: counters(worker).failures > failures)
        clock.ahead_ms = 2 * DAY_MS
        await delete(cluster, 0, clock.wall_ms())
    await until(lambda: is_forgotten(cluster))
    before = len(passes)
    await until(lambda: len(passes) > before + 1)
    assert segments_of(second_directory) == segments
    clock.ahead_ms = 6 * DAY_MS
    await until(lambda: [*object_contents(second_directory)] == [owner_key(0)])


async def test_what_is_written_late_of_a_deleted_topic_leaves_the_copy_too(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path
) -> None:
    """A write of a copy that got no answer takes effect after the topic's objects were deleted."""
    clock = MovedClock()
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await cluster.start_worker(second=second, clock=clock, grace_ms=0, copy_grace_ms=2 * DAY_MS, sweep_interval_ms=50)
    await until(lambda: is_copied(cluster, second_directory))
    marker = second_directory / deletion_marker_key(cluster.topic.topic_id)
    await delete(cluster, 0)
    await until(lambda: is_forgotten(cluster))
    clock.ahead_ms = 3 * DAY_MS
    await until(lambda: not segments_of(second_directory))
    assert marker.exists()
    await second.put(segment_key(cluster.topic.topic_id, 0, 0, 1, 2), [b"late"])
    assert await live_topics(second) == []
    clock.ahead_ms = 5 * DAY_MS
    await until(lambda: [*object_contents(second_directory)] == [owner_key(0)])


LATER = encode_descriptor(DeletionMarker(topic_id=UUID(int=1), deleted_at_ms=1, format_version=9))


@pytest.mark.parametrize("damaged", [b"{", LATER])
async def test_a_marker_that_cannot_be_read_keeps_no_other_topic_in_the_copy(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path, damaged: bytes
) -> None:
    clock = MovedClock()
    await cluster.add_ledger(make_batches(0, [10]), 0)
    worker = await cluster.start_worker(second=second, clock=clock, grace_ms=0, copy_grace_ms=DAY_MS, retry_ms_max=100)
    await until(lambda: is_copied(cluster, second_directory))
    await delete(cluster, 0)
    await until(lambda: is_forgotten(cluster))
    unreadable = deletion_marker_key(UUID(int=1))
    await second.put(unreadable, [damaged])
    clock.ahead_ms = 3 * DAY_MS
    await until(lambda: [*object_contents(second_directory)] == [owner_key(0), unreadable])
    before = counters(worker).failures
    await until(lambda: counters(worker).failures > before)


async def test_a_second_store_that_refuses_to_list_uploads_costs_one_failure_a_day(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    async def refused() -> AsyncIterator[Upload]:
        asked.append(asyncio.get_running_loop().time())
        raise Refused("allow s3:ListBucketMultipartUploads")
        yield

    monkeypatch.setattr(second, "list_uploads", refused)
    worker = await cluster.start_worker(second=second, retry_ms_max=10, sweep_interval_ms=DAY_MS)
    await until(lambda: bool(asked))
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await until(lambda: is_copied(cluster, second_directory))
    await asyncio.sleep(0.3)
    assert (len(asked), counters(worker).failures) == (1, 1)


async def test_no_topic_is_hidden_in_a_second_copy_that_another_cluster_has_taken_over(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path
) -> None:
    """It has restored the topic from there, and goes on with it."""
    await cluster.add_ledger(make_batches(0, [10]), 0)
    worker = await cluster.start_worker(second=second, grace_ms=0)
    await until(lambda: is_copied(cluster, second_directory))
    await worker.close()
    await take_over(second, "another cluster", SystemClock().wall_ms())
    worker = await cluster.start_worker("worker-2", second=second, grace_ms=0)
    await delete(cluster, 0)
    await until(lambda: is_forgotten(cluster))
    assert [topic.name for topic in await live_topics(second)] == ["flights"]
