"""The audit's plan, results and verdicts, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from unit.broker.mini_cluster import in_thread, run_cluster

from stratalog_core.batches.batch import BatchHeader, read_header
from stratalog_core.batches.compression import NAMES
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt, Refused
from stratalog_pipeline.brokers import Brokers
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.audit import PartitionAudit, audit_segments, audit_tasks, plan_audit, verdicts
from stratalog_pipeline.jobs.batch_statistics import DAY_MS, BatchStatistics, SequenceRun, repeated_records
from stratalog_pipeline.metadata_tables import read_table
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.scan_plan import wanted_partitions
from stratalog_tiering.core.rewritten_batches import emptied
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.store.filesystem import FilesystemStore

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket


def batches(first: int, count: int) -> list[bytes]:
    return [
        bytes(build_batch([Record(offset=o, timestamp_ms=o, key=None, value=b"v" * 20)])) for o in range(first, first + count)
    ]


def audited(bucket: ColdBucket, **options: str) -> list[PartitionAudit]:
    parsed = parse_options({"path": bucket.url, "subscribe": "flights", **options})
    with Bucket(parsed.store) as opened:
        plans = plan_audit(opened, parsed)
        tasks = audit_tasks(plans, parsed.split_bytes)
        results = [result for task in tasks for result in audit_segments(opened, task)]
    return verdicts(plans, results[::-1])


def damage(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_sound_history_is_counted_and_has_its_trees_head_as_digest(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("flights", [[batches(5, 30), batches(35, 20)], []], block_bytes=400)
    whole, empty = audited(cold_bucket)
    assert (whole.start_offset, whole.end_offset, whole.records, whole.batches, whole.segments) == (5, 55, 50, 50, 2)
    assert (whole.problems, whole.tree_size, len(whole.digest)) == ((), 50, 64)
    assert (empty.partition, empty.records, empty.digest, empty.problems) == (1, 0, "", ())
    assert audited(cold_bucket, splitBytes="1") == [whole, empty]


def test_a_compacted_history_is_sound_and_keeps_its_digest(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("flights", [[keyed(0, 40), keyed(40, 30)]])
    (before,) = audited(cold_bucket)
    cold_bucket.compact("flights", 0)
    (after,) = audited(cold_bucket)
    assert (before.records, after.records, after.batches) == (70, 10, 10)
    assert (after.start_offset, after.end_offset, after.digest) == (0, 70, before.digest)
    assert after.problems == ()
    damage(cold_bucket.root / cold_bucket.segment_keys["flights", 0][0], 70)
    assert audited(cold_bucket)[0].problems == (), "the segments before it are not its history any more"


def keyed(first: int, count: int) -> list[bytes]:
    """Batches of one record, with ten keys in turn."""
    return [
        bytes(build_batch([Record(offset=o, timestamp_ms=o, key=b"%d" % (o % 10), value=b"v")]))
        for o in range(first, first + count)
    ]


def test_segments_compression_and_encryption_do_not_change_the_digest(cold_bucket: ColdBucket, tmp_path: Path) -> None:
    cold_bucket.add_topic("plain", [[batches(0, 30), batches(30, 20)]], block_bytes=1000)
    cold_bucket.add_topic("compressed", [[batches(0, 30), batches(30, 20)]], block_bytes=1000, zstd_level=3)
    cold_bucket.add_topic("merged", [[batches(0, 50)]])
    cold_bucket.encrypt(tmp_path / "keys")
    cold_bucket.add_topic("encrypted", [[batches(0, 30), batches(30, 20)]], block_bytes=1000, zstd_level=3)
    found = [audited(cold_bucket, subscribe=name)[0] for name in ("plain", "compressed", "merged", "encrypted")]
    assert {one.digest for one in found} == {found[0].digest}
    assert found[1].stored_bytes < found[0].stored_bytes
    assert {one.batch_bytes for one in found} == {found[0].batch_bytes}


def test_all_damage_is_named_and_the_rest_is_still_counted(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 30), batches(30, 20), batches(50, 10)]], block_bytes=400)
    first, second, third = (cold_bucket.root / key for key in cold_bucket.segment_keys["flights", 0])
    damage(first, 20)
    second.write_bytes(second.read_bytes()[:-3])
    third.unlink()
    (verdict,) = audited(cold_bucket)
    assert len(verdict.problems) == 3
    assert first.name in verdict.problems[0]
    assert "block at byte 0, offsets 0.." in verdict.problems[0]
    assert second.name in verdict.problems[1]
    assert third.name in verdict.problems[2]
    assert verdict.digest == ""
    assert 20 <= verdict.records < 30


def test_a_block_that_cannot_be_read_alone_is_a_problem(cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are read together: the sound ones beside it are still audited."""
    cold_bucket.add_topic("flights", [[batches(0, 30)]], block_bytes=400)
    (key,) = cold_bucket.segment_keys["flights", 0]
    unreadable, read = 1000, FilesystemStore.get_range

    async def failing(store: FilesystemStore, of: str, start: int, length: int, **how: bool) -> memoryview:
        if of == key and start <= unreadable < start + length:
            raise Corrupt("the disk cannot read it", key=of)
        return await read(store, of, start, length, **how)

    monkeypatch.setattr(FilesystemStore, "get_range", failing)
    (verdict,) = audited(cold_bucket)
    (problem,) = verdict.problems
    assert "the disk cannot read it" in problem
    assert 20 <= verdict.records < 30


@pytest.mark.parametrize("request_name", ["get", "get_range"])
@pytest.mark.parametrize("allowed", [0, 1, 2, 3, 4])
def test_a_store_that_refuses_requests_is_an_error_and_no_problem_of_the_history(
    cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch, request_name: str, allowed: int
) -> None:
    """Credentials may expire at any moment."""
    cold_bucket.add_topic("flights", [[batches(0, 30)]], block_bytes=400)
    answer, answered = getattr(FilesystemStore, request_name), 0

    async def expiring(store: FilesystemStore, *arguments: Any, **options: Any) -> Any:
        nonlocal answered
        answered += 1
        if answered > allowed:
            raise Refused("the credentials have expired")
        return await answer(store, *arguments, **options)

    monkeypatch.setattr(FilesystemStore, request_name, expiring)
    try:
        (verdict,) = audited(cold_bucket)
    except Refused:
        return
    assert answered <= allowed
    assert verdict.problems == ()


def test_a_damaged_manifest_page_is_a_problem_and_other_partitions_are_audited(cold_bucket: ColdBucket) -> None:
    limits = ManifestLimits(page_segments=2, inline_segments_max=2)
    segments = [batches(first, 10) for first in range(0, 100, 10)]
    cold_bucket.add_topic("flights", [segments, [batches(0, 10)]], limits=limits)
    page = next(path for path in cold_bucket.root.rglob("*") if path.is_file() and b"SLMFPAGE" in path.read_bytes()[:64])
    damage(page, page.stat().st_size // 2)
    first, second = audited(cold_bucket)
    assert any(page.name in problem for problem in first.problems)
    assert first.digest == ""
    assert (second.records, second.problems) == (10, ())


def test_batches_that_are_not_the_trees_leaves_are_a_problem(cold_bucket: ColdBucket) -> None:
    """Every checksum of the other topic's segment holds; only the tree, which the manifest contains, tells them apart."""
    cold_bucket.add_topic("flights", [[batches(0, 10)]])
    different = bytes(build_batch([Record(offset=9, timestamp_ms=9, key=None, value=b"w")]))
    cold_bucket.add_topic("other", [[[*batches(0, 9), different]]])
    parsed = parse_options({"path": cold_bucket.url, "subscribe": "flights,other"})
    with Bucket(parsed.store) as opened:
        plans = plan_audit(opened, parsed)
        ((flights, other),) = (audit_segments(opened, task) for task in audit_tasks(plans, parsed.split_bytes))
    assert [verdict.problems for verdict in verdicts(plans, [flights, other])] == [(), ()]
    exchanged = [replace(flights, name=other.name), replace(other, name=flights.name)]
    for verdict in verdicts(plans, exchanged):
        key = cold_bucket.segment_keys[verdict.topic, 0][0]
        assert verdict.problems == (f"segment {key}: leaves 8..9 are not those of the partition's tree",)
        assert verdict.digest == ""


def test_a_segment_that_no_task_read_is_a_problem(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 10)]])
    parsed = parse_options({"path": cold_bucket.url, "subscribe": "flights"})
    with Bucket(parsed.store) as opened:
        (verdict,) = verdicts(plan_audit(opened, parsed), [])
    assert verdict.problems == (f"segment {cold_bucket.segment_keys['flights', 0][0]} was not read",)
    assert verdict.digest == ""


def test_late_records_are_counted_across_segments(cold_bucket: ColdBucket) -> None:
    def at(first: int, times: Sequence[int]) -> list[bytes]:
        return [
            bytes(build_batch([Record(offset=o, timestamp_ms=time, key=None, value=b"v")]))
            for o, time in enumerate(times, first)
        ]

    cold_bucket.add_topic("flights", [[at(0, [1000, 3 * DAY_MS]), at(2, [2 * DAY_MS, 4 * DAY_MS, 4 * DAY_MS - 1])]])
    (verdict,) = audited(cold_bucket)
    assert (verdict.late_records, verdict.lateness_max_ms) == (2, DAY_MS)
    assert verdict.records_by_day == {0: 1, 2: 1, 3: 2, 4: 1}


def test_statistics_of_codecs(cold_bucket: ColdBucket) -> None:
    records = [Record(offset=o, timestamp_ms=1, key=None, value=b"v" * 20) for o in range(4)]
    statistics = BatchStatistics()
    for codec in NAMES.values():
        statistics.add(read_header(build_batch(records, compression=codec)))
    assert set(statistics.bytes_by_codec) == set(NAMES)
    assert (statistics.records, statistics.batches) == (4 * len(NAMES), len(NAMES))


@pytest.mark.parametrize(
    ("runs", "repeated"),
    [
        ([(7, 0, 0, 10), (8, 0, 0, 10)], 0),
        ([(7, 0, 0, 10), (7, 0, 10, 5), (7, 1, 0, 5)], 0),
        ([(7, 0, 0, 10), (7, 0, 5, 5)], 5),
        ([(7, 0, 0, 10), (7, 0, 8, 4)], 2),
        ([(7, 0, 0, 10), (7, 0, 3, 2), (7, 0, 10, 1)], 2),
        ([(7, 0, 2**31 - 3, 5), (7, 0, 2, 4)], 0),
        ([(7, 0, 2**31 - 3, 5), (7, 0, 0, 4)], 2),
        ([(7, 0, 100, 5), (7, 0, 200, 5)], 0),
    ],
)
def test_repeated_records(runs: Sequence[tuple[int, int, int, int]], repeated: int) -> None:
    assert repeated_records(SequenceRun(*run) for run in runs) == repeated


def create_topic(bootstrap: str, records: int) -> None:
    """Create topic ``rides`` and write to it, so that its partition has an owner."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic("rides", 1, 1)])["rides"].result(60)
    write(bootstrap, records)


def write(bootstrap: str, records: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for number in range(records):
        producer.produce("rides", str(number), partition=0)
    assert producer.flush(60) == 0


async def test_a_topic_that_only_the_bucket_has_is_not_asked_of_the_brokers(cold_bucket: ColdBucket, tmp_path: Path) -> None:
    """As after `stratalog tier detach`: its history stays in the bucket."""
    cold_bucket.add_topic("flights", [[batches(0, 10)]])
    async with run_cluster(tmp_path / "cluster") as cluster:

        def steps() -> None:
            create_topic(cluster.bootstrap, 1)
            given = {"path": cold_bucket.url, "subscribePattern": ".*", "kafka.bootstrap.servers": cluster.bootstrap}
            parsed = parse_options(given)
            with Bucket(parsed.store) as opened:
                plans = plan_audit(opened, parsed)
                names = wanted_partitions(opened, parsed)
            assert {plan.name.topic: plan.problems for plan in plans} == {"flights": (), "rides": ()}
            tail = parse_options({**given, "table": "tail"})
            rows = [row for batch in read_table(tail, names, ("topic", "log_end_offset")) for row in batch.to_pylist()]
            assert [row["topic"] for row in rows] == ["rides"]

        await in_thread(steps)


async def test_what_is_offloaded_during_an_audit_is_no_contradiction_to_the_brokers(
    cold_bucket: ColdBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_cluster(tmp_path / "cluster") as cluster:

        def steps() -> None:
            create_topic(cluster.bootstrap, 10)
            given = {"path": cold_bucket.url, "subscribe": "rides", "kafka.bootstrap.servers": cluster.bootstrap}
            parsed = parse_options(given)
            (served,) = Brokers(parsed).topics(parsed.wanted)
            assert cold_bucket.add_topic("rides", [[batches(0, 10)]], topic_id=served.topic_id) == served.topic_id
            limits = Brokers.limits

            def then_more_is_offloaded(*given: Any) -> Any:
                found = limits(*given)
                write(cluster.bootstrap, 5)
                cold_bucket.extend("rides", 0, batches(10, 5))
                return found

            monkeypatch.setattr(Brokers, "limits", then_more_is_offloaded)
            with Bucket(parsed.store) as opened:
                (plan,) = plan_audit(opened, parsed)
            assert plan.problems == ()

        await in_thread(steps)


async def test_brokers_that_lack_records_of_the_bucket_are_a_problem(cold_bucket: ColdBucket, tmp_path: Path) -> None:
    async with run_cluster(tmp_path / "cluster") as cluster:

        def steps() -> None:
            create_topic(cluster.bootstrap, 1)
            parsed = parse_options(
                {"path": cold_bucket.url, "subscribe": "rides", "kafka.bootstrap.servers": cluster.bootstrap}
            )
            (served,) = Brokers(parsed).topics(parsed.wanted)
            cold_bucket.add_topic("rides", [[batches(5, 10)]], topic_id=served.topic_id)
            with Bucket(parsed.store) as opened:
                (plan,) = plan_audit(opened, parsed)
            assert plan.problems == (
                "the brokers' log begins at offset 0, the bucket at 5: records are missing",
                "the brokers' log ends at offset 1, the bucket only at 15",
            )

        await in_thread(steps)


def a_header(offset: int, producer_id: int, base_sequence: int, timestamp_ms: int = 1, epoch: int = 1) -> BatchHeader:
    """The header of a batch of two records."""
    records = [Record(offset=o, timestamp_ms=timestamp_ms, key=None, value=None) for o in (offset, offset + 1)]
    return read_header(build_batch(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=base_sequence))


def test_producers_that_alternate_have_few_runs() -> None:
    """The driver gets the runs of all segments."""
    statistics = BatchStatistics()
    for number in range(400):
        statistics.add(a_header(2 * number, number % 4, 2 * (number // 4)))
    statistics.add(a_header(800, 2, 100))
    assert statistics.runs == [
        *(SequenceRun(producer, 1, 0, 200) for producer in range(3)), SequenceRun(2, 1, 100, 2), SequenceRun(3, 1, 0, 200)
    ]  # fmt: skip
    assert repeated_records(statistics.runs) == 2


def test_epochs_within_a_segment_and_compacted_batches_leave_few_runs() -> None:
    """Each transaction raises its producer's epoch; a compaction leaves gaps."""
    statistics = BatchStatistics()
    for number in range(400):
        statistics.add(a_header(4 * number, 7, 0, epoch=number))
        statistics.add(a_header(4 * number + 2, 7, 0 if number % 100 == 0 else 2, epoch=number))
    for number in range(400):
        statistics.add(a_header(1600 + 4 * number, 8, 4 * number))
    assert [(run.producer_id, run.epoch, run.length) for run in statistics.runs] == [
        (7, 0, 2), (7, 0, 2), (7, 399, 4), (8, 1, 1598),
    ]  # fmt: skip
    assert statistics.settled_repeats + repeated_records(statistics.runs) == 8


def test_a_gap_hides_no_repeated_batch() -> None:
    statistics = BatchStatistics()
    for offset, sequence in enumerate((0, 2, 4, 6, 8, 2, 6, 10, 20, 24)):
        statistics.add(a_header(2 * offset, 7, sequence))
    assert repeated_records(statistics.runs) == 4
    assert len(statistics.runs) == 4


def test_records_without_a_timestamp_are_not_late() -> None:
    statistics = BatchStatistics()
    for offset, timestamp_ms in ((0, 5000), (2, -1), (4, 4000)):
        statistics.add(a_header(offset, 5, offset, timestamp_ms))
    assert (statistics.late_records, statistics.lateness_max_ms, statistics.newest_ms) == (2, 1000, 5000)


def test_neighbouring_batches_of_a_producer_are_one_run() -> None:
    statistics = BatchStatistics()
    for offset, sequence in ((0, 2**31 - 2), (2, 0), (4, 2), (6, 2)):
        statistics.add(a_header(offset, 5, sequence))
    assert statistics.runs == [SequenceRun(5, 1, 2**31 - 2, 6), SequenceRun(5, 1, 2, 2)]
    assert repeated_records(statistics.runs) == 2


def test_a_batch_that_has_lost_its_records_is_not_late() -> None:
    """A compaction or an erasure empties it, and it keeps its greatest timestamp."""
    newest = build_batch([Record(offset=0, timestamp_ms=5000, key=None, value=b"v")])
    late = read_header(build_batch([Record(offset=1, timestamp_ms=1000, key=None, value=b"v")]))
    statistics = BatchStatistics()
    statistics.add(read_header(newest))
    statistics.add(read_header(emptied(late)))
    assert (statistics.records, statistics.late_records, statistics.lateness_max_ms) == (1, 0, 0)
