"""What the stream reader tells Spark between batches, without a Spark session."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from unit.pipeline.conftest import ColdBucket

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Invalid, NotFound
from stratalog_core.system import SystemClock
from stratalog_pipeline.arrow.schema import COLUMNS
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.spark.reader import StratalogReader, TaskPartition
from stratalog_pipeline.spark.stream_reader import StratalogStreamReader
from stratalog_tiering.format.descriptor import DeletionMarker, encode_descriptor
from stratalog_tiering.format.object_keys import deletion_marker_key
from stratalog_tiering.store.filesystem import FilesystemStore


def segment(first: int, count: int) -> list[bytes]:
    records = [Record(offset=offset, timestamp_ms=1000, key=None, value=b"v") for offset in range(first, first + count)]
    return [bytes(build_batch(records))]


def test_the_latest_offset_is_that_of_the_last_planned_batch(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("t", [[segment(0, 10)], [segment(0, 4)]])
    reader = StratalogStreamReader(parse_options({"path": cold_bucket.url, "subscribe": "t"}, "stream"), COLUMNS)
    assert reader.reportLatestOffset() is None
    start = {"t": {"0": 0, "1": 0}}
    end = reader.latestOffset(start, ReadMaxRows(7))
    assert end == {"t": {"0": 5, "1": 2}}
    assert reader.reportLatestOffset() == {"t": {"0": 10, "1": 4}}
    cold_bucket.extend("t", 0, segment(10, 5))
    # Spark asks after each batch: it must not read the bucket again.
    assert reader.reportLatestOffset() == {"t": {"0": 10, "1": 4}}
    reader.latestOffset(end, ReadMaxRows(7))
    assert reader.reportLatestOffset() == {"t": {"0": 15, "1": 4}}


def test_a_trigger_reads_the_topics_of_the_bucket_once(cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket may have thousands of them, of which the stream reads one."""
    for name in ("t", *(f"other-{number}" for number in range(5))):
        cold_bucket.add_topic(name, [[segment(0, 10)]])
    reader = StratalogStreamReader(parse_options({"path": cold_bucket.url, "subscribe": "t"}, "stream"), COLUMNS)
    requests = Counter[str]()

    def counted(name: str, original: Any) -> Any:
        def call(self: object, key: str, *rest: Any, **named: Any) -> Any:
            requests[f"{name} {key.partition('/')[0]}"] += 1
            return original(self, key, *rest, **named)

        return call

    for name in ("get", "list"):
        monkeypatch.setattr(FilesystemStore, name, counted(name, getattr(FilesystemStore, name)))
    position = {"t": {"0": 0}}
    for trigger in range(1, 4):
        end = reader.latestOffset(position, ReadMaxRows(2))
        assert len(reader.partitions(position, end)) == 1
        assert (requests["list topics"], requests["get topics"]) == (trigger, 6 * trigger)
        position = end
    reader.partitions({"t": {"0": 0}}, end)
    assert requests["list topics"] == 4, "a batch that is planned again reads them anew"


@pytest.mark.parametrize(("starting", "first"), [("earliest", 0), ("latest", 10)])
def test_the_first_batch_begins_where_the_query_began_although_it_is_planned_again(
    cold_bucket: ColdBucket, starting: str, first: int
) -> None:
    """Spark asks for the initial offsets again whenever it plans that batch: it has recorded only where the batch ends."""
    cold_bucket.add_topic("t", [[segment(0, 10)]])
    given = {"path": cold_bucket.url, "subscribePattern": "[tu]", "startingOffsets": starting}
    options = parse_options(given, "stream")
    died = StratalogStreamReader(options, COLUMNS)
    start = died.initialOffset()
    cold_bucket.extend("t", 0, segment(10, 5))
    cold_bucket.add_topic("u", [[segment(0, 4)]])
    end = json.loads(json.dumps(died.latestOffset(start, ReadMaxRows(40))))
    cold_bucket.extend("t", 0, segment(15, 5))
    restarted = StratalogStreamReader(options, COLUMNS)
    for reader in (died, restarted):
        tasks = reader.partitions(reader.initialOffset(), end)
        rows = [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]
        assert sorted((row["topic"], row["offset"]) for row in rows) == [
            *(("t", offset) for offset in range(first, 15)), *(("u", offset) for offset in range(4)),
        ]  # fmt: skip
        last = reader.latestOffset(end, ReadMaxRows(40))
        assert last == {"t": {"0": 20}, "u": {"0": 4}}, "from the second batch on, offsets are those of Spark's Kafka source"
        assert reader.latestOffset(last, ReadMaxRows(40)) == last
        assert len(reader.partitions(end, last)) == 1


def test_a_query_that_began_without_a_topic_reads_new_ones_from_their_first_record(cold_bucket: ColdBucket) -> None:
    options = parse_options({"path": cold_bucket.url, "subscribePattern": "t"}, "stream")
    died = StratalogStreamReader(options, COLUMNS)
    start = died.initialOffset()
    assert start == {}
    cold_bucket.add_topic("t", [[segment(0, 10)]])
    end = died.latestOffset(start, ReadMaxRows(40))
    restarted = StratalogStreamReader(options, COLUMNS)
    (task,) = restarted.partitions(restarted.initialOffset(), end)
    assert sum(batch.num_rows for batch in restarted.read(task)) == 10


def test_retention_before_the_first_batch_is_planned_again_is_a_loss(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("t", [[segment(0, 10), segment(10, 10)]])
    given = {"path": cold_bucket.url, "subscribe": "t", "startingOffsets": "earliest"}
    died = StratalogStreamReader(parse_options(given, "stream"), COLUMNS)
    end = died.latestOffset(died.initialOffset(), ReadMaxRows(40))
    cold_bucket.extend("t", 0, segment(20, 5), drop_below=10)
    restarted = StratalogStreamReader(parse_options(given, "stream"), COLUMNS)
    with pytest.raises(Invalid, match=r"t-0: offsets 0\.\.20 are requested; the bucket holds 10\.\.25.* failOnDataLoss"):
        restarted.partitions(restarted.initialOffset(), end)


@pytest.mark.parametrize("moment", ["before the next batch", "before its plan"])
def test_a_topic_that_is_created_again_fails_the_query(cold_bucket: ColdBucket, moment: str) -> None:
    first_id = cold_bucket.add_topic("t", [[segment(0, 10)]])
    given = {"path": cold_bucket.url, "subscribe": "t"}
    reader = StratalogStreamReader(parse_options(given, "stream"), COLUMNS)
    start = {"t": {"0": 0}}
    end = reader.latestOffset(start, ReadMaxRows(4))
    assert len(reader.partitions(start, end)) == 1
    cold_bucket.put(deletion_marker_key(first_id), encode_descriptor(DeletionMarker(topic_id=first_id, deleted_at_ms=1)))
    # It has more records than the stream has read.
    cold_bucket.add_topic("t", [[segment(0, 30)]])
    steps: dict[str, Callable[[], object]] = {
        "before the next batch": lambda: reader.latestOffset(end, ReadMaxRows(4)),
        "before its plan": lambda: reader.partitions(start, end),
    }
    with pytest.raises(Invalid, match="'t' was deleted and created again while it was read"):
        steps[moment]()
    goes_on = StratalogStreamReader(parse_options({**given, "failOnDataLoss": "false"}, "stream"), COLUMNS)
    assert goes_on.latestOffset(end, ReadMaxRows(40)) == {"t": {"0": 30}}


def test_without_fail_on_data_loss_a_topic_that_is_created_again_is_read_from_its_first_record(
    cold_bucket: ColdBucket,
) -> None:
    first_id = cold_bucket.add_topic("t", [[segment(0, 10)]])
    given = {"path": cold_bucket.url, "subscribe": "t", "failOnDataLoss": "false"}
    reader = StratalogStreamReader(parse_options(given, "stream"), COLUMNS)
    start = reader.latestOffset({"t": {"0": 0}}, ReadMaxRows(40))
    assert start == {"t": {"0": 10}}
    cold_bucket.put(deletion_marker_key(first_id), encode_descriptor(DeletionMarker(topic_id=first_id, deleted_at_ms=1)))
    cold_bucket.add_topic("t", [[segment(0, 30)]])
    back = reader.latestOffset(start, ReadMaxRows(40))
    assert back == {"t": {"0": 0}}
    assert reader.partitions(start, back) == []
    assert reader.latestOffset(back, ReadMaxRows(40)) == {"t": {"0": 30}}


def test_without_fail_on_data_loss_a_shorter_partition_is_followed_from_its_end(cold_bucket: ColdBucket) -> None:
    """It was created again, or restored to an earlier time, while the query was stopped."""
    cold_bucket.add_topic("t", [[segment(0, 10)]])
    given = {"path": cold_bucket.url, "subscribe": "t", "failOnDataLoss": "false", "minOffsetsPerTrigger": "5"}
    reader = StratalogStreamReader(parse_options(given, "stream"), COLUMNS)
    start = {"t": {"0": 25}}
    back = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert back == {"t": {"0": 10}}
    cold_bucket.extend("t", 0, segment(10, 30))
    assert reader.latestOffset(back, ReadMaxRows(40)) == {"t": {"0": 40}}


def test_without_fail_on_data_loss_a_stream_goes_on_without_a_deleted_topic(cold_bucket: ColdBucket) -> None:
    gone = cold_bucket.add_topic("a1", [[segment(0, 10)]])
    cold_bucket.add_topic("a2", [[segment(0, 10)]])
    cold_bucket.put(deletion_marker_key(gone), encode_descriptor(DeletionMarker(topic_id=gone, deleted_at_ms=1)))
    given = {"path": cold_bucket.url, "failOnDataLoss": "false"}
    reader = StratalogStreamReader(parse_options({**given, "subscribePattern": "a."}, "stream"), COLUMNS)
    start = {"a1": {"0": 4}, "a2": {"0": 4}}
    end = reader.latestOffset(start, ReadMaxRows(40))
    assert end == {"a2": {"0": 10}}
    assert len(reader.partitions(start, end)) == 1


@pytest.mark.parametrize("chosen", [{"subscribe": "t,u"}, {"assign": '{"t": [0], "u": [0]}'}])
def test_without_fail_on_data_loss_a_stream_waits_for_a_named_topic_that_is_created_again(
    cold_bucket: ColdBucket, chosen: dict[str, str]
) -> None:
    first_id = cold_bucket.add_topic("t", [[segment(0, 10)]])
    cold_bucket.add_topic("u", [[segment(0, 10)]])
    given = {"path": cold_bucket.url, **chosen}
    reader = StratalogStreamReader(parse_options({**given, "failOnDataLoss": "false"}, "stream"), COLUMNS)
    start = reader.latestOffset({"t": {"0": 0}, "u": {"0": 0}}, ReadMaxRows(40))
    assert start == {"t": {"0": 10}, "u": {"0": 10}}
    cold_bucket.put(deletion_marker_key(first_id), encode_descriptor(DeletionMarker(topic_id=first_id, deleted_at_ms=1)))
    assert reader.latestOffset(start, ReadMaxRows(40)) == start
    cold_bucket.extend("u", 0, segment(10, 5))
    end = reader.latestOffset(start, ReadMaxRows(40))
    assert end == {"t": {"0": 10}, "u": {"0": 15}}, "it may have been missing for a moment only"
    assert len(reader.partitions(start, end)) == 1
    with pytest.raises(NotFound, match="topic 't' is not in this bucket"):
        StratalogStreamReader(parse_options(given, "stream"), COLUMNS).latestOffset(start, ReadMaxRows(40))
    cold_bucket.add_topic("t", [[segment(0, 30)]])
    back = reader.latestOffset(end, ReadMaxRows(40))
    assert reader.latestOffset(back, ReadMaxRows(40)) == {"t": {"0": 30}, "u": {"0": 15}}


def test_a_named_topic_that_was_missing_for_a_moment_is_not_read_again(cold_bucket: ColdBucket) -> None:
    """As a topic whose deletion is undone, or one that a broker which has just started does not know yet."""
    topic_id = cold_bucket.add_topic("t", [[segment(0, 10)]])
    cold_bucket.add_topic("u", [[segment(0, 10)]])
    given = {"path": cold_bucket.url, "subscribe": "t,u", "failOnDataLoss": "false"}
    reader = StratalogStreamReader(parse_options(given, "stream"), COLUMNS)
    marker = cold_bucket.root / deletion_marker_key(topic_id)
    cold_bucket.put(deletion_marker_key(topic_id), encode_descriptor(DeletionMarker(topic_id=topic_id, deleted_at_ms=1)))
    end = reader.latestOffset({"t": {"0": 10}, "u": {"0": 0}}, ReadMaxRows(40))
    marker.unlink()
    cold_bucket.extend("t", 0, segment(10, 5))
    last = reader.latestOffset(end, ReadMaxRows(40))
    assert (end, last) == ({"t": {"0": 10}, "u": {"0": 10}}, {"t": {"0": 15}, "u": {"0": 10}})


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_new_stream_of_a_topic_that_does_not_exist_is_refused(cold_bucket: ColdBucket, fails: str) -> None:
    cold_bucket.add_topic("t", [[segment(0, 10)]])
    given = {"path": cold_bucket.url, "subscribe": "mistyped", "failOnDataLoss": fails}
    with pytest.raises(NotFound, match="topic 'mistyped' is not in this bucket"):
        StratalogStreamReader(parse_options(given, "stream"), COLUMNS).initialOffset()


def test_a_batch_is_planned_again_without_what_was_deleted_since(cold_bucket: ColdBucket) -> None:
    """Spark has recorded the batch, and begins with it after each restart."""
    gone = cold_bucket.add_topic("a1", [[segment(0, 10)]])
    smaller = cold_bucket.add_topic("a2", [[segment(0, 10)], [segment(0, 10)]])
    cold_bucket.add_topic("a3", [[segment(0, 10)]])
    given = {"path": cold_bucket.url, "subscribePattern": "a."}
    start = {"a1": {"0": 0}, "a2": {"0": 0, "1": 0}, "a3": {"0": 0}}
    end = StratalogStreamReader(parse_options(given, "stream"), COLUMNS).latestOffset(start, ReadMaxRows(99))
    for topic_id in (gone, smaller):
        cold_bucket.put(deletion_marker_key(topic_id), encode_descriptor(DeletionMarker(topic_id=topic_id, deleted_at_ms=1)))
    cold_bucket.add_topic("a2", [[segment(0, 10)]])
    restarted = StratalogStreamReader(parse_options(given, "stream"), COLUMNS)
    with pytest.raises(Invalid, match=r"a1-0 does not exist any more, but .* failOnDataLoss to false"):
        restarted.partitions(start, end)
    goes_on = StratalogStreamReader(parse_options({**given, "failOnDataLoss": "false"}, "stream"), COLUMNS)
    tasks = goes_on.partitions(start, end)
    assert sorted(str(split.name) for task in tasks if isinstance(task, TaskPartition) for split in task.splits) == [
        "a2-0", "a3-0",
    ]  # fmt: skip


def test_a_new_partition_whose_records_expired_before_they_were_read_is_a_loss(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("t", [[segment(0, 10)], [segment(0, 10)]])
    given = {"path": cold_bucket.url, "subscribe": "t"}
    start = {"t": {"0": 10}}
    reader = StratalogStreamReader(parse_options(given, "stream"), COLUMNS)
    end = reader.latestOffset(start, ReadMaxRows(99))
    assert end == {"t": {"0": 10, "1": 10}}
    cold_bucket.extend("t", 1, segment(10, 5), segment(15, 5), drop_below=15)
    with pytest.raises(Invalid, match=r"t-1: offsets .*\.\.10 are requested; the bucket holds 15\.\.20.* failOnDataLoss"):
        reader.partitions(start, end)
    goes_on = StratalogStreamReader(parse_options({**given, "failOnDataLoss": "false"}, "stream"), COLUMNS)
    assert goes_on.partitions(start, end) == []


def test_the_first_batch_of_a_query_waits_for_no_more_records(cold_bucket: ColdBucket) -> None:
    """As in Spark's Kafka source: a query that is stopped and started again has waited already."""
    cold_bucket.add_topic("t", [[segment(0, 3)]])
    given = {"path": cold_bucket.url, "subscribe": "t", "minOffsetsPerTrigger": "5"}
    reader = StratalogStreamReader(parse_options(given, "stream"), COLUMNS)
    limit = reader.getDefaultReadLimit()
    end = reader.latestOffset({"t": {"0": 0}}, limit)
    assert end == {"t": {"0": 3}}
    cold_bucket.extend("t", 0, segment(3, 4))
    assert reader.latestOffset(end, limit) == end
    cold_bucket.extend("t", 0, segment(7, 1))
    assert reader.latestOffset(end, limit) == {"t": {"0": 8}}
    idle = StratalogStreamReader(parse_options(given, "stream"), COLUMNS)
    start = {"t": {"0": 8}}
    assert idle.latestOffset(start, limit) == start
    cold_bucket.extend("t", 0, segment(8, 1))
    assert idle.latestOffset(start, limit) == start, "only the first trigger does not wait"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_task_that_is_run_again_has_the_records_that_expired_meanwhile(
    cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    """Otherwise a shuffle that Spark computes again moves all later rows to other tasks."""
    now_ms = SystemClock().wall_ms()
    hours = (-1, 1, 3)
    made = [
        Record(offset=o, timestamp_ms=1000, key=None, value=b"v", headers=(("expires", b"%d" % (now_ms + hour * 3_600_000)),))
        for o, hour in enumerate(hours)
    ]
    cold_bucket.add_topic("t", [[[bytes(build_batch(made))]]])
    given = {"path": cold_bucket.url, "subscribe": "t", "expiryHeader": "expires", "lease": "false"}
    reader: StratalogReader | StratalogStreamReader
    if is_stream:
        reader = StratalogStreamReader(parse_options(given, "stream"), ("offset",))
        (task,) = reader.partitions({"t": {"0": 0}}, {"t": {"0": 3}})
    else:
        reader = StratalogReader(parse_options(given), ("offset",))
        (task,) = reader.partitions()
    monkeypatch.setattr(SystemClock, "wall_ms", lambda _: now_ms + 2 * 3_600_000)
    assert [row["offset"] for batch in reader.read(task) for row in batch.to_pylist()] == [1, 2]
