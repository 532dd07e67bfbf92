"""``spark.read.format("stratalog")`` in one real session, over a bucket that tiering's writers made."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import StructType
from unit.pipeline.conftest import ColdBucket

from stratalog_core.batches.compression import NAMES
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Conflict, Corrupt, Invalid, NotFound
from stratalog_pipeline import views
from stratalog_pipeline.jobs.audit import audit
from stratalog_pipeline.jobs.backfill import _expression
from stratalog_pipeline.jobs.export import export
from stratalog_pipeline.jobs.replay import ReplayTarget, _shaped
from stratalog_pipeline.jobs.session import run_tasks, translated_errors, watched
from stratalog_pipeline.jobs.usage import usage
from stratalog_pipeline.options import parse_options

pytestmark = pytest.mark.spark
RECORDS = 120


def record(offset: int) -> Record:
    return Record(
        offset=offset,
        timestamp_ms=1_700_000_000_000 + offset * 1000,
        key=None if offset % 3 == 0 else f"k{offset}".encode(),
        value=None if offset % 5 == 0 else b"v" * offset,
        headers=(("carrier", b"UA"), ("origin", None)) if offset % 4 == 0 else (),
    )


def batches(first: int, count: int, codec: int = 4) -> list[bytes]:
    return [
        bytes(build_batch([record(o) for o in range(base, base + 10)], compression=codec))
        for base in range(first, first + count, 10)
    ]


@pytest.fixture(scope="session")
def bucket(make_bucket: Callable[[], ColdBucket]) -> ColdBucket:
    """``flights``: two partitions; ``codecs``: one partition for each codec; ``broken``: one flipped byte."""
    made = make_bucket()
    made.add_topic("flights", [[batches(0, 60), batches(60, 60)], [batches(0, 30)]], block_bytes=2000)
    made.add_topic("codecs", [[batches(0, 20, codec)] for codec in NAMES.values()])
    made.add_topic("broken", [[batches(0, 60)]], block_bytes=500)
    path = made.root / made.segment_keys["broken", 0][0]
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)
    return made


def load(spark: SparkSession, bucket: ColdBucket, **options: str) -> DataFrame:
    return spark.read.format("stratalog").options(**options).load(bucket.url)


def expected(topic: str, partition: int, offset: int) -> tuple[object, ...]:
    made = record(offset)
    time = datetime.fromtimestamp(made.timestamp_ms // 1000, UTC).replace(tzinfo=None)
    key = None if made.key is None else bytearray(made.key)
    value = None if made.value is None else bytearray(made.value)
    return (key, value, topic, partition, offset, time, 0)


def test_rows_are_those_of_sparks_kafka_source(spark: SparkSession, bucket: ColdBucket) -> None:
    frame = load(spark, bucket, subscribe="flights", includeHeaders="true")
    assert [(field.name, field.dataType.simpleString()) for field in frame.schema] == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
        ("headers", "array<struct<key:string,value:binary>>"),
    ]
    rows = sorted(frame.collect(), key=lambda row: (row.partition, row.offset))
    wanted = [("flights", 0, offset) for offset in range(120)] + [("flights", 1, offset) for offset in range(30)]
    assert [tuple(row)[:7] for row in rows] == [expected(*place) for place in wanted]
    with_headers = [Row(key="carrier", value=bytearray(b"UA")), Row(key="origin", value=None)]
    assert [row.headers for row in rows[:5]] == [with_headers, None, None, None, with_headers]


def test_an_option_picks_columns_and_an_earlier_version(spark: SparkSession, make_bucket: Callable[[], ColdBucket]) -> None:
    made = make_bucket()
    made.add_topic("flights", [[batches(0, 60)]])
    made.extend("flights", 0, batches(60, 60))
    versions = load(spark, made, subscribe="flights", table="manifests", columns="end_offset,version").collect()
    assert [tuple(row) for row in versions] == [(120, 2)]
    frame = load(spark, made, subscribe="flights", columns="offset, key")
    assert (frame.columns, frame.count()) == (["offset", "key"], 120)
    earlier = load(spark, made, subscribe="flights", manifestVersion='{"flights": {"0": 1}}', columns="offset")
    assert sorted(row["offset"] for row in earlier.collect()) == list(range(60))
    for options, message in (
        ({"columns": "offset,when"}, "column 'when' is unknown"),
        ({"manifestVersion": '{"flights": {"0": 3}}'}, "manifest version 3 is not in the bucket"),
        ({"manifestVersion": '{"flights": {"1": 1}}'}, "must name exactly the partitions"),
    ):
        with pytest.raises(PySparkException, match=message):
            load(spark, made, subscribe="flights", **options).collect()


def test_all_codecs_are_read(spark: SparkSession, bucket: ColdBucket) -> None:
    counted = load(spark, bucket, subscribe="codecs").groupBy("partition").count().collect()
    assert {row["partition"]: row["count"] for row in counted} == dict.fromkeys(range(len(NAMES)), 20)


def test_expired_records_are_left_out_on_request(spark: SparkSession, make_bucket: Callable[[], ColdBucket]) -> None:
    made, times = make_bucket(), (b"1", b"9000000000000", b"never")
    leases = [
        Record(offset=at, timestamp_ms=1, key=b"k", value=b"v", headers=(("expires", time),)) for at, time in enumerate(times)
    ]
    made.add_topic("leases", [[[build_batch(leases)]]])
    for options, expected_offsets in (({"expiryHeader": "expires"}, [1, 2]), ({}, [0, 1, 2])):
        frame = load(spark, made, subscribe="leases", columns="offset", **options)
        assert sorted(row["offset"] for row in frame.collect()) == expected_offsets


def test_tables_about_a_topic(spark: SparkSession, bucket: ColdBucket) -> None:
    counted = load(spark, bucket, subscribe="flights", table="segments").groupBy("partition").sum("record_count").collect()
    assert {row["partition"]: row["sum(record_count)"] for row in counted} == {0: 120, 1: 30}
    named = load(spark, bucket, subscribe="codecs", table="batches").select("compression").distinct().collect()
    assert {row["compression"] for row in named} == set(NAMES)
    for table in ("manifests", "blocks"):
        assert load(spark, bucket, subscribe="flights", table=table).count() > 0


def test_a_users_schema_picks_columns(spark: SparkSession, bucket: ColdBucket) -> None:
    frame = (
        spark.read.format("stratalog").schema("offset bigint, partition int").option("subscribe", "flights").load(bucket.url)
    )
    assert frame.agg({"offset": "sum", "*": "count"}).collect()[0]["sum(offset)"] == sum(range(120)) + sum(range(30))
    with pytest.raises(PySparkException, match="column 'offset' is bigint, not string"):
        spark.read.format("stratalog").schema("offset string").option("subscribe", "flights").load(bucket.url).collect()
    with pytest.raises(PySparkException, match="schema: it has no column"):
        spark.read.format("stratalog").schema(StructType([])).option("subscribe", "flights").load(bucket.url).count()
    with pytest.raises(PySparkException, match="option 'columns' contradicts the schema"):
        spark.read.format("stratalog").schema("offset bigint").options(subscribe="flights", columns="key").load(
            bucket.url
        ).collect()


def test_offsets_times_patterns_and_the_number_of_partitions(spark: SparkSession, bucket: ColdBucket) -> None:
    bounds = {"startingOffsets": '{"flights": {"0": 55, "1": -2}}', "endingOffsets": '{"flights": {"0": 65, "1": 2}}'}
    offsets = load(spark, bucket, subscribe="flights", **bounds).select("offset").collect()
    assert sorted(row["offset"] for row in offsets) == [0, 1, *range(55, 65)]
    late = load(spark, bucket, assign='{"flights": [0]}', startingTimestamp=str(record(100).timestamp_ms - 1))
    assert sorted(row["offset"] for row in late.collect()) == list(range(100, 120))
    assert {row["topic"] for row in load(spark, bucket, subscribePattern="(flights|codecs)").collect()} == {"flights", "codecs"}
    assert load(spark, bucket, subscribe="flights", minPartitions="9").rdd.getNumPartitions() >= 9
    assert load(spark, bucket, subscribePattern="nothing-like-it").collect() == []


def test_filters_are_pushed_where_that_is_switched_on(spark: SparkSession, bucket: ColdBucket) -> None:
    query = (
        "partition = 0 and offset between 42 and 61 and topic in ('flights', 'x')"
        " and timestamp >= timestamp'2023-11-14 22:13:50'"
    )
    unpushed = load(spark, bucket, subscribe="flights").where(query)
    assert sorted(row["offset"] for row in unpushed.collect()) == list(range(42, 62))
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        # The broken topic's blocks would fail the query, were they read.
        pushed = load(spark, bucket, subscribePattern="flights|broken").where(query)
        assert sorted(row["offset"] for row in pushed.collect()) == list(range(42, 62))
        assert load(spark, bucket, subscribe="flights").count() == 150
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_a_flipped_byte_fails_the_job_and_names_the_segment(spark: SparkSession, bucket: ColdBucket) -> None:
    with pytest.raises(PySparkException) as failed:
        load(spark, bucket, subscribe="broken").collect()
    assert bucket.segment_keys["broken", 0][0] in str(failed.value)
    assert "does not match its CRC" in str(failed.value)


def test_damage_is_a_gap_on_request(spark: SparkSession, bucket: ColdBucket) -> None:
    rows = load(spark, bucket, subscribe="broken", onCorruptBatch="skip").select("offset").collect()
    offsets = sorted(row.offset for row in rows)
    assert offsets
    assert set(offsets) < set(range(60))


def test_an_unknown_option_is_refused_by_name(spark: SparkSession, bucket: ColdBucket) -> None:
    with pytest.raises(PySparkException, match="option 'startingofsets' is unknown; did you mean 'startingOffsets'"):
        load(spark, bucket, subscribe="flights", startingOfsets="earliest").collect()


def test_a_stream_reads_what_is_there_then_what_comes(
    spark: SparkSession, make_bucket: Callable[[], ColdBucket], tmp_path: Path
) -> None:
    made = make_bucket()
    made.add_topic("flights", [[batches(0, 60)], [batches(0, 30)]])

    def run(**options: str) -> list[tuple[int, int]]:
        """Run the stream until it has everything that is there; return the rows of all runs."""
        frame = (
            spark.readStream.format("stratalog").options(subscribe="flights", missingTail="ignore", **options).load(made.url)
        )
        writer = frame.select("partition", "offset").writeStream.format("parquet").option("path", str(tmp_path / "rows"))
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(240)
        finally:
            query.stop()
        return sorted((row.partition, row.offset) for row in spark.read.parquet(str(tmp_path / "rows")).collect())

    first = run(startingOffsets="earliest", maxOffsetsPerTrigger="40")
    assert first == [(0, offset) for offset in range(60)] + [(1, offset) for offset in range(30)]
    *_, last = sorted((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    assert last.read_text().splitlines()[-1] == '{"flights": {"0": 60, "1": 30}}'
    assert int(last.name) >= 2
    made.extend("flights", 0, batches(60, 20))
    assert run(startingOffsets="latest") == [(0, offset) for offset in range(80)] + [(1, offset) for offset in range(30)]


def test_a_stream_refuses_what_only_a_batch_has(spark: SparkSession, bucket: ColdBucket, tmp_path: Path) -> None:
    frame = spark.readStream.format("stratalog").options(subscribe="flights", endingOffsets="latest").load(bucket.url)
    with pytest.raises(PySparkException, match="has no effect in a stream"):
        frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start().awaitTermination(240)


def test_an_audit_counts_digests_and_finds_damage(spark: SparkSession, bucket: ColdBucket) -> None:
    options = {"path": bucket.url, "subscribe": "flights,broken"}
    progress: list[tuple[int, int]] = []
    verdicts = audit(spark, parse_options({**options, "splitBytes": "900"}), lambda *done: progress.append(done))
    by_place = {(one.topic, one.partition): one for one in verdicts}
    assert {place: (one.start_offset, one.end_offset) for place, one in by_place.items()} == {
        ("broken", 0): (0, 60),
        ("flights", 0): (0, 120),
        ("flights", 1): (0, 30),
    }
    assert [by_place["flights", number].records for number in (0, 1)] == [120, 30]
    assert by_place["flights", 0].records_by_day == {19675: 120}
    (problem,) = by_place["broken", 0].problems
    assert bucket.segment_keys["broken", 0][0] in problem
    assert (progress[0], progress[-1]) == ((0, 4), (4, 4))
    assert audit(spark, parse_options(options)) == verdicts


def test_usage_is_that_of_the_records(spark: SparkSession, bucket: ColdBucket) -> None:
    found = usage(spark, {"store": bucket.url, "subscribe": "flights,codecs"}, "records", 3)
    assert {(row["topic"], row["partition"]): row["records"] for row in found.partitions}["flights", 0] == 120
    assert found.days == [
        {
            "topic": "codecs",
            "day": "2023-11-14",
            "records": 20 * len(NAMES),
            "bytes": sum(row["bytes"] for row in found.codecs[1:]),
        },
        {"topic": "flights", "day": "2023-11-14", "records": 150, "bytes": found.codecs[0]["bytes"]},
    ]
    assert {row["compression"] for row in found.codecs if row["topic"] == "codecs"} == set(NAMES)
    offsets = [*range(120), *range(30)]
    assert found.keys[0]["key"] is None
    assert found.keys[0]["records"] == sum(offset % 3 == 0 for offset in offsets)
    keys = {offset for offset in offsets if offset % 3}
    assert [row["keys"] for row in found.key_counts if row["topic"] == "flights"] == [len(keys)]
    assert usage(spark, {"store": bucket.url, "subscribe": "flights"}).codecs == []


def test_an_export_holds_each_record_once(spark: SparkSession, bucket: ColdBucket, tmp_path: Path) -> None:
    options = parse_options({"store": bucket.url, "subscribe": "flights", "splitBytes": "2000", "includeHeaders": "true"})
    first = export(spark, options, str(tmp_path / "out"), verify=True)
    assert first.records == 150
    assert len(first.files) == 3
    read = spark.read.parquet(str(tmp_path / "out"))
    columns = ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers"]
    exported = read.select(columns).orderBy("partition", "offset").collect()
    assert exported == load(spark, bucket, subscribe="flights", includeHeaders="true").orderBy("partition", "offset").collect()
    assert export(spark, options, str(tmp_path / "out")).files == ()


def test_a_damaged_block_fails_an_export_with_one_clear_line(spark: SparkSession, bucket: ColdBucket, tmp_path: Path) -> None:
    options = parse_options({"store": bucket.url, "subscribe": "broken"})
    with pytest.raises(Corrupt) as failed:
        export(spark, options, str(tmp_path / "out"))
    assert bucket.segment_keys["broken", 0][0] in failed.value.message
    assert "\n" not in failed.value.message
    with pytest.raises(NotFound, match="'nothing' is not in this bucket"):
        usage(spark, {"store": bucket.url, "subscribe": "nothing"})


@pytest.mark.parametrize("expression", ["cast('a' as int)", "cast(concat('a', id) as int)"], ids=["planned", "in a task"])
def test_a_value_that_an_expression_does_not_take_is_invalid(spark: SparkSession, expression: str) -> None:
    """Not unavailable, for which scripts try again."""
    rows = spark.range(2).selectExpr(f"{expression} as value")
    for act in (rows.collect, lambda: rows.write.format("noop").mode("overwrite").save()):
        with pytest.raises(Invalid) as failed, translated_errors():
            act()
        assert failed.value.message.startswith("[CAST_INVALID_INPUT] The value 'a")
        assert "\n" not in failed.value.message


def test_a_time_of_a_backfill_has_a_unit(spark: SparkSession) -> None:
    """Spark takes a number for seconds, so milliseconds became times in the far future."""
    rows = spark.range(1).selectExpr("1372939200000L as timestamp", "1372939200000 / 1 as fraction")
    for expression in (None, "timestamp", "fraction"):
        with pytest.raises(Invalid, match="name its unit, such as timestamp_millis"):
            _expression(rows, "timestamp", expression)
    column = _expression(rows, "timestamp", "timestamp_millis(timestamp)")
    assert column is not None
    assert rows.select(column.cast("bigint")).collect()[0][0] == 1_372_939_200


def test_progress_grows_by_each_stage(spark: SparkSession) -> None:
    assert _progress(spark) == ((0, 0), (5, 5)), "three tasks read and two write"
    assert _progress(spark) == ((0, 0), (5, 5)), "the tasks of an earlier job are not counted"


def _progress(spark: SparkSession) -> tuple[tuple[int, int], tuple[int, int]]:
    """Run a job of two stages; return its first and its last report."""
    seen: list[tuple[int, int]] = []
    with watched(spark, lambda done, total: seen.append((done, total))):
        spark.range(1000, numPartitions=3).repartition(2).write.format("noop").mode("overwrite").save()
    return seen[0], seen[-1]


def test_views_have_values_in_columns(spark: SparkSession, make_bucket: Callable[[], ColdBucket], tmp_path: Path) -> None:
    def orders(first: int, count: int) -> list[bytes]:
        good = b'{"id": %d, "state": {"paid": true}, "at": "2020-01-02T00:00:00Z"}'
        contents = {7: b"no JSON", 8: b'{"id": "8"}', 9: None}
        made = [
            Record(offset=offset, timestamp_ms=offset, key=None, value=contents.get(offset, good % offset))
            for offset in range(first, first + count)
        ]
        return [bytes(build_batch(made[at : at + 10])) for at in range(0, count, 10)]

    made = make_bucket()
    made.add_topic("shop.orders-2024", [[orders(0, 60)]])
    made.add_topic("flights", [[batches(0, 60)]])
    shape = {"value_format": "json", "value_schema": "id bigint, state struct<paid: boolean>, at timestamp"}
    permissive = {**shape, "value_mode": "PERMISSIVE"}
    names = views(spark, made.url, values={"shop.orders-2024": permissive})
    assert names == {"flights": "flights", "shop.orders-2024": "shop_orders_2024"}
    counts = (
        "SELECT count(*), count(value), sum(value.id), count_if(value.state.paid), max(value.at), count(_corrupt_record)"
        " FROM shop_orders_2024"
    )
    (found,) = spark.sql(counts).collect()
    assert tuple(found) == (60, 57, sum(range(60)) - 7 - 8 - 9, 57, datetime(2020, 1, 2), 2)
    bad = spark.sql("SELECT offset, _corrupt_record FROM shop_orders_2024 WHERE _corrupt_record IS NOT NULL").collect()
    assert sorted((row[0], bytes(row[1])) for row in bad) == [(7, b"no JSON"), (8, b'{"id": "8"}')]
    assert spark.sql("SELECT count(*) FROM flights WHERE value IS NOT NULL").collect()[0][0] == 48
    # Spark plans a view once; made again, it has what was offloaded since.
    made.extend("shop.orders-2024", 0, orders(60, 10))
    assert views(spark, made.url, values={"shop.orders-2024": permissive}) == names
    assert spark.sql("SELECT max(value.id) FROM shop_orders_2024").collect()[0][0] == 69

    frame = load(spark, made, subscribe="shop.orders-2024", **shape)
    with pytest.raises(PySparkException, match=r"shop\.orders-2024-0, offset 7: the value cannot be decoded as json"):
        frame.collect()
    assert load(spark, made, subscribe="shop.orders-2024", **shape, columns="offset").count() == 70
    stream = spark.readStream.format("stratalog").options(
        subscribe="shop.orders-2024", missingTail="ignore", startingOffsets="earliest", **permissive
    )
    writer = stream.load(made.url).select("offset", "value.id").writeStream.format("parquet")
    query = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start(str(tmp_path / "rows"))
    assert query.awaitTermination(240)
    streamed = spark.read.parquet(str(tmp_path / "rows")).collect()
    assert sorted((row["offset"], row["id"]) for row in streamed) == [(o, None if o in (7, 8, 9) else o) for o in range(70)]
    made.add_topic("shop_orders-2024", [[orders(0, 10)]])
    with pytest.raises(Conflict, match=r"'shop\.orders-2024' and 'shop_orders-2024' would both be view shop_orders_2024"):
        views(spark, made.url)


@pytest.mark.parametrize("shift_ms", [-3_600_000, 3_600_000])
def test_a_replay_shifts_no_record_without_a_timestamp(spark: SparkSession, tmp_path: Path, shift_ms: int) -> None:
    made = ColdBucket(tmp_path / "bucket")
    times_ms = [-1, 0, 1_700_000_000_000]
    made.add_topic(
        "t", [[[bytes(build_batch([msgspec.structs.replace(record(o), timestamp_ms=ms)])) for o, ms in enumerate(times_ms)]]]
    )
    rows = _shaped(load(spark, made, subscribe="t", includeHeaders="true"), ReplayTarget(bootstrap="a:1", shift_ms=shift_ms))
    shifted = rows.selectExpr("unix_millis(timestamp) as ms").collect()
    assert sorted(row.ms for row in shifted) == sorted([-1, shift_ms, 1_700_000_000_000 + shift_ms])


def test_days_of_usage_are_those_of_utc_and_no_timestamp_has_one(spark: SparkSession, tmp_path: Path) -> None:
    made = ColdBucket(tmp_path / "bucket")
    day_ms = 86_400_000
    made.add_topic("t", [[[bytes(build_batch([msgspec.structs.replace(record(0), timestamp_ms=10 * day_ms + 1)]))]]])
    made.add_topic("u", [[[bytes(build_batch([msgspec.structs.replace(record(0), timestamp_ms=-1)]))]]])
    spark.conf.set("spark.sql.session.timeZone", "America/Los_Angeles")
    try:
        found = usage(spark, {"store": made.url, "subscribe": "t,u"})
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert [(row["topic"], row["day"]) for row in found.days] == [("t", "1970-01-11"), ("u", None)]
    assert [row["max_timestamp"] for row in found.partitions] == ["1970-01-11T00:00:00.001Z", None]


def test_a_collection_after_a_task_of_a_job_looks_through_few_objects(spark: SparkSession, tmp_path: Path) -> None:
    counts = run_tasks(
        spark, f"file://{tmp_path}", list(range(8)), lambda bucket, task: (len(gc.get_objects()), gc.get_freeze_count())
    )
    assert 10 * max(looked_through for looked_through, _ in counts) < min(set_aside for _, set_aside in counts)
