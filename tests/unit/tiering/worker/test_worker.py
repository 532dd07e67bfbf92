"""The worker against a real metadata node: offload, verification, hot copies, requests, races, retention, collection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.directory_store import object_files

from stratalog_core.batches.checkpoint import Checkpoint, EpochStart, ProducerEntry, SequencedBatch
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Invalid, OutcomeUnknown, Refused, StorageFailed, StratalogError, Unavailable
from stratalog_core.system import SystemClock
from stratalog_metadata.records import (
    DeletedTopic,
    DynamicConfig,
    Ledger,
    TierRequest,
    Topic,
    ledger_key,
    log_key,
    manifest_pointer_key,
    tier_request_key,
    topic_key,
)
from stratalog_metadata.state.commands import Command, Delete, Put
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.format.descriptor import OwnerDescriptor, encode_descriptor
from stratalog_tiering.format.object_keys import OWNERS_PREFIX, deletion_marker_key, owner_key, segment_key
from stratalog_tiering.format.segment import SegmentFooter
from stratalog_tiering.metrics import TieringCounters, TieringMetrics

MIB = 1024 * 1024
DAY_MS = 86_400_000
Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]


def segments_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("segments/*/*/*"))


def only_segment(directory: Path) -> Path:
    (path,) = directory.glob("segments/*/*/*")
    return path


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in object_files(directory))


async def cold_footer(cluster: Cluster, partition: int = 0) -> SegmentFooter:
    """Return the footer of the newest segment, found without metadata."""
    archive = Archive(cluster.store)
    pointer = await archive.pointer(await archive.topic("flights"), partition)
    assert pointer is not None
    assert pointer == cluster.pointer(partition)
    manifest = await archive.manifest(pointer)
    return await archive.footer(manifest.segments[-1])


async def read_cold(cluster: Cluster, partition: int = 0) -> bytes:
    reader = ColdReader(cluster.store, ColdReaderSettings(), SystemClock())
    pointer = cluster.pointer(partition)
    pieces = (await reader.fetch(pointer, pointer.start_offset, 2**30, 10)).batches
    await reader.close()
    return b"".join(pieces)


async def test_sealed_ledgers_become_cold_and_their_hot_copies_are_deleted(cluster: Cluster, make_batches: Batches) -> None:
    first, second = make_batches(0, [3, 4]), make_batches(7, [5] * 40)
    await cluster.add_ledger(first, 0)
    await cluster.add_ledger(second, 7)
    open_one = await cluster.add_ledger([], 207, closed=False)
    await cluster.start_worker()
    await cluster.until(lambda: len(cluster.log().ledgers) == 1)
    assert cluster.log().ledgers[0].ledger_id == open_one.ledger_id
    assert (cluster.pointer().start_offset, cluster.pointer().end_offset) == (0, 207)
    assert await read_cold(cluster) == b"".join([*first, *second])
    await cluster.until(lambda: sorted(cluster.ledgers.deleted) == [1, 2])
    assert cluster.metadata.view.find(Ledger, ledger_key(1)) is None
    footer = await cold_footer(cluster)
    assert (footer.topic_name, footer.ledger_ids) == ("flights", (1, 2))
    assert cluster.last_error() == ""


async def test_a_worker_counts_its_work(cluster: Cluster, make_batches: Batches) -> None:
    sealed = [await cluster.add_ledger(make_batches(0, [3, 4]), 0), await cluster.add_ledger(make_batches(7, [5] * 40), 7)]
    await cluster.add_ledger([], 207, closed=False)
    worker = await cluster.start_worker()
    counters = next(iter(worker.metrics()))
    assert isinstance(counters, TieringCounters)
    await cluster.until(lambda: len(cluster.log().ledgers) == 1 and counters.ledgers_dropped == 2)
    counted, now, *lags = worker.metrics()
    assert isinstance(counted, TieringCounters)
    assert isinstance(now, TieringMetrics)
    assert (counted.sessions, counted.failures, counted.ledgers_dropped) == (1, 0, 2)
    assert counted.segments_offloaded == sum(counted.offload_seconds.counts) > 0
    assert counted.offloaded_bytes == sum(ledger.payload_bytes for ledger in sealed)
    assert lags == []


async def test_later_ledgers_continue_the_history(cluster: Cluster, make_batches: Batches) -> None:
    await cluster.start_worker()
    written: list[bytes] = []
    for index in range(4):
        batches = make_batches(index * 10, [10])
        written += batches
        await cluster.add_ledger(batches, index * 10, leader_epoch=index)
        await cluster.until(lambda end=index * 10 + 10: (p := cluster.pointer()) is not None and p.end_offset == end)
    assert await read_cold(cluster) == b"".join(written)


async def test_hot_copies_stay_for_the_deletion_lag(cluster: Cluster, make_batches: Batches) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(deletion_lag_ms=3_600_000)
    await cluster.until(lambda: cluster.pointer() is not None)
    await cluster.add_ledger(make_batches(3, [3]), 3)
    await cluster.until(lambda: cluster.pointer().end_offset == 6)
    assert len(cluster.log().ledgers) == 2


async def test_a_request_is_fulfilled_and_may_delete_hot_copies_at_once(cluster: Cluster, make_batches: Batches) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(deletion_lag_ms=3_600_000)
    await cluster.until(lambda: cluster.pointer() is not None)
    for delete_hot, left in ((False, 1), (True, 0)):
        request = TierRequest(topic_id=cluster.topic.topic_id, index=0, end_offset=3, delete_hot=delete_hot)
        await cluster.metadata.propose(Command(updates=(Put(record=request),)))
        await cluster.until(lambda: cluster.metadata.view.get(tier_request_key(cluster.topic.topic_id, 0)) is None)
        assert len(cluster.log().ledgers) == left


async def test_a_request_waits_for_the_owner_and_an_empty_partition_fulfils_it(cluster: Cluster) -> None:
    waiting = TierRequest(topic_id=cluster.topic.topic_id, index=0)
    empty = TierRequest(topic_id=cluster.topic.topic_id, index=1, end_offset=0, delete_hot=True)
    await cluster.metadata.propose(Command(updates=(Put(record=waiting), Put(record=empty))))
    await cluster.start_worker()
    await cluster.until(lambda: cluster.metadata.view.get(tier_request_key(cluster.topic.topic_id, 1)) is None)
    assert cluster.metadata.view.get(tier_request_key(cluster.topic.topic_id, 0)) is not None


async def test_empty_ledgers_are_dropped_without_a_gap(cluster: Cluster, make_batches: Batches) -> None:
    await cluster.add_ledger([], 0)
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.add_ledger([], 3)
    await cluster.add_ledger([], 3)
    await cluster.add_ledger(make_batches(3, [2]), 3)
    await cluster.add_ledger([], 5)
    await cluster.start_worker()
    await cluster.until(lambda: not cluster.log().ledgers)
    assert (cluster.pointer().start_offset, cluster.pointer().end_offset) == (0, 5)


async def test_segment_footers_have_epochs_and_producers_at_their_end(cluster: Cluster) -> None:
    def batch(offset: int, producer: int, sequence: int, epoch: int) -> bytes:
        record = Record(offset=offset, timestamp_ms=7, key=None, value=b"v")
        return bytes(build_batch([record], leader_epoch=epoch, producer_id=producer, producer_epoch=1, base_sequence=sequence))

    known = ProducerEntry(9, 1, tuple(SequencedBatch(n, n, n, 5) for n in range(5)))
    checkpoint = Checkpoint(offset=5, leader_epochs=(EpochStart(1, 0), EpochStart(4, 5)), producers=(known,))
    await cluster.add_ledger([batch(5, 9, 5, 4), batch(6, 8, 0, 4)], 5, checkpoint=checkpoint)
    await cluster.start_worker()
    await cluster.until(lambda: not cluster.log().ledgers)
    footer = await cold_footer(cluster)
    assert footer.leader_epochs == (EpochStart(1, 0), EpochStart(4, 5))
    reader = ColdReader(cluster.store, ColdReaderSettings(), SystemClock())
    producers = await reader.producer_snapshot(cluster.pointer())
    await reader.close()
    assert {entry.producer_id: entry.batches[-1].last_offset for entry in producers} == {9: 5, 8: 6}
    assert [len(entry.batches) for entry in producers] == [5, 1]


async def test_a_corrupt_copy_is_never_committed(cluster: Cluster, make_batches: Batches, store_directory: Path) -> None:
    def spoil(name: str, key: str) -> None:
        if name == "put" and key.startswith("segments/"):
            path = store_directory / key
            content = bytearray(path.read_bytes())
            content[70] ^= 1
            path.write_bytes(content)

    cluster.store.after = spoil
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker()
    await cluster.until(lambda: "does not verify" in cluster.last_error())
    assert cluster.pointer() is None
    assert len(cluster.log().ledgers) == 1
    cluster.store.after = lambda name, key: None
    await cluster.until(lambda: cluster.pointer() is not None and not cluster.log().ledgers)
    await cluster.until(lambda: cluster.last_error() == "")


async def test_a_corrupt_cold_copy_keeps_the_hot_one(cluster: Cluster, make_batches: Batches, store_directory: Path) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    worker = await cluster.start_worker(deletion_lag_ms=3_600_000)
    await cluster.until(lambda: cluster.pointer() is not None)
    await worker.close()
    path = only_segment(store_directory)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    await cluster.start_worker("worker-2")
    await cluster.until(lambda: cluster.last_error() != "")
    assert len(cluster.log().ledgers) == 1
    path.write_bytes(content)
    await cluster.until(lambda: not cluster.log().ledgers)


async def test_ledgers_that_do_not_continue_the_manifest_are_reported_and_not_offloaded(
    cluster: Cluster, make_batches: Batches
) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker()
    await cluster.until(lambda: not cluster.log().ledgers)
    await cluster.add_ledger(make_batches(4, [3]), 4)
    await cluster.until(lambda: "do not meet" in cluster.last_error())
    assert cluster.pointer().end_offset == 3


def failing_sweeps(times: int) -> Callable[[str, str], BaseException | None]:
    """A store that cannot list segments so many times; only sweeps do that."""
    left = [times]

    def before(name: str, key: str) -> BaseException | None:
        if name != "list" or not key.startswith("segments/") or left[0] == 0:
            return None
        left[0] -= 1
        return Unavailable("the store is away")

    return before


async def test_an_error_of_an_idle_partition_ends_with_the_next_success(cluster: Cluster, make_batches: Batches) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker()
    await cluster.until(lambda: not cluster.log().ledgers)
    cluster.store.before = failing_sweeps(1)
    await cluster.until(lambda: "the store is away" in cluster.last_error())
    await cluster.until(lambda: cluster.last_error() == "")


async def test_an_error_stays_until_its_cause_is_gone(cluster: Cluster, make_batches: Batches) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    worker = await cluster.start_worker()
    await cluster.until(lambda: not cluster.log().ledgers)
    cluster.store.before = failing_sweeps(-1)
    await cluster.until(lambda: "the store is away" in cluster.last_error())
    shown: list[str] = []
    stop = cluster.metadata.view.subscribe(lambda changes: shown.append(cluster.last_error()))
    await cluster.add_ledger(make_batches(3, [3]), 3)
    await cluster.until(lambda: cluster.pointer().end_offset == 6 and not cluster.log().ledgers)
    await worker.close()
    await cluster.start_worker("worker-2")
    await cluster.add_ledger(make_batches(6, [3]), 6)
    await cluster.until(lambda: cluster.pointer().end_offset == 9 and not cluster.log().ledgers)
    stop()
    assert all("the store is away" in error for error in shown)
    cluster.store.before = lambda name, key: None
    await cluster.until(lambda: cluster.last_error() == "")


async def test_failed_reads_are_retried(cluster: Cluster, make_batches: Batches) -> None:
    cluster.ledgers.failures = [Unavailable("bookies are away"), Unavailable("still away")]
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker()
    await cluster.until(lambda: not cluster.log().ledgers)


async def test_two_workers_share_and_one_takes_over(cluster: Cluster, make_batches: Batches) -> None:
    first = await cluster.start_worker("worker-1")
    await cluster.start_worker("worker-2")
    for partition in range(2):
        await cluster.add_ledger(make_batches(0, [3]), 0, partition=partition)
    await cluster.until(lambda: all(not cluster.log(partition).ledgers for partition in range(2)))
    await first.close()
    for partition in range(2):
        await cluster.add_ledger(make_batches(3, [3]), 3, partition=partition)
    await cluster.until(lambda: all(not cluster.log(partition).ledgers for partition in range(2)))
    assert [cluster.pointer(partition).end_offset for partition in range(2)] == [6, 6]


async def test_another_clusters_bucket_is_refused(cluster: Cluster) -> None:
    await cluster.store.put(owner_key(0), [encode_descriptor(OwnerDescriptor(cluster_id="another", number=0, taken_at_ms=1))])
    with pytest.raises(Invalid, match="belongs to cluster another"):
        await cluster.start_worker()


async def test_a_claim_of_the_bucket_whose_outcome_is_unknown_is_read_back(cluster: Cluster, make_batches: Batches) -> None:
    lost: list[BaseException] = [OutcomeUnknown("the answer was lost")]
    cluster.store.after = lambda name, key: lost.pop() if lost and key == owner_key(0) else None
    await cluster.start_worker()
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.until(lambda: cluster.pointer() is not None)
    assert not lost
    assert cluster.store.calls.count(("put", owner_key(0))) == 1


async def test_large_segments_are_uploaded_in_parts(cluster: Cluster) -> None:
    value = b"v" * 900_000
    batches = [bytes(build_batch([Record(offset=n, timestamp_ms=n, key=None, value=value)])) for n in range(14)]
    await cluster.add_ledger(batches, 0)
    await cluster.start_worker(upload_part_bytes=5 * 1024 * 1024)
    await cluster.until(lambda: not cluster.log().ledgers)
    assert cluster.store.count("put_part") == 3
    assert await read_cold(cluster) == b"".join(batches)


async def test_uploads_are_read_back_at_a_rate_of_their_own(cluster: Cluster) -> None:
    await cluster.start_worker(verify_bytes_per_s=MIB)
    batch = bytes(build_batch([Record(offset=0, timestamp_ms=0, key=None, value=bytes(MIB))], leader_epoch=0))
    began_s = asyncio.get_running_loop().time()
    await cluster.add_ledger([batch], 0)
    await cluster.until(lambda: (p := cluster.pointer()) is not None and p.end_offset == 1)
    assert asyncio.get_running_loop().time() - began_s > 0.7, "a quarter of a second's bytes are granted at once"


async def test_retention_moves_the_start_and_later_deletes_the_objects(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    topic = msgspec.structs.replace(cluster.topic, configs={"retention.bytes": "1"})
    now = SystemClock().wall_ms()
    await cluster.metadata.propose(Command(updates=(Put(record=topic),)))
    await cluster.start_worker(grace_ms=0)
    for base in range(0, 9, 3):
        await cluster.add_ledger(make_batches(base, [3], timestamps=[now] * 3), base)
        await cluster.until(lambda end=base + 3: (p := cluster.pointer()) is not None and p.end_offset == end)
    await cluster.until(lambda: cluster.log().log_start_offset == 6)
    assert cluster.pointer().start_offset == 6
    await cluster.until(lambda: len(segments_in(store_directory)) == 1)


async def test_records_below_the_log_start_are_removed(cluster: Cluster, make_batches: Batches) -> None:
    await cluster.start_worker()
    for base in range(0, 9, 3):
        await cluster.add_ledger(make_batches(base, [3]), base)
        await cluster.until(lambda: not cluster.log().ledgers)
    log = msgspec.structs.replace(cluster.log(), log_start_offset=5)
    await cluster.metadata.propose(Command(updates=(Put(record=log),)))
    await cluster.until(lambda: cluster.pointer().start_offset == 3)
    assert cluster.log().log_start_offset == 5
    assert cluster.pointer().end_offset == 9


async def test_all_history_may_expire_and_the_end_offset_is_kept(cluster: Cluster, make_batches: Batches) -> None:
    topic = msgspec.structs.replace(cluster.topic, configs={"retention.ms": "1000"})
    await cluster.metadata.propose(Command(updates=(Put(record=topic),)))
    await cluster.start_worker()
    await cluster.add_ledger(make_batches(0, [3], timestamps=[5, 5, 5]), 0)
    await cluster.until(lambda: (p := cluster.pointer()) is not None and p.start_offset == 3)
    assert cluster.pointer().end_offset == 3
    await cluster.until(lambda: not cluster.log().ledgers)
    await cluster.add_ledger(make_batches(3, [3], timestamps=[5, 5, 5]), 3)
    await cluster.until(lambda: cluster.pointer().start_offset == 6)


async def test_retention_follows_the_clusters_default(cluster: Cluster, make_batches: Batches) -> None:
    topic = msgspec.structs.replace(cluster.topic, configs={})
    default = DynamicConfig(resource="", configs={"retention.ms": "-1"})
    await cluster.metadata.propose(Command(updates=(Put(record=topic), Put(record=default))))
    await cluster.start_worker()
    await cluster.add_ledger(make_batches(0, [3], timestamps=[5, 5, 5]), 0)
    await cluster.until(lambda: (p := cluster.pointer()) is not None and p.end_offset == 3)
    assert cluster.pointer().start_offset == 0
    default = DynamicConfig(resource="", configs={"retention.ms": "1000"})
    await cluster.metadata.propose(Command(updates=(Put(record=default),)))
    await cluster.until(lambda: cluster.pointer().start_offset == 3)


async def test_orphans_are_swept_after_the_grace_period_only(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    orphan = segment_key(cluster.topic.topic_id, 0, 0, 0, 77)
    await cluster.store.put(orphan, [b"left by a worker that died"])
    worker = await cluster.start_worker()
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.until(lambda: not cluster.log().ledgers)
    await worker.close()
    assert len(segments_in(store_directory)) == 2
    await cluster.start_worker("worker-2", grace_ms=0)
    await cluster.add_ledger(make_batches(3, [3]), 3)
    await cluster.until(lambda: cluster.pointer().end_offset == 6)
    await cluster.until(lambda: not (store_directory / orphan).exists())
    assert len(await read_cold(cluster)) == len(b"".join(make_batches(0, [3, 3])))


@pytest.mark.parametrize("versions", [1, 2])
async def test_metadata_restored_from_an_old_copy_deletes_nothing_in_the_bucket(
    cluster: Cluster, make_batches: Batches, store_directory: Path, versions: int
) -> None:
    """Absence of metadata is not absence of the segment (kafka#11390): a marker proves that a manifest was committed."""
    worker = await cluster.start_worker()
    for base in range(0, 3 * versions, 3):
        await cluster.add_ledger(make_batches(base, [3]), base)
        await cluster.until(lambda: not cluster.log().ledgers)
    await worker.close()
    history = files_in(store_directory)
    await cluster.metadata.propose(Command(updates=(Delete(key=manifest_pointer_key(cluster.topic.topic_id, 0)),)))
    await cluster.start_worker("worker-2", grace_ms=0)
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.until(lambda: "has forked" in cluster.last_error())
    assert set(history) <= set(files_in(store_directory))


async def test_objects_of_a_deleted_topic_are_deleted_after_the_grace_period(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(grace_ms=0)
    await cluster.until(lambda: not cluster.log().ledgers)
    topic: Topic = cluster.topic
    deleted = DeletedTopic(topic_id=topic.topic_id, name=topic.name, deleted_at_ms=SystemClock().wall_ms())
    gone = [topic_key(topic.name), *(log_key(topic.topic_id, n) for n in range(2)), manifest_pointer_key(topic.topic_id, 0)]
    await cluster.metadata.propose(Command(updates=(*(Delete(key=key) for key in gone), Put(record=deleted))))
    await cluster.until(lambda: cluster.metadata.view.get(deleted.key()) is None)
    assert files_in(store_directory) == [Path(owner_key(0)).name]


async def test_a_broker_whose_clock_is_behind_does_not_shorten_the_grace_period_of_a_deleted_topic(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker(grace_ms=3_600_000)
    await cluster.until(lambda: not cluster.log().ledgers)
    segments = [name for name in files_in(store_directory) if name.endswith(".segment")]
    topic: Topic = cluster.topic
    deleted = DeletedTopic(topic_id=topic.topic_id, name=topic.name, deleted_at_ms=SystemClock().wall_ms() - 2 * 3_600_000)
    gone = [topic_key(topic.name), *(log_key(topic.topic_id, n) for n in range(2)), manifest_pointer_key(topic.topic_id, 0)]
    await cluster.metadata.propose(Command(updates=(*(Delete(key=key) for key in gone), Put(record=deleted))))
    marker = Path(deletion_marker_key(topic.topic_id)).name
    async with asyncio.timeout(60):
        while marker not in files_in(store_directory):
            assert cluster.metadata.view.get(deleted.key()) is not None
            await asyncio.sleep(0.02)
    assert cluster.metadata.view.get(deleted.key()) is not None
    assert segments
    assert set(segments) <= set(files_in(store_directory))


async def with_configs(cluster: Cluster, **configs: str) -> None:
    topic = msgspec.structs.replace(cluster.topic, configs={name.replace("_", "."): value for name, value in configs.items()})
    await cluster.metadata.propose(Command(updates=(Put(record=topic),)))


def store_is_away(name: str, key: str) -> BaseException | None:
    return Unavailable("the store is away")


@pytest.mark.parametrize("failure", [Unavailable, OutcomeUnknown, Refused])
async def test_without_the_store_only_expired_ledgers_are_removed(
    cluster: Cluster, make_batches: Batches, failure: type[StratalogError]
) -> None:
    """``failure`` is that of a write: the store may answer none, which leaves their outcome open, or refuse them."""
    await with_configs(cluster, retention_ms="300")
    soon_ms = SystemClock().wall_ms() + 3_600_000
    await cluster.start_worker(retention_interval_ms=DAY_MS, sweep_interval_ms=300 * DAY_MS, grace_ms=DAY_MS)
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.until(lambda: not cluster.log().ledgers)
    cluster.store.before = lambda name, key: (failure if name == "put" else Unavailable)("the store is away")
    expired = [await cluster.add_ledger(make_batches(first, [3]), first) for first in (3, 6)]
    young = await cluster.add_ledger(make_batches(9, [3], timestamps=[5, soon_ms, 5]), 9)
    later = [await cluster.add_ledger(make_batches(first, [3]), first) for first in (12, 15)]
    await cluster.until(lambda: cluster.log().log_start_offset == 9)
    assert [ref.ledger_id for ref in cluster.log().ledgers] == [ledger.ledger_id for ledger in (young, *later)]
    # Both follow the commit; a report that meets a change of the log is written with the next failure.
    await cluster.until(lambda: set(cluster.ledgers.deleted) >= {ledger.ledger_id for ledger in expired})
    await cluster.until(lambda: "the store is away" in cluster.last_error())
    cluster.store.before = lambda name, key: None
    await cluster.until(lambda: cluster.pointer().end_offset == 18 and cluster.last_error() == "")
    assert (cluster.pointer().start_offset, cluster.log().log_start_offset) == (9, 9), "history goes on where it was cut"
    batches = [*make_batches(9, [3], timestamps=[5, soon_ms, 5]), *make_batches(12, [3]), *make_batches(15, [3])]
    assert await read_cold(cluster) == b"".join(batches)


@pytest.mark.parametrize("failure", [Unavailable, OutcomeUnknown, StorageFailed, Refused])
async def test_a_worker_that_starts_without_the_store_removes_only_expired_ledgers(
    cluster: Cluster, make_batches: Batches, failure: type[StratalogError]
) -> None:
    await with_configs(cluster, retention_ms="300")
    soon_ms = SystemClock().wall_ms() + 3_600_000
    cluster.store.before = lambda name, key: failure("the store is away")
    expired = [await cluster.add_ledger(make_batches(first, [3]), first) for first in (0, 3)]
    young = await cluster.add_ledger(make_batches(6, [3], timestamps=[5, soon_ms, 5]), 6)
    later = [await cluster.add_ledger(make_batches(first, [3]), first) for first in (9, 12)]
    await cluster.start_worker()
    await cluster.until(lambda: cluster.log().log_start_offset == 6)
    await cluster.until(lambda: "the store is away" in cluster.last_error())
    assert [ref.ledger_id for ref in cluster.log().ledgers] == [ledger.ledger_id for ledger in (young, *later)]
    await cluster.until(lambda: set(cluster.ledgers.deleted) == {ledger.ledger_id for ledger in expired})
    cluster.store.before = lambda name, key: None
    await cluster.until(lambda: (p := cluster.pointer()) is not None and p.end_offset == 15 and cluster.last_error() == "")
    assert (cluster.pointer().start_offset, cluster.log().log_start_offset) == (6, 6)
    assert await cluster.store.get(owner_key(0)), "the bucket was claimed before anything was written to it"


async def test_a_worker_that_started_without_the_store_leaves_another_clusters_bucket_alone(
    cluster: Cluster, make_batches: Batches
) -> None:
    cluster.store.before = lambda name, key: Unavailable("the store is away") if key.startswith(OWNERS_PREFIX) else None
    await cluster.start_worker()
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.until(lambda: "the store is away" in cluster.last_error())
    cluster.store.before = lambda name, key: None
    await cluster.store.put(owner_key(0), [encode_descriptor(OwnerDescriptor(cluster_id="another", number=0, taken_at_ms=1))])
    await cluster.until(lambda: "belongs to cluster another" in cluster.last_error())
    assert [info.key async for info in cluster.store.list("")] == [owner_key(0)]
    assert len(cluster.log().ledgers) == 1


async def test_retention_never_deletes_what_is_not_uploaded(cluster: Cluster, make_batches: Batches) -> None:
    """Local retention is over before the upload succeeds; the hot copy stays (rabbitmq-stream-s3#356)."""
    await with_configs(cluster, local_retention_ms="0", retention_ms="3600000")
    now_ms = SystemClock().wall_ms()
    await cluster.start_worker()
    cluster.store.before = store_is_away
    for first in (0, 3, 6):
        await cluster.add_ledger(make_batches(first, [3], timestamps=[now_ms] * 3), first)
    await cluster.until(lambda: "the store is away" in cluster.last_error())
    attempts = len(cluster.store.calls)
    while len(cluster.store.calls) < attempts + 10:
        cluster.store.entered.clear()
        await cluster.store.entered.wait()
    assert len(cluster.log().ledgers) == 3
    assert (cluster.log().log_start_offset, cluster.ledgers.deleted) == (0, [])
    cluster.store.before = lambda name, key: None
    await cluster.until(lambda: cluster.pointer() is not None and cluster.pointer().end_offset == 9)
    assert cluster.pointer().start_offset == 0
