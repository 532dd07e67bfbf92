"""The bulk sink of Spark: a new topic from a data frame, files or another topic, read by an ordinary consumer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fastavro
import pyarrow as pa
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from integration.test_exactly_once_bulk import live_topics, stored_topics
from integration.test_restore import stratalog, up
from kafka.partitioner import murmur2
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType
from pyspark.taskcontext import TaskContext

from stratalog.exit_codes import ExitCode
from stratalog.local.state import load_state
from stratalog_core.errors import Conflict, Invalid, NotFound
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.bulk_sink import parse_bulk_options
from stratalog_pipeline.jobs.backfill import BulkTarget, backfill, backfill_files, backfill_kafka
from stratalog_pipeline.jobs.backfill_sources import KafkaSource, kafka_range
from stratalog_pipeline.spark.bulk_writer import BulkWriter, WrittenSegments
from stratalog_pipeline.spark.source import StratalogDataSource

pytestmark = [pytest.mark.integration, pytest.mark.spark]
SPARK_MASTER = "local[2,3]"
"""A failed task runs up to three times."""
ROWS, PARTITIONS = 20_000, 4
FIRST_MS = 1_600_000_000_000
DELETED_S = 180.0
"""A worker deletes what a write left one second after it; on a loaded machine much later."""


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    """Rows in no order, one in eleven without a key, one in seven without a value."""
    number = sql.col("id")
    headers = sql.array(sql.struct(sql.lit("n").alias("key"), number.cast("string").cast("binary").alias("value")))
    return spark.range(ROWS, numPartitions=5).select(
        sql.when(number % 11 != 0, sql.concat(sql.lit("key-"), number % 500)).alias("key"),
        sql.when(number % 7 != 0, sql.concat(sql.lit("value-"), number)).alias("value"),
        sql.timestamp_millis(sql.lit(FIRST_MS) + (number * 7919) % ROWS).alias("timestamp"),
        headers.alias("headers"),
    )


def consume(bootstrap: str, topic: str, count: int) -> list[Message]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "none", "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(PARTITIONS)])
    found: list[Message] = []
    ended: set[int | None] = set()
    deadline = time.monotonic() + 120
    try:
        while len(ended) < PARTITIONS:
            assert time.monotonic() < deadline, f"{len(found)} of {count} messages"
            for message in consumer.consume(1000, 0.2):
                error = message.error()
                if error is None:
                    found.append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    ended.add(message.partition())
    finally:
        consumer.close()
    assert len(found) == count
    return sorted(found, key=lambda message: (message.partition(), message.offset()))


def test_a_data_frame_becomes_a_topic(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    data, bucket = tmp_path / "data", tmp_path / "bucket"
    with up(data, bucket) as bootstrap:
        target = BulkTarget(
            topic="orders", partitions=PARTITIONS, store=str(bucket), metadata=load_state(data).metadata,
            configs={"stratalog.tier.compression": "zstd"},
        )  # fmt: skip
        backfill(frame, target)
        messages = consume(bootstrap, "orders", ROWS)
        sent = {
            (row.key, row.value, round(row.timestamp.timestamp() * 1000), bytes(row.headers[0].value))
            for row in frame.collect()
        }
        assert {(_text(each.key()), _text(each.value()), each.timestamp()[1], _number(each)) for each in messages} == sent
        for message in messages:
            key = message.key()
            if key is not None:
                assert message.partition() == (murmur2(key) & 0x7FFFFFFF) % PARTITIONS
        for partition in range(PARTITIONS):
            mine = [message for message in messages if message.partition() == partition]
            assert [message.offset() for message in mine] == list(range(len(mine)))
            assert [message.timestamp()[1] for message in mine] == sorted(message.timestamp()[1] for message in mine)
        with pytest.raises(PySparkException, match="the cluster has a topic 'orders': choose another name"):
            backfill(frame, target)
        with pytest.raises(PySparkException, match="topic name 'a/b': 1 to 249 characters"):
            backfill(frame, replace(target, topic="a/b"))
        with pytest.raises(PySparkException, match=r"unknown topic config 'retention'; did you mean 'retention\.ms'"):
            backfill(frame, replace(target, topic="other", configs={"retention": "1"}))
        # Spark gives rows of a partition that the topic lacks to the task of another one.
        beyond = frame.drop("timestamp").withColumn("partition", sql.when(sql.col("key").isNull(), PARTITIONS).otherwise(0))
        with pytest.raises(PySparkException, match="the topic has 4, from 0 on"):
            backfill(beyond, replace(target, topic="other"))
        stratalog("tier", "verify", "orders", "--data", str(data))
        again = spark.read.format("stratalog").option("store", str(bucket)).option("subscribe", "orders").load()
        assert again.count() == ROWS


def _number(message: Message) -> str | bytes | None:
    headers = message.headers()
    assert isinstance(headers, list)
    assert [name for name, _ in headers] == ["n"]
    return headers[0][1]


def _text(content: str | bytes | None) -> str | None:
    return content.decode() if isinstance(content, bytes) else content


def test_a_task_that_is_run_again_writes_nothing_twice(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    def fail_once(value: str | None) -> str | None:
        context = TaskContext.get()
        assert context is not None
        if value == "value-1234" and context.attemptNumber() == 0:
            raise RuntimeError("the first attempt dies with rows written")
        return value

    data, bucket = tmp_path / "data", tmp_path / "bucket"
    with up(data, bucket) as bootstrap:
        placed = frame.withColumn("partition", (sql.hash("value", "timestamp") % PARTITIONS + PARTITIONS) % PARTITIONS)
        arranged = placed.repartitionById(PARTITIONS, sql.col("partition")).sortWithinPartitions("partition")
        failing = sql.udf(fail_once, "string", useArrow=False)
        _write(arranged.withColumn("value", failing("value")), data, bucket)
        assert len({_number(message) for message in consume(bootstrap, "orders", ROWS)}) == ROWS


def test_what_failed_tasks_and_aborted_writes_leave_is_deleted_after_the_grace_period(
    spark: SparkSession, frame: DataFrame, tmp_path: Path
) -> None:
    data, bucket, config, notes = tmp_path / "data", tmp_path / "bucket", tmp_path / "config.toml", tmp_path / "notes"
    notes.mkdir()
    config.write_text("[tiering]\ngrace_ms = 1000\nretention_interval_ms = 500\nsweep_interval_ms = 1000\n")
    for source in _dying_sources(notes):
        spark.dataSource.register(source)
    arranged = frame.withColumn("partition", sql.pmod(sql.hash("timestamp"), sql.lit(PARTITIONS)))
    arranged = arranged.repartitionById(PARTITIONS, sql.col("partition"))
    with up(data, bucket, "--config", str(config)) as bootstrap:
        with pytest.raises(PySparkException, match="dies with everything written"):
            # In one task: another one might still write while the driver aborts.
            _write(frame.withColumn("partition", sql.lit(0)).coalesce(1), data, bucket, "always_dies", topic="aborted")
        _write(arranged, data, bucket, "dies_once")
        left = [note.read_text().split() for note in notes.iterdir()]
        assert len(left) == 3 + PARTITIONS
        assert all(left), "each attempt has left a segment"
        keys = {key for each in left for key in each}
        deadline = time.monotonic() + DELETED_S
        while (still := keys & stored_keys(bucket)) or live_topics(str(bucket)) != stored_topics(str(bucket)):
            assert time.monotonic() < deadline, f"{len(still)} of {len(keys)} objects are left"
            time.sleep(0.5)
        assert len({_number(message) for message in consume(bootstrap, "orders", ROWS)}) == ROWS
        stratalog("tier", "verify", "orders", "--data", str(data))


def _dying_sources(notes: Path) -> list[type[StratalogDataSource]]:
    """Bulk writes whose tasks die with everything written: each once, or always. ``notes`` gets the keys of their segments.

    The classes are local, so they are sent to the workers, which do not have this module.
    """

    def dying(source: str, attempts: int) -> type[StratalogDataSource]:
        class DyingWriter(BulkWriter):
            def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
                message = super().write(iterator)
                context = TaskContext.get()
                assert context is not None
                assert isinstance(message, WrittenSegments)
                if context.attemptNumber() < attempts:
                    keys = [made.entry.key for segments in message.segments.values() for made in segments]
                    (notes / f"{source}-{context.taskAttemptId()}").write_text("\n".join(keys))
                    raise RuntimeError("the task dies with everything written")
                return message

        class Dying(StratalogDataSource):
            @classmethod
            def name(cls) -> str:
                return source

            def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
                return DyingWriter(parse_bulk_options(self.options))

        return Dying

    return [dying("dies_once", 1), dying("always_dies", 1000)]


def stored_keys(bucket: Path) -> set[str]:
    with Bucket(str(bucket)) as opened:

        async def keys() -> set[str]:
            return {info.key async for info in opened.store.list("")}

        return opened.run(keys())


def test_rows_in_the_wrong_order_are_refused_and_nothing_is_left(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    data, bucket = tmp_path / "data", tmp_path / "bucket"
    with up(data, bucket):
        cluster = ("--data", str(data))
        placed = frame.withColumn("partition", sql.pmod(sql.hash("timestamp"), sql.lit(PARTITIONS)))
        with pytest.raises(PySparkException, match="do not follow one another"):
            _write(placed, data, bucket)
        with pytest.raises(PySparkException, match="are in several tasks"):
            _write(placed.repartition(3).sortWithinPartitions("partition"), data, bucket)
        with pytest.raises(PySparkException, match="the topic has 4, from 0 on"):
            _write(placed.withColumn("partition", sql.lit(4)), data, bucket)
        with pytest.raises(PySparkException, match="there is no column 'partition'"):
            _write(frame, data, bucket)
        with pytest.raises(PySparkException, match="option 'metadata' is missing"):
            placed.write.format("stratalog").option("store", str(bucket)).option("topic", "t").mode("append").save()
        listed = json.loads(stratalog("topic", "list", *cluster, "--json").stdout)
        assert listed["topics"] == []
        waiting = json.loads(stratalog("tier", "gc", "--dry-run", *cluster, "--json").stdout)["waiting"]
        assert {row["reason"] for row in waiting} == {"deleted-topic"}
        stratalog("tier", "verify", "orders", *cluster, expect=ExitCode.NOT_FOUND)


def _write(frame: DataFrame, data: Path, bucket: Path, source: str = "stratalog", topic: str = "orders") -> None:
    writer = frame.write.format(source).option("store", str(bucket)).option("metadata", load_state(data).metadata)
    writer.option("topic", topic).option("partitions", PARTITIONS).mode("append").save()


def test_an_export_becomes_a_topic_again(tmp_path: Path) -> None:
    data, bucket, files = tmp_path / "data", tmp_path / "bucket", str(tmp_path / "parquet")
    cluster = ("--data", str(data))
    with up(data, bucket) as bootstrap:
        stratalog("topic", "create", "orders", "--partitions", str(PARTITIONS), "--config", "retention.ms=-1", *cluster)
        producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
        for number in range(500):
            producer.produce(
                "orders", f"v{number}", f"k{number % 50}", partition=number % PARTITIONS, timestamp=FIRST_MS + number
            )
        assert producer.flush(60) == 0
        stratalog("tier", "offload", "orders", "--wait", *cluster)
        stratalog("job", "export", "--store", str(bucket), "orders", "--to", files)
        into = ("--topic", "copy", "--partitions", str(PARTITIONS), *cluster)
        done = json.loads(stratalog("job", "backfill", f"{files}/topic=orders", *into, "--json").stdout)
        assert (done["topic"], done["records"]) == ("copy", 500)
        assert _contents(consume(bootstrap, "copy", 500)) == _contents(consume(bootstrap, "orders", 500))
        taken = stratalog("job", "backfill", files, *into, expect=ExitCode.CONFLICT)
        assert "choose another name" in taken.stderr
        words = ("--topic", "shaped", "--partitions", "1", "--key", "offset", "--value", "upper(cast(value as string))")
        stratalog("job", "backfill", files, *words, "--partition", "0", *cluster)
        consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "none"})
        consumer.assign([TopicPartition("shaped", 0, 0)])
        first = consumer.poll(120)
        consumer.close()
        assert first is not None
        assert (first.key(), first.value()) == (b"0", b"V0")


def test_avro_files_and_a_topic_of_another_cluster_become_topics(spark: SparkSession, tmp_path: Path) -> None:
    data, bucket, files = tmp_path / "data", tmp_path / "bucket", tmp_path / "avro"
    with up(data, bucket) as bootstrap:
        into = BulkTarget(topic="avro", partitions=PARTITIONS, store=str(bucket), metadata=load_state(data).metadata)
        original = _write_avro(files, 6000)
        done = backfill_files(spark, [str(files)], "avro", {"key": "id", "value": "note", "timestamp": "at"}, into)
        assert done.records == len(original)
        found = {(_text(each.key()), _text(each.value()), each.timestamp()[1]) for each in consume(bootstrap, "avro", 6000)}
        assert found == original

        _write_source(bootstrap, data)
        source = consume(bootstrap, "source", 990)
        copied = kafka_range(KafkaSource(bootstrap=bootstrap, topic="source"))
        assert backfill_kafka(spark, copied, replace(into, topic="copy")).records == 990
        copy = consume(bootstrap, "copy", 990)
        assert [_whole(each) for each in copy] == [_whole(each) for each in source]
        for partition in range(PARTITIONS):
            offsets = [each.offset() for each in copy if each.partition() == partition]
            assert offsets == list(range(len(offsets)))
        with pytest.raises(Conflict, match="choose another name"):
            backfill_kafka(spark, copied, replace(into, topic="copy"))
        with pytest.raises(Invalid, match="the source has 4 partitions"):
            backfill_kafka(spark, copied, replace(into, topic="other", partitions=3))
        with pytest.raises(Invalid, match=r"source-\d has no records at offsets \d+\.\.\d+, as after"):
            backfill_kafka(spark, copied, replace(into, topic="other"), keeps_offsets=True)
        with pytest.raises(NotFound, match="there is no topic 'elsewhere'"):
            kafka_range(KafkaSource(bootstrap=bootstrap, topic="elsewhere"))

        # Partition 3 is empty, from offset 2 on.
        plain = consume(bootstrap, "plain", _write_plain(bootstrap, data))
        kept = kafka_range(KafkaSource(bootstrap=bootstrap, topic="plain"))
        backfill_kafka(spark, kept, replace(into, topic="kept"), keeps_offsets=True)
        copy = consume(bootstrap, "kept", len(plain))
        assert [(*_whole(each), each.offset()) for each in copy] == [(*_whole(each), each.offset()) for each in plain]
        producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
        later: list[int | None] = []
        for partition in (2, 3):
            producer.produce("kept", "later", partition=partition, on_delivery=lambda _, each: later.append(each.offset()))
            assert producer.flush(60) == 0
        assert later == [kept.splits[2].offsets.end, 2]
        stratalog("tier", "verify", "kept", "--data", str(data))


def _write_avro(directory: Path, count: int) -> set[tuple[str, str | None, int]]:
    """Write files of a hundred blocks each; return what their records become."""
    schema = fastavro.parse_schema(
        {
            "type": "record", "name": "Row", "fields": [
                {"name": "id", "type": "int"},
                {"name": "note", "type": ["null", "string"]},
                {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
            ],
        }
    )  # fmt: skip
    rows = [(number, f"note {number}" if number % 7 else None, FIRST_MS + number) for number in range(count)]
    directory.mkdir()
    for number in range(3):
        part = rows[number::3]
        with (directory / f"part-{number}.avro").open("wb") as file:
            records = [{"id": key, "note": note, "at": at_ms} for key, note, at_ms in part]
            fastavro.writer(file, schema, records, codec="deflate", sync_interval=300)
    return {(str(key), note, at_ms) for key, note, at_ms in rows}


def _write_source(bootstrap: str, data: Path) -> None:
    """Write 1000 committed records of every kind, of which ten are deleted, and 400 that are aborted."""
    stratalog("topic", "create", "source", "--partitions", str(PARTITIONS), "--config", "retention.ms=-1", "--data", str(data))
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "t", "compression.type": "lz4"})
    producer.init_transactions(120)
    for number in range(14):
        producer.begin_transaction()
        for each in range(100 * number, 100 * number + 100):
            all_headers: list[tuple[str, str | bytes | None]] = [("n", str(each).encode()), ("n", None), ("é", b"\xff")]
            headers = all_headers[: each % 4]
            value, key = None if each % 5 == 0 else f"v{each}", None if each % 7 == 0 else f"k{each}"
            producer.produce("source", value, key, partition=each % PARTITIONS, timestamp=FIRST_MS - each, headers=headers)
        # What is aborted shall be in the log.
        assert producer.flush(60) == 0
        if number % 4 == 1:
            producer.abort_transaction(120)
        else:
            producer.commit_transaction(120)
    _delete_before(bootstrap, "source", 0, 10)


def _write_plain(bootstrap: str, data: Path) -> int:
    """Write records without gaps, of which the first are deleted; return the number of the others."""
    stratalog("topic", "create", "plain", "--partitions", str(PARTITIONS), "--config", "retention.ms=-1", "--data", str(data))
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for partition, count in enumerate((500, 50, 5, 2)):
        for number in range(count):
            producer.produce("plain", f"v{number}", partition=partition, timestamp=FIRST_MS + number)
    assert producer.flush(60) == 0
    _delete_before(bootstrap, "plain", 0, 7)
    _delete_before(bootstrap, "plain", 3, 2)
    return 493 + 50 + 5


def _delete_before(bootstrap: str, topic: str, partition: int, offset: int) -> None:
    # Kept: a client that is collected answers nothing.
    admin = AdminClient({"bootstrap.servers": bootstrap})
    futures = admin.delete_records([TopicPartition(topic, partition, offset)])
    assert [future.result(60).low_watermark for future in futures.values()] == [offset]


def _whole(message: Message) -> tuple[object, ...]:
    headers = message.headers()
    return (message.partition(), message.key(), message.value(), message.timestamp()[1], tuple(headers or ()))


def _contents(messages: list[Message]) -> list[tuple[object, ...]]:
    return [(each.partition(), each.offset(), each.key(), each.value(), each.timestamp()[1]) for each in messages]
