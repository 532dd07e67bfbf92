"""Scans of a bucket without Spark: what is planned and read is exactly what was written, or a located error."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from crc32c import crc32c

from stratalog_core.batches.batch import CRC_START, TRANSACTIONAL_BIT
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt, Invalid, StorageFailed
from stratalog_pipeline.arrow.schema import COLUMNS
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.pruning import EVERYTHING, Pruning, TimeRange
from stratalog_pipeline.scan import REPORTED_MAX, scan_split
from stratalog_pipeline.scan_plan import plan_scan
from stratalog_tiering.format.footer import AbortedTransaction
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.format.object_keys import topic_key, version_key
from stratalog_tiering.store import ObjectInfo
from stratalog_tiering.store.filesystem import FilesystemStore

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket


def batches(base: int, count: int, per_batch: int = 5, codec: int = 4) -> list[bytes]:
    """Records whose timestamp is 1000 times their offset, but every seventh is an hour early."""
    made = []
    for first in range(base, base + count, per_batch):
        records = [
            Record(
                offset=offset,
                timestamp_ms=1000 * offset - (3_600_000 if offset % 7 == 3 else 0),
                key=f"key-{offset}".encode(),
                value=b"v" * (offset % 50),
            )
            for offset in range(first, min(first + per_batch, base + count))
        ]
        made.append(bytes(build_batch(records, compression=codec)))
    return made


def read(bucket: ColdBucket, pruning: Pruning = EVERYTHING, /, **options: str) -> list[dict[str, Any]]:
    parsed = parse_options({"path": bucket.url, **options})
    with Bucket(parsed.store, parsed.second_store) as opened:
        rows: list[dict[str, Any]] = []
        for split in plan_scan(opened, parsed, pruning).splits:
            for batch in scan_split(
                opened, split, COLUMNS, read_committed=parsed.read_committed, times=pruning.times,
                skips_corrupt=parsed.skips_corrupt,
            ):  # fmt: skip
                rows.extend(batch.to_pylist())
    return rows


def positions(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(row["topic"], row["partition"], row["offset"]) for row in rows]


def two_topics(bucket: ColdBucket) -> None:
    bucket.add_topic("flights", [[batches(0, 100), batches(100, 60)], [batches(20, 50)], []], block_bytes=300)
    bucket.add_topic("weather", [[batches(0, 10)]])


def test_all_records_come_once_and_in_order_however_they_are_cut(cold_bucket: ColdBucket) -> None:
    two_topics(cold_bucket)
    expected = [("flights", 0, o) for o in range(160)] + [("flights", 1, o) for o in range(20, 70)]
    for split_bytes in ("1", "700", "100000"):
        rows = read(cold_bucket, subscribe="flights", splitBytes=split_bytes)
        assert positions(rows) == expected
        assert all(row["key"] == f"key-{row['offset']}".encode() for row in rows)
    assert positions(read(cold_bucket, subscribe="flights", minPartitions="20")) == expected
    assert positions(read(cold_bucket, subscribe="flights", maxRecordsPerPartition="9")) == expected


def test_compressed_segments_have_the_same_rows(cold_bucket: ColdBucket) -> None:
    segments = [[batches(0, 300, codec=0), batches(300, 60, codec=0)]]
    cold_bucket.add_topic("plain", segments, block_bytes=2000)
    cold_bucket.add_topic("compressed", segments, block_bytes=2000, zstd_level=3)
    plain, compressed = (cold_bucket.root / cold_bucket.segment_keys[name, 0][0] for name in ("plain", "compressed"))
    assert compressed.stat().st_size < plain.stat().st_size * 0.7
    for split_bytes in ("1", "100000"):
        expected, found = (read(cold_bucket, subscribe=name, splitBytes=split_bytes) for name in ("plain", "compressed"))
        assert [{**row, "topic": ""} for row in found] == [{**row, "topic": ""} for row in expected]


@pytest.mark.parametrize("zstd_level", [None, 3])
def test_encrypted_segments_have_the_same_rows(cold_bucket: ColdBucket, tmp_path: Path, zstd_level: int | None) -> None:
    segments = [[batches(0, 300, codec=0), batches(300, 60, codec=0)]]
    cold_bucket.add_topic("plain", segments, block_bytes=2000)
    cold_bucket.encrypt(tmp_path / "keys")
    cold_bucket.add_topic("encrypted", segments, block_bytes=2000, zstd_level=zstd_level)
    for split_bytes in ("1", "100000"):
        expected, found = (read(cold_bucket, subscribe=name, splitBytes=split_bytes) for name in ("plain", "encrypted"))
        assert [{**row, "topic": ""} for row in found] == [{**row, "topic": ""} for row in expected]
    (tmp_path / "keys/k1.key").unlink()
    assert read(cold_bucket, subscribe="plain")
    with pytest.raises(StorageFailed, match="'k1' is not in"):
        read(cold_bucket, subscribe="encrypted")


def test_topics_by_pattern_and_assignment(cold_bucket: ColdBucket) -> None:
    two_topics(cold_bucket)
    assert {row["topic"] for row in read(cold_bucket, subscribePattern=".*")} == {"flights", "weather"}
    assert {row["partition"] for row in read(cold_bucket, assign='{"flights": [1]}')} == {1}
    assert read(cold_bucket, assign='{"flights": [2]}') == []


def test_offsets_bound_what_is_read(cold_bucket: ColdBucket) -> None:
    two_topics(cold_bucket)
    rows = read(
        cold_bucket,
        assign='{"flights": [0, 1]}',
        startingOffsets='{"flights": {"0": 98, "1": -2}}',
        endingOffsets='{"flights": {"0": 103, "1": 22}}',
    )
    assert [row[2] for row in positions(rows)] == [98, 99, 100, 101, 102, 20, 21]


def test_times_bound_what_is_read_by_the_first_record_not_earlier(cold_bucket: ColdBucket) -> None:
    two_topics(cold_bucket)
    # Offset 94 is an hour early, so 95 is the first at 93.5 s or later … of those from 94 on.
    rows = read(cold_bucket, assign='{"flights": [0]}', startingTimestamp="93500", endingTimestamp="97000")
    assert [row["offset"] for row in rows] == [95, 96]
    by_partition = '{"flights": {"0": 150000, "1": 60500}}'
    rows = read(cold_bucket, assign='{"flights": [0, 1]}', startingOffsetsByTimestamp=by_partition)
    assert positions(rows)[0] == ("flights", 0, 151 if 150 % 7 == 3 else 150)
    assert [row["offset"] for row in rows if row["partition"] == 1] == list(range(61, 70))


def test_a_start_later_than_every_record_fails_or_reads_nothing(cold_bucket: ColdBucket) -> None:
    two_topics(cold_bucket)
    with pytest.raises(Invalid, match="flights-1: there is no record at or after the requested start time"):
        read(cold_bucket, assign='{"flights": [1]}', startingTimestamp="999999999")
    options = {"startingTimestamp": "999999999", "startingOffsetsByTimestampStrategy": "latest"}
    assert read(cold_bucket, assign='{"flights": [1]}', **options) == []


def test_a_start_after_its_end_fails_once_times_are_resolved(cold_bucket: ColdBucket) -> None:
    two_topics(cold_bucket)
    with pytest.raises(Invalid, match="flights-0: the read starts at offset 95, which is after its end, 10"):
        read(cold_bucket, assign='{"flights": [0]}', startingTimestamp="93500", endingOffsets='{"flights": {"0": 10}}')
    assert read(cold_bucket, assign='{"flights": [0]}', endingTimestamp="0") == []


def test_offsets_below_retention_fail_unless_data_loss_is_allowed(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("short", [[batches(0, 20), batches(20, 20), batches(40, 20)]], drop_below=20)
    assert read(cold_bucket, subscribe="short")[0]["offset"] == 20
    start = '{"short": {"0": 5}}'
    with pytest.raises(Invalid, match=r"short-0: offsets 5\.\.60 are requested; the bucket holds 20\.\.60"):
        read(cold_bucket, subscribe="short", startingOffsets=start)
    rows = read(cold_bucket, subscribe="short", startingOffsets=start, failOnDataLoss="false")
    assert [row["offset"] for row in rows] == list(range(20, 60))


def test_sealed_index_pages_are_followed(cold_bucket: ColdBucket) -> None:
    limits = ManifestLimits(inline_segments_max=2, page_segments=2, page_fan_in=50)
    segments = [batches(base, 10) for base in range(0, 120, 10)]
    cold_bucket.add_topic("long", [segments], limits=limits)
    assert [row["offset"] for row in read(cold_bucket, subscribe="long")] == list(range(120))
    middle = {"startingOffsets": '{"long": {"0": 33}}', "endingOffsets": '{"long": {"0": 57}}'}
    assert [row["offset"] for row in read(cold_bucket, subscribe="long", **middle)] == list(range(33, 57))


def test_pruning_passes_over_partitions_offsets_and_old_blocks(cold_bucket: ColdBucket) -> None:
    two_topics(cold_bucket)
    only = Pruning(topics=frozenset(("flights",)), partitions=frozenset((1,)))
    assert {row[:2] for row in positions(read(cold_bucket, only, subscribePattern=".*"))} == {("flights", 1)}
    late = Pruning(times=TimeRange(first_ms=155_000))
    offsets = [row["offset"] for row in read(cold_bucket, late, assign='{"flights": [0]}')]
    assert offsets[-1] == 159
    assert 5 <= len(offsets) < 30
    early = Pruning(times=TimeRange(end_ms=20_000))
    offsets = [row["offset"] for row in read(cold_bucket, early, assign='{"flights": [0]}')]
    assert set(range(20)) | {offset for offset in range(160) if offset % 7 == 3} <= set(offsets), "some are an hour early"
    cold_bucket.add_topic("ones", [[batches(0, 100, per_batch=1), batches(100, 60, per_batch=1)]])
    found = {row["offset"] for row in read(cold_bucket, early, subscribe="ones")}
    assert {offset for offset in range(160) if offset < 20 or offset % 7 == 3} <= found
    late_only = Pruning(times=TimeRange(first_ms=101_000, end_ms=102_000))
    assert {row["offset"] for row in read(cold_bucket, late_only, subscribe="ones")} <= set(range(100, 160))


def test_aborted_transactions_are_left_out_of_committed_reads(cold_bucket: ColdBucket) -> None:
    def transactional(offset: int, producer_id: int) -> bytes:
        records = [Record(offset=offset, timestamp_ms=1, key=None, value=b"x")]
        return bytes(build_batch(records, attributes=TRANSACTIONAL_BIT, producer_id=producer_id, producer_epoch=0))

    run = [transactional(0, 7), transactional(1, 8), transactional(2, 7), *batches(3, 2), transactional(5, 7)]
    aborted = (AbortedTransaction(producer_id=7, first_offset=0, last_offset=4, last_stable_offset=5),)
    cold_bucket.add_topic("bank", [[run]], aborted=aborted)
    assert [row["offset"] for row in read(cold_bucket, subscribe="bank")] == [1, 3, 4, 5]
    assert len(read(cold_bucket, subscribe="bank", isolationLevel="read_uncommitted")) == 6


def test_a_flipped_byte_names_segment_block_and_offsets(cold_bucket: ColdBucket) -> None:
    two_topics(cold_bucket)
    path = cold_bucket.root / cold_bucket.segment_keys["flights", 0][1]
    content = bytearray(path.read_bytes())
    content[100] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(Corrupt) as refused:
        read(cold_bucket, subscribe="flights")
    assert f"segment {cold_bucket.segment_keys['flights', 0][1]}, block at byte 0, offsets 100.." in refused.value.message
    untouched = read(cold_bucket, assign='{"flights": [1]}')
    assert len(untouched) == 50


def flip(path: Path, *places: int) -> None:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 0x40
    path.write_bytes(content)


def test_a_damaged_block_is_a_reported_gap_on_request(cold_bucket: ColdBucket, caplog: pytest.LogCaptureFixture) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 100), batches(100, 60)], [batches(20, 50)]], block_bytes=300)
    whole = read(cold_bucket, subscribe="flights", onCorruptBatch="skip")
    assert not caplog.records
    key = cold_bucket.segment_keys["flights", 0][1]
    flip(cold_bucket.root / key, 100)
    found = read(cold_bucket, subscribe="flights", onCorruptBatch="skip")
    one, total = (record.getMessage() for record in caplog.records)
    place = re.match(rf"flights-0: left out \(.*\): segment {key}, block at byte 0, offsets 100\.\.(\d+): ", one)
    assert place is not None
    assert found == [row for row in whole if row["partition"] or not 100 <= row["offset"] <= int(place[1])]
    assert total.startswith("flights-0, offsets 0..159: 1 damaged blocks and batches were left out")


def test_a_batch_that_cannot_be_read_is_a_reported_gap_on_request(
    cold_bucket: ColdBucket, caplog: pytest.LogCaptureFixture
) -> None:
    written = [bytearray(batch) for batch in batches(0, 20, codec=0)]
    written[1][-1] = 2  # a header that the record has no bytes for
    written[1][17:21] = crc32c(memoryview(written[1])[CRC_START:]).to_bytes(4, "big")
    cold_bucket.add_topic("flights", [[written]])
    with pytest.raises(Corrupt, match=r"record batch at offsets 5\.\.9"):
        read(cold_bucket, subscribe="flights")
    found = read(cold_bucket, subscribe="flights", onCorruptBatch="skip")
    assert [row["offset"] for row in found] == [*range(5), *range(10, 20)]
    assert "block at byte 0, offsets 0..19: flights-0: record batch at offsets 5..9: " in caplog.records[0].getMessage()


def test_what_is_left_out_is_reported_within_bounds(cold_bucket: ColdBucket, caplog: pytest.LogCaptureFixture) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 5 * (REPORTED_MAX + 3))]], block_bytes=1)
    path = cold_bucket.root / cold_bucket.segment_keys["flights", 0][0]
    with Bucket(cold_bucket.url) as opened:
        (split,) = plan_scan(opened, parse_options({"path": cold_bucket.url, "subscribe": "flights"})).splits
        blocks = opened.run(opened.source.footer(split.slices[0].segment)).blocks
    flip(path, *(block.position + 70 for block in blocks))
    assert read(cold_bucket, subscribe="flights", onCorruptBatch="skip") == []
    assert len(caplog.records) == REPORTED_MAX + 1
    assert f": {REPORTED_MAX + 3} damaged blocks" in caplog.records[-1].getMessage()


def test_a_missing_segment_fails_even_if_damage_is_left_out(cold_bucket: ColdBucket) -> None:
    two_topics(cold_bucket)
    (cold_bucket.root / cold_bucket.segment_keys["flights", 0][0]).unlink()
    with pytest.raises(Corrupt):
        read(cold_bucket, subscribe="flights", onCorruptBatch="skip")


def test_a_missing_segment_and_a_foreign_footer_are_corruption(cold_bucket: ColdBucket) -> None:
    two_topics(cold_bucket)
    first, second = (cold_bucket.root / key for key in cold_bucket.segment_keys["flights", 0])
    kept = second.read_bytes()
    second.write_bytes(kept[:-40] + bytes(40))
    with pytest.raises(Corrupt, match=second.name):
        read(cold_bucket, subscribe="flights")
    second.write_bytes(kept)
    first.unlink()
    with pytest.raises(Corrupt, match=first.name):
        read(cold_bucket, subscribe="flights")


def test_deleted_topics_are_gone_and_namesakes_are_told_apart(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("again", [[batches(0, 5)]], deleted_at_ms=99)
    cold_bucket.add_topic("again", [[batches(0, 7)]])
    assert len(read(cold_bucket, subscribe="again")) == 7


def test_a_topic_that_a_worker_deletes_while_topics_are_read_is_left_out(
    cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream reads all topics at each trigger, so it meets each deletion in the bucket."""
    cold_bucket.add_topic("t", [[batches(0, 10)]])
    gone = cold_bucket.add_topic("gone", [[batches(0, 10)]], deleted_at_ms=1)
    descriptor = cold_bucket.root / topic_key(gone, 1)
    listed = FilesystemStore.list

    async def list_before_deletion(store: FilesystemStore, prefix: str) -> AsyncIterator[ObjectInfo]:
        async for info in listed(store, prefix):
            yield info
        descriptor.unlink(missing_ok=True)

    monkeypatch.setattr(FilesystemStore, "list", list_before_deletion)
    with Bucket(cold_bucket.url) as bucket:
        assert [topic.name for topic in bucket.topics()] == ["t"]
    assert not descriptor.exists()


def test_an_ambiguous_name_fails_only_reads_of_that_name(cold_bucket: ColdBucket) -> None:
    older = cold_bucket.add_topic("again", [[batches(0, 7)]])
    newer = cold_bucket.add_topic("again", [[batches(0, 9)]])
    cold_bucket.add_topic("flights", [[batches(0, 5)]])
    assert len(read(cold_bucket, subscribe="flights")) == len(read(cold_bucket, subscribePattern="f.*")) == 5
    for wanted in ({"subscribe": "again"}, {"subscribePattern": ".*"}, {"assign": '{"again": [0]}'}):
        with pytest.raises(Invalid, match=f"{older} and {newer}.*option 'topicIds'"):
            read(cold_bucket, **wanted)
    assert len(read(cold_bucket, subscribe="again", topicIds=str(older))) == 7
    assert len(read(cold_bucket, subscribePattern=".*", topicIds=newer.hex)) == 14
    with pytest.raises(Invalid, match="not in the bucket"):
        read(cold_bucket, subscribe="again", topicIds=str(UUID(int=99)))
    with pytest.raises(Invalid, match="must be comma-separated topic ids"):
        read(cold_bucket, subscribe="again", topicIds="again")


def test_a_directory_that_is_not_there_is_refused_and_not_created(cold_bucket: ColdBucket) -> None:
    missing = cold_bucket.root / "typo"
    with pytest.raises(Invalid, match="there is no directory"):
        Bucket(f"file://{missing}")
    assert not missing.exists()


def test_a_marker_of_another_partition_is_corruption(cold_bucket: ColdBucket) -> None:
    topic_id = cold_bucket.add_topic("flights", [[batches(0, 5)], [batches(0, 5)]])
    directory = cold_bucket.root / "manifests" / topic_id.hex
    for path in (directory / "1").iterdir():
        path.unlink()
    for path in (directory / "0").iterdir():
        (directory / "1" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(Corrupt, match=r"not the one in its own key"):
        read(cold_bucket, subscribe="flights")


def test_a_manifest_of_another_partition_is_corruption(cold_bucket: ColdBucket) -> None:
    topic_id = cold_bucket.add_topic("flights", [[batches(0, 5)], [batches(0, 5)]])
    (manifest,) = (cold_bucket.root / "manifests" / topic_id.hex / "0").glob("*.manifest")
    for path in (cold_bucket.root / "manifests" / topic_id.hex / "1").iterdir():
        path.unlink()
    (cold_bucket.root / version_key(topic_id, 1, 1)).write_bytes(manifest.read_bytes())
    with pytest.raises(Corrupt, match=rf"is version 1 of {topic_id}-0, which is not the one in its own key"):
        read(cold_bucket, subscribe="flights")


def test_damage_is_read_from_the_second_copy(cold_bucket: ColdBucket, tmp_path: Path) -> None:
    two_topics(cold_bucket)
    expected = read(cold_bucket, subscribe="flights")
    second = tmp_path / "second"
    shutil.copytree(cold_bucket.root, second)
    altered, missing, *_ = (cold_bucket.root / key for key in cold_bucket.segment_keys["flights", 0])
    content = bytearray(altered.read_bytes())
    content[100] ^= 1
    altered.write_bytes(content)
    missing.unlink()
    with pytest.raises(Corrupt):
        read(cold_bucket, subscribe="flights")
    assert read(cold_bucket, subscribe="flights", secondStore=str(second)) == expected
    shutil.rmtree(cold_bucket.root)
    assert read(cold_bucket, subscribe="flights", secondStore=str(second)) == expected


def keyed(base: int, rows: Sequence[tuple[str, str | None]], codec: int = 4) -> bytes:
    records = [
        Record(offset=base + step, timestamp_ms=base + step, key=key.encode(), value=None if value is None else value.encode())
        for step, (key, value) in enumerate(rows)
    ]
    return bytes(build_batch(records, compression=codec))


def test_a_compacted_topic_is_read_across_its_gaps(cold_bucket: ColdBucket) -> None:
    segments = [
        [keyed(0, [("a", "1"), ("b", "1"), ("c", "1")]), keyed(3, [("a", "2"), ("b", "2")], codec=0)],
        [keyed(5, [("c", None), ("d", "1")]), keyed(7, [("a", "3")]), keyed(8, [("b", "3")])],
    ]
    cold_bucket.add_topic("table", [segments])
    cold_bucket.compact("table", 0, now_ms=100)
    found = [
        (row["offset"], row["key"], row["value"], row["timestamp"].timestamp() * 1000)
        for row in read(cold_bucket, subscribe="table")
    ]
    assert found == [(5, b"c", None, 5), (6, b"d", b"1", 6), (7, b"a", b"3", 7), (8, b"b", b"3", 8)]
    assert positions(read(cold_bucket, subscribe="table", startingOffsets='{"table": {"0": 7}}')) == [
        ("table", 0, 7),
        ("table", 0, 8),
    ]
    assert positions(read(cold_bucket, subscribe="table", endingOffsets='{"table": {"0": 6}}')) == [("table", 0, 5)]
    assert positions(read(cold_bucket, subscribe="table", endingOffsets='{"table": {"0": 4}}')) == []
    cold_bucket.compact("table", 0, now_ms=100)
    assert [row["offset"] for row in read(cold_bucket, subscribe="table", splitBytes="1")] == [6, 7, 8], (
        "the tombstone's time is over"
    )
