"""History from elsewhere becomes a new topic: all of it at once, or nothing, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crc32c import crc32c
from support.archive_writer import ArchiveWriter

from stratalog_core.batches.batch import CONTROL_BIT, TRANSACTIONAL_BIT
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Conflict, Corrupt, Invalid, OutcomeUnknown, StratalogError, Unavailable
from stratalog_core.partition_state.transactions import ABORT, COMMIT
from stratalog_core.ports import Buffer
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import (
    DeletedTopic,
    DynamicConfig,
    Log,
    ManifestPointer,
    Partition,
    PendingTopic,
    RestoredTopic,
    Topic,
    log_key,
    manifest_pointer_key,
    pending_topic_key,
    topic_key,
)
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.attach import attachment
from stratalog_tiering.attach.attachment import AttachPorts, attach
from stratalog_tiering.attach.bucket import stored_topic
from stratalog_tiering.attach.kafka_logs import kafka_topic
from stratalog_tiering.attach.source import TopicSource
from stratalog_tiering.cold.archive import Archive, live_topics
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.format.object_keys import owner_key
from stratalog_tiering.format.segment import audit_block, iterate_block_batches
from stratalog_tiering.maintenance.restoring import read_history
from stratalog_tiering.offload.commit import store_manifest
from stratalog_tiering.offload.commit_markers import mark_committed
from stratalog_tiering.offload.ownership import claim_bucket, cluster_id_in
from stratalog_tiering.store import ObjectStore, open_store

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]
MakePorts = Callable[..., AttachPorts]


@pytest.fixture
def ports(cluster: Cluster, background: ThreadBackground) -> MakePorts:
    def make(**settings: Any) -> AttachPorts:
        return AttachPorts(
            metadata=cluster.metadata, store=cluster.store, clock=SystemClock(), random=random.Random(4), background=background,
            settings=TieringSettings(worker_id="attach", **{"block_bytes": 4096, **settings}),
        )  # fmt: skip

    return make


@pytest.fixture
def other_store(tmp_path: Path, background: ThreadBackground) -> ObjectStore:
    return open_store(str(tmp_path / "other"), background=background, clock=SystemClock(), random=random.Random(7))


@pytest.fixture
def other(other_store: ObjectStore, topic: Topic) -> ArchiveWriter:
    return ArchiveWriter(other_store, topic, SystemClock(), random.Random(8), block_bytes_target=400)


@pytest.fixture
def log_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "kafka"
    directory.mkdir()
    return directory


def write_logs(directory: Path, partition: str, files: Mapping[int, Sequence[Buffer]], tail: bytes = b"") -> None:
    path = directory / partition
    path.mkdir()
    for base_offset, batches in files.items():
        (path / f"{base_offset:020d}.log").write_bytes(b"".join(map(bytes, batches)) + tail)
        (path / f"{base_offset:020d}.index").write_bytes(b"")


def new_topic(source: TopicSource, name: str = "flights-2024", **configs: str) -> Topic:
    return Topic(
        name=name, topic_id=uuid.uuid4(), partition_count=source.partition_count, replication_factor=1,
        configs={"retention.ms": "-1", **configs},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "configs", "message"),
    [
        ("a/b", {}, "topic name 'a/b': 1 to 249 characters"),
        ("", {}, "topic name ''"),
        ("a", {"retention": "1"}, "unknown topic config 'retention'; did you mean"),
        ("a", {"retention.ms": "soon"}, "retention.ms is soon; it must be of type long"),
        ("a", {"stratalog.ack.quorum": "3"}, "maximum is the replication factor, 1"),
        ("a", {"retention.ms": "5", "local.retention.ms": "9"}, "local.retention.ms is 9; maximum is retention.ms, 5"),
    ],
)
async def test_names_and_configs_are_checked_as_brokers_do(
    cluster: Cluster, name: str, configs: dict[str, str], message: str
) -> None:
    with pytest.raises(Invalid, match=re.escape(message)):
        attachment.new_topic(cluster.metadata.view, name, 1, configs, 1)
    assert attachment.new_topic(cluster.metadata.view, "a", 1, {}, 1).configs == {"retention.ms": "-1"}


async def claim(cluster: Cluster) -> None:
    await claim_bucket(cluster.store, cluster_id_in(cluster.metadata), SystemClock().wall_ms())


async def segments_of(cluster: Cluster, topic: Topic, partition: int = 0) -> list[SegmentEntry]:
    pointer = cluster.metadata.view.find(ManifestPointer, manifest_pointer_key(topic.topic_id, partition))
    assert pointer is not None
    source = ManifestSource(cluster.store)
    return [entry async for entry in source.segments(await source.manifest(pointer))]


async def batches_of(cluster: Cluster, topic: Topic, partition: int = 0) -> list[bytes]:
    """All batches of a partition, read from the store."""
    source, found = ManifestSource(cluster.store), []
    for entry in await segments_of(cluster, topic, partition):
        for block in (await source.footer(entry)).blocks:
            stored = await cluster.store.get_range(entry.key, entry.data_position + block.position, block.length)
            found += [bytes(batch) for batch, _ in iterate_block_batches(audit_block(stored, block))]
    return found


def pending(cluster: Cluster) -> list[PendingTopic]:
    return [*cluster.metadata.view.all(PendingTopic)]


async def test_a_topic_of_another_bucket_is_attached_with_its_offsets(
    cluster: Cluster, ports: MakePorts, other: ArchiveWriter, other_store: ObjectStore, make_batches: Batches,
    background: ThreadBackground,
) -> None:  # fmt: skip
    first, second, third = make_batches(5, [3, 4], epoch=7), make_batches(12, [2], epoch=9), make_batches(0, [6])
    await other.append(0, first, base_offset=5)
    await other.append(0, second)
    await other.append(1, third)
    await claim(cluster)
    source = await stored_topic(other_store, "flights", background)
    topic = new_topic(source)
    read: list[int] = []
    history = await attach(ports(), topic, source, read.append)
    assert [(found.index, found.record_count) for found in history.partitions] == [(0, 9), (1, 6)]
    assert await batches_of(cluster, topic, 0) == [*first, *second]
    assert await batches_of(cluster, topic, 1) == third
    assert sum(read) == sum(map(len, [*first, *second, *third]))
    view = cluster.metadata.view
    log, partition = view.find(Log, log_key(topic.topic_id, 0)), next(p for p in view.all(Partition) if p.index == 0)
    assert (log.ledgers, log.log_start_offset) == ((), 5)
    assert partition.leader_epoch > 9
    assert view.find(ManifestPointer, manifest_pointer_key(topic.topic_id, 0)).end_offset == 14
    assert pending(cluster) == []


async def test_readers_of_the_bucket_see_the_topic_once_a_worker_has_shown_it(
    cluster: Cluster, ports: MakePorts, other: ArchiveWriter, other_store: ObjectStore, make_batches: Batches,
    background: ThreadBackground,
) -> None:  # fmt: skip
    await other.append(0, make_batches(0, [3]))
    await claim(cluster)
    source = await stored_topic(other_store, None, background)
    topic = new_topic(source)
    await attach(ports(), topic, source)
    assert [each.name for each in await live_topics(cluster.store)] == []
    await cluster.start_worker()
    await cluster.until(lambda: not [*cluster.metadata.view.all(RestoredTopic)])
    archive = Archive(cluster.store)
    (seen,) = await archive.topics()
    pointer = await archive.pointer(seen, 0)
    assert (seen.name, seen.topic_id) == (topic.name, topic.topic_id)
    assert pointer == cluster.metadata.view.find(ManifestPointer, manifest_pointer_key(topic.topic_id, 0))


async def test_kafkas_log_files_are_attached(
    cluster: Cluster, ports: MakePorts, log_directory: Path, make_batches: Batches, background: ThreadBackground
) -> None:
    old, new, other = make_batches(100, [3, 4]), make_batches(107, [1, 2], epoch=3), make_batches(0, [5])
    write_logs(log_directory, "flights-0", {100: old, 107: new, 110: []}, tail=bytes(64))
    write_logs(log_directory, "flights-1", {0: other})
    write_logs(log_directory, "flights-2", {0: []})
    write_logs(log_directory, "__consumer_offsets-0", {0: other})
    (log_directory / "log-start-offset-checkpoint").write_text("0\n1\nflights 0 102\n")
    await claim(cluster)
    source = kafka_topic([log_directory], None, background)
    topic = new_topic(source)
    await attach(ports(), topic, source)
    assert topic.partition_count == 3
    assert await batches_of(cluster, topic, 0) == [*old, *new]
    assert await batches_of(cluster, topic, 1) == other
    view = cluster.metadata.view
    assert [view.find(Log, log_key(topic.topic_id, index)).log_start_offset for index in range(3)] == [102, 0, 0]
    assert view.find(ManifestPointer, manifest_pointer_key(topic.topic_id, 2)) is None


async def test_a_partition_whose_records_have_all_expired_goes_on_at_its_next_offset(
    cluster: Cluster, ports: MakePorts, log_directory: Path, make_batches: Batches, background: ThreadBackground
) -> None:
    """Also after a restore from the bucket, which has nothing else that tells it."""
    write_logs(log_directory, "flights-0", {70: [], 107: []}, tail=bytes(64))
    write_logs(log_directory, "flights-1", {0: make_batches(0, [5])})
    (log_directory / "log-start-offset-checkpoint").write_text("0\n1\nflights 0 100\n")
    await claim(cluster)
    source = kafka_topic([log_directory], None, background)
    assert [source.partitions[index].log_start_offset for index in range(2)] == [107, 0]
    topic = new_topic(source)
    history = await attach(ports(), topic, source)
    (in_bucket,) = await read_history(cluster.store, [history.descriptor])
    for found in (history.partitions[0], in_bucket.partitions[0]):
        assert found.pointer is not None
        assert (found.pointer.start_offset, found.pointer.end_offset, found.record_count) == (107, 107, 0)
    view = cluster.metadata.view
    assert [view.find(Log, log_key(topic.topic_id, index)).log_start_offset for index in range(2)] == [107, 0]


async def test_segments_end_at_their_target_size_and_at_the_span_that_retention_wants(
    cluster: Cluster, ports: MakePorts, log_directory: Path, make_batches: Batches, background: ThreadBackground
) -> None:
    batches = make_batches(0, [1] * 40, timestamps=[number * 3_600_000 for number in range(40)])
    write_logs(log_directory, "flights-0", {0: batches})
    await claim(cluster)
    source = kafka_topic([log_directory], None, background)
    topic = new_topic(source, "by-size", **{"stratalog.tier.segment.bytes": str(10 * len(batches[0]))})
    await attach(ports(), topic, source)
    assert [entry.record_count for entry in await segments_of(cluster, topic)] == [10] * 4
    topic = new_topic(source, "by-span", **{"retention.ms": str(8 * 8 * 3_600_000)})
    await attach(ports(), topic, source)
    assert [entry.record_count for entry in await segments_of(cluster, topic)] == [9, 9, 9, 9, 4]
    assert await batches_of(cluster, topic) == batches


def transaction(first: int, producer_id: int, marker: int | None = None) -> bytes:
    key = None if marker is None else bytes([0, 0, 0, marker])
    attributes = TRANSACTIONAL_BIT | (0 if marker is None else CONTROL_BIT)
    record = Record(offset=first, timestamp_ms=1, key=key, value=bytes(6))
    sequence = 0 if marker is None else -1
    identity = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": sequence}
    return bytes(build_batch([record], attributes=attributes, **identity))


async def test_no_segment_ends_in_a_transaction(
    cluster: Cluster, ports: MakePorts, log_directory: Path, background: ThreadBackground
) -> None:
    batches = [
        transaction(0, 5), transaction(1, 6), transaction(2, 5, COMMIT), transaction(3, 6, COMMIT), transaction(4, 5),
        transaction(5, 5, COMMIT),
    ]  # fmt: skip
    write_logs(log_directory, "flights-0", {0: batches})
    await claim(cluster)
    source = kafka_topic([log_directory], None, background)
    topic = new_topic(source, **{"stratalog.tier.segment.bytes": "1"})
    await attach(ports(), topic, source)
    segments = await segments_of(cluster, topic)
    assert [(entry.base_offset, entry.end_offset) for entry in segments] == [(0, 4), (4, 6)]


async def test_aborted_transactions_are_known_to_the_segments_that_hold_them(
    cluster: Cluster, ports: MakePorts, log_directory: Path, background: ThreadBackground
) -> None:
    batches = [
        transaction(0, 5), transaction(1, 6), transaction(2, 5, ABORT), transaction(3, 6, COMMIT), transaction(4, 5),
        transaction(5, 5, ABORT), transaction(6, 7), transaction(7, 7, COMMIT),
    ]  # fmt: skip
    write_logs(log_directory, "flights-0", {0: batches})
    await claim(cluster)
    source = kafka_topic([log_directory], None, background)
    topic = new_topic(source, **{"stratalog.tier.segment.bytes": "1"})
    await attach(ports(), topic, source)
    pointer = cluster.metadata.view.find(ManifestPointer, manifest_pointer_key(topic.topic_id, 0))
    reader = ColdReader(cluster.store, ColdReaderSettings(), SystemClock())
    try:
        assert await reader.aborted_transactions(pointer, 0, 8) == [(5, 0, 2), (5, 4, 5)]
        assert await reader.aborted_transactions(pointer, 3, 8) == [(5, 4, 5)]
        assert await reader.aborted_transactions(pointer, 6, 8) == []
    finally:
        await reader.close()


REFUSED = {
    "an open transaction": lambda make: [*make(0, [2]), transaction(2, 5)],
    "a gap": lambda make: [*make(0, [2]), *make(3, [1])],
    "an overlap": lambda make: [*make(0, [2]), *make(1, [1])],
    "an earlier epoch": lambda make: [*make(0, [2], epoch=4), *make(2, [1], epoch=3)],
    "rot": lambda make: [*make(0, [2]), make(2, [1])[0][:-1] + b"\xff"],
    "a removed record": lambda make: [*make(0, [2]), without_a_record(make(2, [2])[0])],
}


def without_a_record(batch: bytes) -> bytes:
    """A batch as compaction leaves it: of two offsets, one has a record."""
    kept = build_batch([Record(offset=3, timestamp_ms=1, key=b"key", value=b"v")])
    header = bytearray(kept)
    header[0:8] = (2).to_bytes(8, "big")
    header[23:27] = (1).to_bytes(4, "big")
    header[17:21] = crc32c(bytes(header[21:])).to_bytes(4, "big")
    return bytes(header)


@pytest.mark.parametrize("case", REFUSED)
async def test_anything_else_is_refused_and_nothing_is_left(
    cluster: Cluster, ports: MakePorts, log_directory: Path, make_batches: Batches, background: ThreadBackground,
    store_directory: Path, case: str,
) -> None:  # fmt: skip
    await cluster.start_worker(grace_ms=0)
    write_logs(log_directory, "flights-0", {0: REFUSED[case](make_batches)})
    await claim(cluster)
    before = [*cluster.metadata.view.all(Topic)]
    source = kafka_topic([log_directory], None, background)
    with pytest.raises((Corrupt, Invalid)):
        await attach(ports(), new_topic(source, **{"stratalog.tier.segment.bytes": "1"}), source)
    await cluster.until(lambda: not [*cluster.metadata.view.all(DeletedTopic)])
    assert [*cluster.metadata.view.all(Topic)] == before
    assert pending(cluster) == []
    assert [info.key async for info in cluster.store.list("")] == [owner_key(0)]


async def test_a_taken_name_is_refused(
    cluster: Cluster, ports: MakePorts, log_directory: Path, make_batches: Batches, background: ThreadBackground
) -> None:
    write_logs(log_directory, "flights-0", {0: make_batches(0, [2])})
    await claim(cluster)
    source = kafka_topic([log_directory], None, background)
    with pytest.raises(Conflict, match="choose another name"):
        await attach(ports(), new_topic(source, cluster.topic.name), source)
    assert pending(cluster) == []


async def test_a_name_that_is_taken_meanwhile_is_refused(
    cluster: Cluster, ports: MakePorts, log_directory: Path, make_batches: Batches, background: ThreadBackground,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write_logs(log_directory, "flights-0", {0: make_batches(0, [2])})
    await claim(cluster)
    source = kafka_topic([log_directory], None, background)
    topic = new_topic(source)

    async def create_and_mark(store: ObjectStore, pointer: ManifestPointer, now_ms: int) -> None:
        taken = msgspec.structs.replace(topic, topic_id=uuid.uuid4())
        await cluster.metadata.propose(Command(updates=(Put(record=taken),)))
        await mark_committed(store, pointer, now_ms)

    monkeypatch.setattr(attachment, "mark_committed", create_and_mark)
    with pytest.raises(StratalogError):
        await attach(ports(), topic, source)
    assert cluster.metadata.view.find(Topic, topic_key(topic.name)).topic_id != topic.topic_id
    assert [deleted.topic_id for deleted in cluster.metadata.view.all(DeletedTopic)] == [topic.topic_id]


@pytest.mark.parametrize("lost", ["topics/", "segments/", "manifests/"])
async def test_an_object_whose_write_was_not_answered_leaves_no_doubt_about_the_topic(
    cluster: Cluster, ports: MakePorts, log_directory: Path, make_batches: Batches, background: ThreadBackground, lost: str
) -> None:
    write_logs(log_directory, "flights-0", {0: make_batches(0, [2])})
    await claim(cluster)
    source = kafka_topic([log_directory], None, background)
    cluster.store.before = lambda name, key: OutcomeUnknown("no answer") if name == "put" and key.startswith(lost) else None
    with pytest.raises(Unavailable, match="no answer"):
        await attach(ports(), new_topic(source), source)
    assert pending(cluster) == [], "it is given up at once"


async def test_an_attachment_that_died_is_collected_and_cannot_be_finished(
    cluster: Cluster, ports: MakePorts, log_directory: Path, make_batches: Batches, background: ThreadBackground,
    monkeypatch: pytest.MonkeyPatch, store_directory: Path,
) -> None:  # fmt: skip
    write_logs(log_directory, "flights-0", {0: make_batches(0, [2, 2])})
    await claim(cluster)
    source = kafka_topic([log_directory], None, background)
    topic, stopped, go_on = new_topic(source), asyncio.Event(), asyncio.Event()

    async def pause_and_store(*arguments: Any) -> ManifestPointer:
        stopped.set()
        await go_on.wait()
        return await store_manifest(*arguments)

    monkeypatch.setattr(attachment, "store_manifest", pause_and_store)
    attaching = asyncio.ensure_future(attach(ports(), topic, source, expiry_ms=300))
    await stopped.wait()
    assert [found.topic_id for found in pending(cluster)] == [topic.topic_id]
    await cluster.start_worker(grace_ms=0)
    await cluster.until(lambda: not pending(cluster) and not [*cluster.metadata.view.all(DeletedTopic)])
    go_on.set()
    with pytest.raises(StratalogError):
        await attaching
    assert cluster.metadata.view.get(topic_key(topic.name)) is None
    assert cluster.metadata.view.get(pending_topic_key(topic.topic_id)) is None


async def test_a_long_attachment_renews_its_reservation(
    cluster: Cluster, ports: MakePorts, log_directory: Path, make_batches: Batches, background: ThreadBackground,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(attachment, "RENEWAL_SHARE", 0)
    batches = make_batches(0, [1] * 5)
    write_logs(log_directory, "flights-0", {0: batches})
    await claim(cluster)
    source = kafka_topic([log_directory], None, background)
    seen: list[int] = []
    stop = cluster.metadata.view.subscribe(lambda _: seen.extend(found.expires_at_ms for found in pending(cluster)))
    await attach(ports(), new_topic(source, **{"stratalog.tier.segment.bytes": "1"}), source)
    stop()
    assert len(set(seen)) >= 3
    assert seen == sorted(seen)


async def test_the_clusters_defaults_apply_to_attached_history(
    cluster: Cluster, ports: MakePorts, log_directory: Path, make_batches: Batches, background: ThreadBackground
) -> None:
    write_logs(log_directory, "flights-0", {0: make_batches(0, [2, 2])})
    await claim(cluster)
    defaults = DynamicConfig(resource="", configs={"stratalog.tier.compression": "zstd"})
    await cluster.metadata.propose(Command(updates=(Put(record=defaults),)))
    source = kafka_topic([log_directory], None, background)
    topic = new_topic(source)
    await attach(ports(), topic, source)
    (entry,) = await segments_of(cluster, topic)
    (block,) = (await ManifestSource(cluster.store).footer(entry)).blocks
    assert block.length != block.plain_length
    assert topic.configs == {"retention.ms": "-1"}


async def test_a_bucket_of_another_cluster_is_not_written_to(
    cluster: Cluster, ports: MakePorts, log_directory: Path, make_batches: Batches, background: ThreadBackground
) -> None:
    write_logs(log_directory, "flights-0", {0: make_batches(0, [2])})
    source = kafka_topic([log_directory], None, background)
    with pytest.raises(Invalid, match="belongs to no cluster"):
        await attach(ports(), new_topic(source), source)
    await claim_bucket(cluster.store, "another", SystemClock().wall_ms())
    with pytest.raises(Invalid, match="belongs to cluster another"):
        await attach(ports(), new_topic(source), source)
    assert pending(cluster) == []
