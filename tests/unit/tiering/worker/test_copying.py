"""A worker keeps a second copy: complete, verified, swept after a grace period of its own, and never another cluster's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import S3Server
from support.directory_store import object_contents
from unit.tiering.worker.test_deleted_topics import delete, restore
from unit.tiering.worker.test_worker import Batches, Cluster, files_in

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Unavailable
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import DeletedTopic, Lease, Topic, deleted_topic_key, restored_topic_key, topic_key
from stratalog_metadata.state.commands import Command, Put, Requirement
from stratalog_metadata.state.commands import Delete as RecordDeletion
from stratalog_tiering.attach.detachment import detach
from stratalog_tiering.cold.archive import Archive, live_topics, read_owner
from stratalog_tiering.cold.bucket_scrub import BucketScrub
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.cold.segment_check import unlimited
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.copies.repair import RepairedFrom, Repairer, RepairSources
from stratalog_tiering.core.damage import Damage
from stratalog_tiering.format.descriptor import OwnerDescriptor, encode_descriptor
from stratalog_tiering.format.object_keys import deletion_marker_key, marker_key, owner_key
from stratalog_tiering.metrics import SecondCopyMetrics
from stratalog_tiering.store import ObjectStore, StoreWithCopy, open_store
from stratalog_tiering.worker.copying import DELETIONS_LEASE
from stratalog_tiering.worker.leases import WorkerLeases
from stratalog_tiering.worker.worker import TieringWorker

DAY_MS = 86_400_000


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - stores tell nobody
            await asyncio.sleep(0.02)


def counters(worker: TieringWorker) -> SecondCopyMetrics:
    return next(group for group in worker.metrics() if isinstance(group, SecondCopyMetrics))


def is_copied(cluster: Cluster, directory: Path) -> bool:
    """Whether the newest committed version is marked in the second copy."""
    pointer = cluster.pointer()
    return pointer is not None and (directory / marker_key(pointer.object_key)).exists()


async def is_in_bucket(bucket: ObjectStore, key: str) -> bool:
    return key in [info.key async for info in bucket.list(key)]


def segments_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("segments/*/*/*"))


async def findings(store: ObjectStore, background: ThreadBackground) -> list[str]:
    scrub = BucketScrub(store, background, before_ms=0)
    inventory = await scrub.inventory()
    reports = [await scrub.partition(topic, 0) for topic in inventory.topics]
    found = [*inventory.findings, *(each for report in reports for each in report.findings)]
    return [str(each) for each in [*found, *await scrub.owners(frozenset())]]


async def test_all_that_the_history_refers_to_is_copied(
    cluster: Cluster, make_batches: Batches, store_directory: Path, second: ObjectStore, second_directory: Path
) -> None:
    worker = await cluster.start_worker(second=second, segment_bytes=1)
    for base in range(0, 200, 10):
        await cluster.add_ledger(make_batches(base, [10]), base)
    await cluster.until(lambda: cluster.pointer() is not None and cluster.pointer().end_offset == 200)
    await until(lambda: is_copied(cluster, second_directory) and counters(worker).lag_partitions == 0)
    await worker.close()
    copied, first = object_contents(second_directory), object_contents(store_directory)
    assert {key: first[key] for key in copied} == copied
    assert {key for key in first if key.startswith("segments/")} >= {key for key in copied if key.startswith("segments/")}
    assert await findings(second, cluster.background) == []
    pointer = cluster.pointer()
    archive = Archive(second)
    assert await archive.pointer(await archive.topic("flights"), 0) == pointer
    reader = ColdReader(second, ColdReaderSettings(), SystemClock())
    read = b"".join((await reader.fetch(pointer, 0, 2**30, 60)).batches)
    await reader.close()
    assert read == b"".join(batch for base in range(0, 200, 10) for batch in make_batches(base, [10]))
    assert counters(worker).copied_bytes > 0


async def test_a_directory_is_copied_to_a_bucket_and_read_from_there(
    cluster: Cluster, make_batches: Batches, store_directory: Path, minio_server: S3Server, background: ThreadBackground
) -> None:
    url = minio_server.make_bucket("second-copy")
    bucket = open_store(url, background=background, clock=SystemClock(), random=random.Random(4))
    worker = await cluster.start_worker(second=bucket, segment_bytes=1, upload_part_bytes=5 * 1024 * 1024)
    large = bytes(build_batch([Record(offset=0, timestamp_ms=0, key=None, value=bytes(12 * 1024 * 1024))], leader_epoch=0))
    await cluster.add_ledger([large], 0)
    await cluster.add_ledger(make_batches(1, [9]), 1)
    await cluster.until(lambda: cluster.pointer() is not None and cluster.pointer().end_offset == 10)
    async with asyncio.timeout(60):
        while not await is_in_bucket(bucket, marker_key(cluster.pointer().object_key)):  # noqa: ASYNC110 - stores tell nobody
            await asyncio.sleep(0.05)
    await cluster.until(lambda: not cluster.pointer().content)
    await worker.close()
    pointer = cluster.pointer()
    assert await Archive(bucket).pointer(await Archive(bucket).topic("flights"), 0) == pointer
    for key in object_contents(store_directory):
        (store_directory / key).unlink()
    reader = ColdReader(StoreWithCopy(cluster.store, bucket, SystemClock()), ColdReaderSettings(), SystemClock())
    assert b"".join((await reader.fetch(pointer, 0, 2**30, 60)).batches) == b"".join([large, *make_batches(1, [9])])
    await reader.close()
    await bucket.close()


async def test_a_worker_that_starts_again_copies_only_what_is_new(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path
) -> None:
    await cluster.add_ledger(make_batches(0, [10]), 0)
    worker = await cluster.start_worker(second=second)
    await until(lambda: is_copied(cluster, second_directory))
    await worker.close()
    await cluster.add_ledger(make_batches(10, [10]), 10)
    again = await cluster.start_worker("worker-2", second=second)
    await until(lambda: is_copied(cluster, second_directory) and cluster.pointer().end_offset == 20)
    await until(lambda: counters(again).lag_partitions == 0)
    assert counters(again).objects_copied == 2, "one segment and one manifest"


@pytest.mark.parametrize("damage", [Damage.MANIFEST_ALTERED, Damage.MARKER_MISSING])
async def test_a_manifest_is_repaired_from_the_copy(
    cluster: Cluster, make_batches: Batches, store_directory: Path, second: ObjectStore, second_directory: Path, damage: Damage
) -> None:
    for base in (0, 10):
        await cluster.add_ledger(make_batches(base, [10]), base)
    worker = await cluster.start_worker(second=second, segment_bytes=1)
    await until(lambda: is_copied(cluster, second_directory) and cluster.pointer().end_offset == 20)
    await worker.close()
    path = store_directory / cluster.pointer().object_key
    content = path.read_bytes()
    if damage is Damage.MANIFEST_ALTERED:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        path.unlink()
    scrub = BucketScrub(cluster.store, cluster.background, before_ms=SystemClock().wall_ms() + DAY_MS)
    limits = CopyLimits(background=cluster.background, clock=SystemClock(), take=unlimited)
    pointers = {(cluster.topic.topic_id, 0): cluster.pointer()}
    repairer = Repairer(scrub, cluster.store, RepairSources(copy=second, has_metadata=True, pointers=pointers), limits)
    (topic,) = (await scrub.inventory()).topics
    report, made = await repairer.partition(topic, 0)
    assert damage in {found.kind for found in report.findings}
    assert RepairedFrom.COPY in {repair.source for (kind, _), repair in made.items() if kind is damage}
    assert path.read_bytes() == content
    assert (await scrub.partition(topic, 0)).findings == ()


async def two_segments(cluster: Cluster, make_batches: Batches, store_directory: Path) -> tuple[Path, Path]:
    """Offload two ledgers; return their segments' files."""
    for base in (0, 10):
        await cluster.add_ledger(make_batches(base, [10]), base)
    writer = await cluster.start_worker(segment_bytes=1)
    await cluster.until(lambda: cluster.pointer() is not None and cluster.pointer().end_offset == 20)
    await writer.close()
    first, second = segments_of(store_directory)
    return first, second


async def test_damage_is_not_copied_and_does_not_stop_the_rest(
    cluster: Cluster, make_batches: Batches, store_directory: Path, second: ObjectStore, second_directory: Path
) -> None:
    damaged, sound = await two_segments(cluster, make_batches, store_directory)
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    worker = await cluster.start_worker("worker-2", second=second, segment_bytes=1)
    await until(lambda: counters(worker).failures > 1)
    copied = object_contents(second_directory)
    assert str(sound.relative_to(store_directory)) in copied
    assert str(damaged.relative_to(store_directory)) not in copied
    assert not is_copied(cluster, second_directory)
    assert counters(worker).lag_partitions == 1
    content[100] ^= 1
    damaged.write_bytes(content)
    await until(lambda: is_copied(cluster, second_directory))


async def test_what_was_copied_beside_damage_is_not_sent_again(
    cluster: Cluster, make_batches: Batches, store_directory: Path, second: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged, sound = await two_segments(cluster, make_batches, store_directory)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    sent: list[str] = []
    put = second.put

    async def noted(key: str, *parts: Any, **options: Any) -> None:
        sent.append(key)
        await put(key, *parts, **options)

    monkeypatch.setattr(second, "put", noted)
    worker = await cluster.start_worker("worker-2", second=second, segment_bytes=1)
    await until(lambda: counters(worker).failures > 3)
    assert sent.count(str(sound.relative_to(store_directory))) == 1


async def test_the_copy_keeps_what_left_the_history_for_its_own_grace(
    cluster: Cluster, make_batches: Batches, store_directory: Path, second: ObjectStore, second_directory: Path
) -> None:
    """The first store deletes at once; the second copy keeps all that it had a day ago, and then lets go of it."""
    clock = MovedClock()
    for base in (0, 10):
        await cluster.add_ledger(make_batches(base, [10]), base)
    worker = await cluster.start_worker(second=second, segment_bytes=1, grace_ms=0, copy_grace_ms=DAY_MS, clock=clock)
    await until(lambda: is_copied(cluster, second_directory) and cluster.pointer().end_offset == 20)
    before = [key for key in object_contents(second_directory) if key.startswith("segments/")]
    stored = cluster.metadata.view.get(topic_key("flights"))
    shorter: Topic = msgspec.structs.replace(stored.record, configs={"retention.ms": "0"})
    await cluster.metadata.propose(Command(updates=(Put(record=shorter),)))
    await until(lambda: not [name for name in files_in(store_directory) if name.endswith(".segment")])
    await until(lambda: is_copied(cluster, second_directory))
    await asyncio.sleep(0.2)
    assert [key for key in object_contents(second_directory) if key.startswith("segments/")] == before
    clock.ahead_ms = 2 * DAY_MS
    await until(lambda: not [key for key in object_contents(second_directory) if key.startswith("segments/")])
    await until(lambda: is_copied(cluster, second_directory))
    await worker.close()  # What still goes on would change the copy while it is checked.
    assert await findings(second, cluster.background) == []


async def test_nothing_is_deleted_while_the_first_store_is_damaged(
    cluster: Cluster, make_batches: Batches, store_directory: Path, second: ObjectStore, second_directory: Path
) -> None:
    clock = MovedClock()
    for base in (0, 10):
        await cluster.add_ledger(make_batches(base, [10]), base)
    worker = await cluster.start_worker(
        second=second, segment_bytes=1, copy_grace_ms=0, clock=clock, grace_ms=30 * DAY_MS, retention_interval_ms=DAY_MS
    )
    await until(lambda: is_copied(cluster, second_directory) and cluster.pointer().end_offset == 20)
    await until(lambda: len([key for key in object_contents(second_directory) if key.endswith(".version")]) == 1)
    await worker.close()
    before = object_contents(second_directory)
    for key in object_contents(store_directory):
        if key.endswith((".segment", ".version")):
            (store_directory / key).unlink()
    clock.ahead_ms = DAY_MS
    again = await cluster.start_worker("worker-2", second=second, copy_grace_ms=0, clock=clock)
    await until(lambda: counters(again).failures > 3)
    assert object_contents(second_directory) == before


async def test_another_clusters_bucket_is_refused(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path
) -> None:
    await second.put(owner_key(0), [encode_descriptor(OwnerDescriptor(cluster_id="other", number=0, taken_at_ms=1))])
    await cluster.add_ledger(make_batches(0, [10]), 0)
    worker = await cluster.start_worker(second=second)
    await until(lambda: counters(worker).failures > 2)
    assert [*object_contents(second_directory)] == [owner_key(0)]
    await cluster.until(lambda: cluster.pointer() is not None)


async def test_a_copy_that_was_taken_over_is_no_longer_written(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path
) -> None:
    """A cluster that is restored from the second copy owns it from then on."""
    await cluster.add_ledger(make_batches(0, [10]), 0)
    worker = await cluster.start_worker(second=second)
    await until(lambda: is_copied(cluster, second_directory))
    await second.put(owner_key(1), [encode_descriptor(OwnerDescriptor(cluster_id="other", number=1, taken_at_ms=1))])
    before = object_contents(second_directory)
    await cluster.add_ledger(make_batches(10, [10]), 10)
    await until(lambda: counters(worker).failures > 2)
    assert object_contents(second_directory) == before
    owner = await read_owner(second)
    assert owner is not None
    assert owner.cluster_id == "other"


async def test_a_copy_that_is_newer_than_metadata_is_a_fork(
    cluster: Cluster, make_batches: Batches, store_directory: Path, second: ObjectStore, second_directory: Path
) -> None:
    """Metadata and the first store were restored from old copies together, so the first store shows no fork."""
    await cluster.add_ledger(make_batches(0, [10]), 0)
    first = await cluster.start_worker(second=second)
    await until(lambda: is_copied(cluster, second_directory))
    old, old_objects = cluster.pointer(), object_contents(store_directory)
    await cluster.add_ledger(make_batches(10, [10]), 10)
    await until(lambda: cluster.pointer().end_offset == 20 and is_copied(cluster, second_directory))
    await first.close()
    before = object_contents(second_directory)
    for key in object_contents(store_directory).keys() - old_objects.keys():
        (store_directory / key).unlink()
    await cluster.metadata.propose(Command(updates=(Put(record=old),)))
    worker = await cluster.start_worker("worker-2", second=second, copy_grace_ms=0)
    await until(lambda: counters(worker).failures > 1)
    assert object_contents(second_directory) == before


async def test_a_deleted_topic_leaves_the_copy_after_the_copys_grace(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path
) -> None:
    clock = MovedClock()
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await cluster.start_worker(second=second, clock=clock, grace_ms=0, copy_grace_ms=DAY_MS)
    await until(lambda: is_copied(cluster, second_directory))
    segments = [key for key in object_contents(second_directory) if key.startswith("segments/")]
    marker = second_directory / deletion_marker_key(cluster.topic.topic_id)
    await delete(cluster, DAY_MS)
    await until(marker.exists)
    assert await live_topics(second) == []
    await restore(cluster, "flights")
    await until(lambda: not marker.exists())
    assert [topic.name for topic in await live_topics(second)] == ["flights"]
    await delete(cluster, 0)
    await until(lambda: cluster.metadata.view.find(DeletedTopic, deleted_topic_key(cluster.topic.topic_id)) is None)
    await asyncio.sleep(0.2)
    assert [key for key in object_contents(second_directory) if key.startswith("segments/")] == segments
    clock.ahead_ms = 2 * DAY_MS
    await until(lambda: [*object_contents(second_directory)] == [owner_key(0)])


async def test_a_detached_topic_stays_in_the_copy_that_still_has_the_marker_of_an_earlier_deletion(
    cluster: Cluster,
    make_batches: Batches,
    second: ObjectStore,
    second_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def away(*_: Any, **__: Any) -> None:
        raise Unavailable("the second store does not answer")

    clock = MovedClock()
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await cluster.start_worker(second=second, clock=clock, grace_ms=0, copy_grace_ms=DAY_MS)
    await until(lambda: is_copied(cluster, second_directory))
    segments = segments_of(second_directory)
    marker = second_directory / deletion_marker_key(cluster.topic.topic_id)
    await delete(cluster, DAY_MS)
    await until(marker.exists)
    with monkeypatch.context() as patched:
        patched.setattr(second, "delete", away)
        await restore(cluster, "flights")
        await cluster.until(lambda: cluster.metadata.view.get(restored_topic_key(cluster.topic.topic_id)) is None)
        await cluster.until(lambda: not cluster.log().ledgers)
        await detach(cluster.metadata, cluster.store, clock, cluster.topic, 10)
    clock.ahead_ms = 2 * DAY_MS
    await until(lambda: not marker.exists())
    assert segments_of(second_directory) == segments
    assert [topic.name for topic in await live_topics(second)] == ["flights"]


async def test_deletions_reach_the_copy_once_another_worker_has_released_their_lease(
    cluster: Cluster,
    make_batches: Batches,
    second: ObjectStore,
    second_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    hold = WorkerLeases.hold

    async def noted(leases: WorkerLeases, name: str) -> tuple[Requirement, ...] | None:
        guards = await hold(leases, name)
        asked.append(name)
        return guards

    monkeypatch.setattr(WorkerLeases, "hold", noted)
    other = await cluster.metadata.open_session("other", 60_000, lambda: None)
    lease = Lease(name=DELETIONS_LEASE, session_id=other)
    await cluster.metadata.propose(Command(updates=(Put(record=lease),)))
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await cluster.start_worker(second=second, sweep_interval_ms=3_600_000)
    await until(lambda: is_copied(cluster, second_directory))
    asked.clear()
    await delete(cluster, DAY_MS)
    await until(lambda: DELETIONS_LEASE in asked)
    await cluster.metadata.propose(Command(updates=(RecordDeletion(key=lease.key()),)))
    await until((second_directory / deletion_marker_key(cluster.topic.topic_id)).exists)


async def test_a_deleted_topic_is_forgotten(cluster: Cluster, make_batches: Batches, second: ObjectStore) -> None:
    """Else a worker looks at each partition that it ever copied once per sweep, until it ends."""
    await cluster.add_ledger(make_batches(0, [10]), 0)
    worker = await cluster.start_worker(second=second, grace_ms=0, copy_grace_ms=0, sweep_interval_ms=100)
    await until(lambda: worker._session is not None and bool(worker._session._copying._swept_at))
    copying = worker._session._copying
    await delete(cluster, 0)
    await until(lambda: cluster.metadata.view.find(DeletedTopic, deleted_topic_key(cluster.topic.topic_id)) is None)
    await until(lambda: not (copying._names or copying._swept_at or copying._behind_since or copying._failures))
    await until(lambda: copying._schedule.due_count + copying._schedule.at_work_count <= 2)


async def test_offload_goes_on_while_the_second_store_is_away(
    cluster: Cluster, make_batches: Batches, second: ObjectStore, second_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any, **__: Any) -> None:
        raise Unavailable("the second store does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(second, "put", away)
        worker = await cluster.start_worker(second=second)
        await cluster.add_ledger(make_batches(0, [10]), 0)
        await cluster.until(lambda: not cluster.log().ledgers)
        await until(lambda: counters(worker).failures > 1)
        assert counters(worker).lag_partitions == 1
        assert counters(worker).lag_seconds > 0
    await until(lambda: is_copied(cluster, second_directory))


class MovedClock(SystemClock):
    """The wall clock, moved ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.ahead_ms
