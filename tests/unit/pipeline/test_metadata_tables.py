"""The tables about a topic agree with its records and with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from stratalog_core.batches.compression import NAMES
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt, Invalid
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.metadata_tables import TABLES, read_table
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.scan_plan import wanted_partitions
from stratalog_tiering.format.manifest_limits import ManifestLimits

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket

PER_BATCH = 5


def batches(first: int, count: int, codec: int = 4, producer_id: int = -1) -> list[bytes]:
    made = []
    for base in range(first, first + count, PER_BATCH):
        records = [Record(offset=o, timestamp_ms=1000 * o, key=None, value=b"v" * 50) for o in range(base, base + PER_BATCH)]
        epoch, sequence = (3, base - first) if producer_id >= 0 else (-1, -1)
        made.append(
            bytes(
                build_batch(records, compression=codec, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)
            )
        )
    return made


def table(bucket: ColdBucket, name: str, columns: Sequence[str] | None = None, **options: str) -> list[dict[str, Any]]:
    parsed = parse_options({"path": bucket.url, "table": name, **options})
    with Bucket(parsed.store) as opened:
        names = wanted_partitions(opened, parsed)
    wanted = columns or list(TABLES[name].columns)
    return [row for batch in read_table(parsed, names, wanted) for row in batch.to_pylist()]


@pytest.fixture
def topic(cold_bucket: ColdBucket) -> ColdBucket:
    """Two partitions with history, one of them over index pages, and one without."""
    many = [batches(base, 20) for base in range(0, 400, 20)]
    mixed = [batches(0, 30, NAMES["lz4"], 7) + batches(30, 30, NAMES["none"]), batches(60, 40, NAMES["zstd"], 8)]
    limits = ManifestLimits(inline_segments_max=4, page_segments=3)
    cold_bucket.add_topic("flights", [many, mixed, []], block_bytes=400, limits=limits)
    return cold_bucket


def test_tables_agree_with_each_other(topic: ColdBucket) -> None:
    manifests, segments, blocks, made = (
        table(topic, name, subscribe="flights") for name in ("manifests", "segments", "blocks", "batches")
    )
    assert [(row["partition"], row["start_offset"], row["end_offset"], row["record_count"]) for row in manifests] == [
        (0, 0, 400, 400),
        (1, 0, 100, 100),
    ]
    for row in manifests:
        mine = [[each for each in rows if each["partition"] == row["partition"]] for rows in (segments, blocks, made)]
        for rows in mine:
            assert [each["base_offset"] for each in rows[1:]] == [each["end_offset"] for each in rows[:-1]], "without gaps"
            assert (rows[0]["base_offset"], rows[-1]["end_offset"]) == (row["start_offset"], row["end_offset"])
            assert sum(each["record_count"] for each in rows) == row["record_count"]
        assert len(mine[0]) == row["segment_count"]
        assert sum(each["data_bytes"] for each in mine[0]) == sum(each["stored_bytes"] for each in mine[1])
        assert sum(each["plain_bytes"] for each in mine[1]) == sum(each["size_bytes"] for each in mine[2])
        assert len(mine[2]) == sum(each["batch_count"] for each in mine[0]) == row["tree_size"]
        assert {each["key"] for each in mine[0]} == set(topic.segment_keys["flights", row["partition"]])


def test_batches_tell_producers_and_compression(topic: ColdBucket) -> None:
    rows = table(topic, "batches", assign='{"flights": [1]}')
    assert [row["compression"] for row in rows] == ["lz4"] * 6 + ["none"] * 6 + ["zstd"] * 8
    assert [row["producer_id"] for row in rows] == [7] * 6 + [None] * 6 + [8] * 8
    assert (rows[1]["producer_epoch"], rows[1]["base_sequence"]) == (3, 5)
    assert rows[-1]["max_timestamp"].timestamp() == 99


def test_columns_are_chosen(topic: ColdBucket) -> None:
    rows = table(topic, "segments", ["record_count", "topic"], subscribe="flights")
    assert rows[0] == {"record_count": 20, "topic": "flights"}


def test_a_damaged_block_is_told_by_the_table_that_reads_it(topic: ColdBucket) -> None:
    path = topic.root / topic.segment_keys["flights", 1][0]
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    assert len(table(topic, "blocks", subscribe="flights")) > 10
    with pytest.raises(Corrupt, match=path.name):
        table(topic, "batches", subscribe="flights")


def test_options_without_effect_on_a_table_are_refused(topic: ColdBucket) -> None:
    with pytest.raises(Invalid, match="'startingOffsets' has no effect on table 'segments'"):
        table(topic, "segments", subscribe="flights", startingOffsets="earliest")
    for name in ("includeHeaders", "expiryHeader"):
        with pytest.raises(Invalid, match=f"'{name}' has no effect on table 'blocks'"):
            table(topic, "blocks", subscribe="flights", **{name: "true"})
    with pytest.raises(Invalid, match=r"'table' must be one of records, segments, .*, not 'rows'"):
        parse_options({"path": topic.url, "subscribe": "a", "table": "rows"})
    with pytest.raises(Invalid, match=r"set option kafka\.bootstrap\.servers"):
        table(topic, "tail", subscribe="flights")


@pytest.mark.parametrize("name", ["segments", "blocks", "batches"])
def test_times_that_no_timestamp_can_be_are_the_nearest(cold_bucket: ColdBucket, name: str) -> None:
    times_ms = (-(2**62), 2**62)
    records = [Record(offset=offset, timestamp_ms=time_ms, key=None, value=b"v") for offset, time_ms in enumerate(times_ms)]
    cold_bucket.add_topic("flights", [[[bytes(build_batch([record])) for record in records]]])
    rows = table(cold_bucket, name, ["base_offset"], subscribe="flights")
    times = raw_times(cold_bucket, name)
    assert len(times) == len(rows)
    assert max(times) == (2**63 - 1) // 1000 * 1000


def raw_times(bucket: ColdBucket, name: str) -> list[int]:
    """Return the greatest times in microseconds: Python's own moments end in the year 9999."""
    parsed = parse_options({"path": bucket.url, "table": name, "subscribe": "flights"})
    with Bucket(parsed.store) as opened:
        names = wanted_partitions(opened, parsed)
    made = read_table(parsed, names, ["max_timestamp"])
    return [time for batch in made for time in batch.column("max_timestamp").cast(pa.int64()).to_pylist()]
