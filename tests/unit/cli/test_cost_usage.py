"""What ``stratalog cost`` counts in a bucket, and what it prints."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from support.two_partitions import TOPIC, write_two_partitions

from stratalog.app import stratalog
from stratalog.cost.reading import hot_copies
from stratalog.cost.usage import (
    DAY_MS,
    Activity,
    Departure,
    PartitionObjects,
    TopicUsage,
    add_partition,
    put_requests,
)
from stratalog.exit_codes import ExitCode
from stratalog_metadata.client.memory_metadata import MemoryMetadata
from stratalog_metadata.records import Fragment, Ledger, LedgerState
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.format.manifest import Reason, RemovedObject
from stratalog_tiering.format.object_keys import data_key_key, segment_key, version_key
from stratalog_tiering.maintenance.merging import FAN_IN
from stratalog_tiering.store import ObjectInfo

MIB = 2**20
NOW_MS = 100 * DAY_MS


def info(key: str, size: int, age_ms: int, etag: str = "e") -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=size, etag=etag, last_modified_ms=NOW_MS - age_ms)


def segment(base_offset: int, random_id: int) -> str:
    return segment_key(TOPIC.topic_id, 0, base_offset, 1, random_id)


def counted(partition: PartitionObjects) -> TopicUsage:
    usage = TopicUsage(topic="t", partitions=1, activity=Activity(seconds=DAY_MS / 1000))
    add_partition(usage, partition, NOW_MS)
    return usage


@pytest.mark.parametrize(
    ("size", "etag", "requests"),
    [
        (100, "0123456789abcdef0123456789abcdef", 1),
        (100 * MIB, "0123456789abcdef0123456789abcdef-7", 9),
        (8 * MIB - 1, "not a tag of s3", 1),
        (8 * MIB, "not a tag of s3", 3),
        (20 * MIB, "not a tag of s3", 5),
    ],
)
def test_writing_an_object_costs_a_request_or_its_parts_with_begin_and_end(size: int, etag: str, requests: int) -> None:
    assert put_requests(info("segments/x", size, 0, etag)) == requests


def test_a_merge_is_told_from_offloads_by_the_offset_at_which_it_begins() -> None:
    sources = [info(segment(offset, offset), 1000, 5000 - offset) for offset in (10, 20)]
    old = info(segment(0, 1), 1000, 2 * DAY_MS)
    merged = info(segment(10, 99), 2000, 100)
    others = (info(version_key(TOPIC.topic_id, 0, 4), 500, 50),)
    removed = [
        RemovedObject(key=each.key, object_bytes=1000, reason=Reason.MERGED, removed_at_ms=NOW_MS - 100) for each in sources
    ]
    partition = PartitionObjects(segments=(old, *sources, merged), others=others, live={}, removed=removed)
    usage = counted(partition)
    assert (usage.activity.offloads, usage.activity.merges, usage.activity.commits) == (2, 1, 1)
    assert usage.activity.offloaded_bytes == 2000
    assert usage.removed == Counter({1000: 3, 2000: 1})
    assert usage.activity.merged_away == Counter({Departure(1000, 1): 2})
    # Three segments and a manifest are written.
    assert (usage.activity.requests.segment_puts, usage.activity.requests.other_puts) == (3, 1)
    # Each segment is read back, both offloaded ones are looked at again, and the merge reads as many as it may have joined.
    assert usage.activity.requests.segment_gets == 3 + 2 + FAN_IN
    # The manifest, and a look for another owner.
    assert usage.activity.requests.other_gets == 1 + 1
    assert usage.sweep_listings == 5


def test_the_data_key_of_an_encrypted_segment_is_read_with_its_copy() -> None:
    written = segment(0, 1)
    others = (info(data_key_key(written), 300, 100),)
    usage = counted(PartitionObjects(segments=(info(written, 1000, 100),), others=others, live={}, removed=[]))
    assert (usage.activity.requests.segment_puts, usage.activity.requests.other_puts) == (1, 1)
    # When the new segment is verified, and before its hot copy is dropped.
    assert (usage.activity.requests.segment_gets, usage.activity.requests.other_gets) == (2, 2)


def test_what_was_written_before_the_window_is_no_activity() -> None:
    old = info(segment(0, 1), 1000, 2 * DAY_MS)
    usage = counted(PartitionObjects(segments=(old,), others=(), live={}, removed=[]))
    assert (usage.activity.offloads, usage.activity.requests.puts, usage.cold_bytes) == (0, 0, 1000)


def test_a_sweep_lists_a_thousand_objects_at_once() -> None:
    segments = tuple(info(segment(offset, offset), 1, DAY_MS * 2) for offset in range(2500))
    assert counted(PartitionObjects(segments=segments, others=(), live={}, removed=[])).sweep_listings == 5 + 2


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A bucket with one segment of three records in each of two partitions."""
    directory = tmp_path / "store"
    write_two_partitions(directory)
    return directory


def cost(*options: str) -> Result:
    return CliRunner().invoke(stratalog, ["cost", *options])


def test_a_bucket_is_priced_without_its_cluster(bucket: Path) -> None:
    result = cost("--store", str(bucket), "--json", "--retention", "30d", "--prices", "minio", "--prices", "s3-standard")
    assert result.exit_code == ExitCode.OK, result.output
    document = json.loads(result.stdout)
    (topic,) = document["topics"]
    stored = sum(file.stat().st_size for file in bucket.rglob("*") if file.is_file())
    assert topic["live_bytes"] + topic["other_bytes"] == stored
    assert (topic["topic"], topic["partitions"], topic["hot_bytes"], topic["live_segments"]) == ("flights", 2, None, 2)
    assert topic["storage_classes"] == ["STANDARD"]
    assert [row["prices"] for row in document["costs"]] == ["minio", "s3-standard"]
    assert [row["retention_days"] for row in document["retentions"]] == [30, 30]
    # Each partition: its manifest, a footer and a block.
    assert topic["replay_get_requests"] == 2 * 3


def test_the_table_says_what_limits_the_figures(bucket: Path) -> None:
    result = cost("flights", "--store", str(bucket), "--prices", "s3-standard-ia", "--retention", "7d")
    assert result.exit_code == ExitCode.OK
    assert "in a month, with another retention" in result.stdout
    assert "USD a month in all, by prices as of" in result.stdout
    assert "projected from" in result.stderr
    assert "flights has segments of class STANDARD; none of the --prices is for that class" in result.stderr
    assert "hot copies are not counted" in result.stderr


async def test_hot_copies_count_each_sealed_ledger_on_each_of_its_bookies() -> None:
    metadata = MemoryMetadata()
    closed = Ledger(
        ledger_id=1, topic_id=TOPIC.topic_id, partition=0, base_offset=0, leader_epoch=1, write_quorum=3, ack_quorum=2,
        fragments=(Fragment(first_entry=0, bookies=("a", "b", "c")),), state=LedgerState.CLOSED, payload_bytes=1000,
    )  # fmt: skip
    ledgers = [closed, msgspec.structs.replace(closed, ledger_id=2, payload_bytes=50)]
    ledgers.append(msgspec.structs.replace(closed, ledger_id=3, state=LedgerState.OPEN))
    await metadata.propose(Command(updates=tuple(Put(record=ledger) for ledger in ledgers)))
    assert hot_copies(metadata.view) == {TOPIC.topic_id: 3150}


def test_a_topic_that_is_not_there_is_named(bucket: Path) -> None:
    assert "contains no topic 'nothing'" in str(cost("nothing", "--store", str(bucket)).exception)


def test_shipped_prices_are_printed_to_be_changed(tmp_path: Path, bucket: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(cost("--print-prices", "s3-standard").stdout)
    assert cost("--store", str(bucket), "--prices", str(file)).exit_code == ExitCode.OK
    assert json.loads(cost("--print-prices", "minio", "--json").stdout)["name"] == "minio"
