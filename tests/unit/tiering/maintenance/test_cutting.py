"""A history that is restored up to a point is exactly the beginning of the whole one, and can go on from there."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.planted_damage import History, small_batch, write_history
from unit.tiering.maintenance.test_restoring import new_cluster, offload

from stratalog_core.batches.batch import CONTROL_BIT, TRANSACTIONAL_BIT
from stratalog_core.batches.checkpoint import Checkpoint, OngoingTransaction, ProducerEntry, SequencedBatch
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Conflict, Invalid, OutcomeUnknown
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import ManifestPointer, Partition, partition_key
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.bucket_scrub import BucketScrub
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.core.policy import tier_policy
from stratalog_tiering.core.restoring import EPOCH_GAP
from stratalog_tiering.format.manifest import Reason
from stratalog_tiering.format.manifest_cut import cut_manifest
from stratalog_tiering.format.merkle import batch_leaf, root_hash
from stratalog_tiering.maintenance.cutting import CutPoint, CutPorts, cut_history, point_offset
from stratalog_tiering.maintenance.restoring import (
    cut_histories,
    planned_cuts,
    read_history,
    restore_history,
    restore_topics,
    wanted_topics,
)
from stratalog_tiering.offload.commit_markers import mark_committed
from stratalog_tiering.offload.ownership import cluster_id_in, take_over
from stratalog_tiering.store import ObjectStore

Store = Any  # the FaultyStore of conftest.py, which cannot be imported
Cluster = Any
Batches = Callable[..., list[bytes]]
CLOCK = SystemClock()
BATCHES = [small_batch(index * 24 + 3 * number) for index in range(12) for number in range(8)]
END = 12 * 24


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> History:
    return write_history(tmp_path_factory.mktemp("written") / "store")


@pytest.fixture
def history(written: History, store_directory: Path) -> History:
    return written.copied_to(store_directory)


def ports(store: ObjectStore, background: ThreadBackground) -> CutPorts:
    chance = random.Random(11)
    return CutPorts(
        store=store, clock=CLOCK, background=background, random_id=lambda: chance.getrandbits(64), cluster_id="c"
    )  # fmt: skip


def segments_of(directory: Path) -> list[Path]:
    return [*directory.glob("segments/*/*/*")]


async def committed(store: ObjectStore) -> ManifestPointer:
    archive = Archive(store)
    pointer = await archive.pointer(await archive.topic("flights"), 0)
    assert pointer is not None
    return pointer


async def read_all(store: ObjectStore, pointer: ManifestPointer) -> bytes:
    reader = ColdReader(store, ColdReaderSettings(), CLOCK)
    start, end = pointer.start_offset, pointer.end_offset
    content = b"".join((await reader.fetch(pointer, start, 2**30, 10)).batches) if end > start else b""
    await reader.close()
    return content


async def findings(store: ObjectStore, background: ThreadBackground) -> list[str]:
    scrub = BucketScrub(store, background, before_ms=0)
    return [str(each) for topic in (await scrub.inventory()).topics for each in (await scrub.partition(topic, 0)).findings]


@pytest.mark.parametrize("offset", [0, 1, 3, 23, 24, 25, 26, 27, 47, 48, 100, 144, 167, 240, 263, 264, 285, 286, 287])
async def test_the_kept_history_is_the_beginning_of_the_whole_one(
    history: History, store: Store, background: ThreadBackground, offset: int
) -> None:
    before = await committed(store)
    objects = {path: path.read_bytes() for path in history.directory.rglob("*") if path.is_file()}
    cut = await cut_history(ports(store, background), before, offset, tier_policy({}))
    end = offset // 3 * 3
    assert (cut.pointer.start_offset, cut.pointer.end_offset) == (0, end)
    assert (cut.record_count, cut.left_out_records, cut.left_out_end_offset) == (end, END - end, END)
    kept = BATCHES[: end // 3]
    assert await read_all(store, cut.pointer) == b"".join(kept)
    assert await committed(store) == before, "the bucket shows the whole history until the cut is committed"
    await mark_committed(store, cut.pointer, CLOCK.wall_ms())
    assert await committed(store) == cut.pointer
    assert await findings(store, background) == []
    manifest = await Archive(store).manifest(cut.pointer)
    assert manifest.tree.head == root_hash([batch_leaf(batch) for batch in kept])
    assert {path: path.read_bytes() for path in objects} == objects, "nothing that was there is changed or deleted"
    gone = {entry.key for entry in history.entries if entry.end_offset > end}
    removed = {each.key async for each in ManifestSource(store).removed(manifest) if each.reason == Reason.CUT}
    assert removed == gone


async def test_a_point_in_time_is_the_first_record_at_or_after_it(
    history: History, store: Store, background: ThreadBackground
) -> None:
    """Timestamps are offsets in this history."""
    before = await committed(store)
    for timestamp_ms, expected in ((100, 100), (0, 0), (END + 5, END)):
        assert await point_offset(store, CLOCK, before, CutPoint(timestamp_ms=timestamp_ms)) == expected
    for offset, expected in ((7, 7), (END + 7, END)):
        assert await point_offset(store, CLOCK, before, CutPoint(offset=offset)) == expected


async def test_a_cut_elsewhere_than_between_segments_is_refused(history: History, store: Store) -> None:
    manifest, source = history.manifest, ManifestSource(store)
    with pytest.raises(Invalid, match="no segment of flights-0 begins at offset 25"):
        cut_manifest(manifest, 25, await source.pages(manifest.pages), await source.tree_pages(manifest.tree.pages))


async def test_no_transaction_is_cut_in_two(cluster: Cluster, make_batches: Batches, background: ThreadBackground) -> None:
    def transactional(offset: int, *, control: bool = False) -> bytes:
        value = b"\0\0\0\0\0\0" if control else b"v"
        key = b"\0\0\0\1" if control else b"key"
        return bytes(
            build_batch(
                [Record(offset=offset, timestamp_ms=offset, key=key, value=value)], leader_epoch=0, producer_id=7,
                producer_epoch=0, base_sequence=-1 if control else offset - 10,
                attributes=TRANSACTIONAL_BIT | (0x20 if control else 0),
            )
        )  # fmt: skip

    batches = [*make_batches(0, [10]), transactional(10), transactional(11), transactional(12, control=True)]
    await cluster.add_ledger([*batches, *make_batches(13, [5])], 0)
    await cluster.start_worker()
    await cluster.until(lambda: cluster.pointer() is not None and cluster.pointer().end_offset == 18)
    await cluster.close()
    made = ports(cluster.store, background)
    for offset, end in ((11, 10), (12, 10), (13, 13), (17, 13)):
        cut = await cut_history(made, cluster.pointer(), offset, tier_policy({}))
        assert cut.pointer.end_offset == end


@pytest.mark.parametrize("offset", [11, 12, 13])
async def test_no_transaction_that_began_in_an_earlier_segment_is_cut_in_two(
    cluster: Cluster, make_batches: Batches, background: ThreadBackground, offset: int
) -> None:
    def transactional(offset: int, *, control: bool = False) -> bytes:
        key, value = (b"\0\0\0\1", b"\0\0\0\0\0\0") if control else (b"key", b"v")
        record = Record(offset=offset, timestamp_ms=offset, key=key, value=value)
        attributes = TRANSACTIONAL_BIT | (CONTROL_BIT if control else 0)
        sequence = -1 if control else offset - 10
        return bytes(build_batch([record], attributes=attributes, producer_id=7, producer_epoch=0, base_sequence=sequence))

    first = await cluster.add_ledger([*make_batches(0, [10]), transactional(10)], 0)
    open_at_11 = Checkpoint(
        offset=11, producers=(ProducerEntry(7, 0, (SequencedBatch(0, 0, 10, 10),)),), transactions=(OngoingTransaction(7, 10),)
    )
    later = [transactional(11), transactional(12), transactional(13, control=True)]
    await cluster.add_ledger(later, 11, checkpoint=open_at_11)
    undecided = msgspec.structs.replace(first, undecided_from=10)
    await cluster.metadata.propose(Command(updates=(Put(record=undecided),)))
    await cluster.start_worker(segment_bytes=1)
    await cluster.until(lambda: cluster.pointer() is not None and cluster.pointer().end_offset == 14)
    assert len((await Archive(cluster.store).manifest(cluster.pointer())).segments) == 2
    await cluster.close()
    cut = await cut_history(ports(cluster.store, background), cluster.pointer(), offset, tier_policy({}))
    assert cut.pointer.end_offset == 10, "the transaction's first record is at offset 10"


async def test_a_restore_that_another_one_has_overtaken_does_not_mark_its_cut(
    cluster: Cluster, make_batches: Batches, tmp_path: Path, background: ThreadBackground
) -> None:
    await cluster.start_worker()
    await offload(cluster, make_batches(0, [4, 4]), 0, 8)
    await cluster.close()
    store, whole = cluster.store, cluster.pointer()
    histories = await read_history(store, await wanted_topics(store, ()))
    async with new_cluster(cluster, tmp_path / "new") as new:
        owner = await take_over(store, cluster_id_in(new.metadata), CLOCK.wall_ms())
        (history,) = await cut_histories(ports(store, background), histories, {0: CutPoint(offset=6)}, {})
        await take_over(store, "another", CLOCK.wall_ms())
        with pytest.raises(Conflict, match="taken"):
            await restore_history(new.metadata, history, "flights", None, owner.number, (store, CLOCK))
        assert await committed(store) == whole, "the next owner continues the whole history"


async def test_a_restore_that_is_repeated_after_its_commit_reports_the_cut(
    cluster: Cluster, make_batches: Batches, tmp_path: Path, background: ThreadBackground
) -> None:
    await cluster.start_worker()
    await offload(cluster, make_batches(0, [4, 4]), 0, 8)
    await cluster.close()
    store = cluster.store
    lost = [OutcomeUnknown("no answer to the marker")]
    store.before = lambda name, key: lost.pop() if lost and name == "put" and key.endswith(".committed") else None
    async with new_cluster(cluster, tmp_path / "new") as new:
        made = replace(ports(store, background), cluster_id=cluster_id_in(new.metadata))
        with pytest.raises(OutcomeUnknown):
            await restore_topics(new.metadata, made, (), points={0: CutPoint(offset=6)})
        assert lost == []
        ((history, done),) = (await restore_topics(new.metadata, made, (), points={0: CutPoint(offset=6)})).topics
        found = history.partitions[0]
        assert not done
        assert (found.pointer, found.record_count) == (new.pointer(), 4)
        assert (found.left_out_records, found.left_out_end_offset) == (4, 8)


async def test_a_topic_is_restored_up_to_a_point_and_goes_on(
    cluster: Cluster, make_batches: Batches, tmp_path: Path, background: ThreadBackground, store_directory: Path
) -> None:
    await cluster.start_worker()
    first, second = make_batches(0, [4, 4], epoch=3), make_batches(8, [4], epoch=9)
    await offload(cluster, first, 0, 8, leader_epoch=3)
    await offload(cluster, second, 8, 12, leader_epoch=9)
    await cluster.close()
    store = cluster.store
    segments = {path: path.read_bytes() for path in segments_of(store_directory)}
    histories = await read_history(store, await wanted_topics(store, ()))
    points = {0: CutPoint(offset=6)}
    assert await planned_cuts(ports(store, background), histories[0], points) == {0: 4}
    async with new_cluster(cluster, tmp_path / "new") as new:
        owner = await take_over(store, cluster_id_in(new.metadata), CLOCK.wall_ms())
        (history,) = await cut_histories(ports(store, background), histories, points, {})
        assert history.partitions[0].left_out_records == 8
        assert await restore_history(new.metadata, history, "flights", None, owner.number, (store, CLOCK))
        await new.until(lambda: new.pointer() is not None)
        assert new.pointer().end_offset == 4
        assert await committed(store) == new.pointer()
        partition = new.metadata.view.find(Partition, partition_key(cluster.topic.topic_id, 0))
        assert partition.leader_epoch == 2 * EPOCH_GAP, "above the epochs of what is left out, too"
        await new.start_worker("new-worker", grace_ms=3_600_000)
        again = make_batches(4, [2], epoch=partition.leader_epoch)
        await offload(new, again, 4, 6, leader_epoch=partition.leader_epoch)
        assert new.last_error() == ""
        assert await read_all(store, new.pointer()) == b"".join([first[0], *again])
        assert all(path.read_bytes() == content for path, content in segments.items()), "it stays for the grace period"
        assert await findings(store, background) == []
