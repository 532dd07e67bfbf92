"""The bulk sink of Spark: a new topic straight from a data frame, read by an ordinary consumer through a broker."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from integration.test_restore import stratalog, up
from kafka.partitioner import murmur2
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.taskcontext import TaskContext

from stratalog.exit_codes import ExitCode
from stratalog.local.state import load_state
from stratalog_pipeline.jobs.backfill import BulkTarget, backfill

pytestmark = [pytest.mark.integration, pytest.mark.spark]
SPARK_MASTER = "local[2,3]"
"""A failed task runs up to three times."""
ROWS, PARTITIONS = 20_000, 4
FIRST_MS = 1_600_000_000_000


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
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    found: list[Message] = []
    ended, deadline = 0, time.monotonic() + 60
    try:
        while ended < PARTITIONS:
            assert time.monotonic() < deadline, f"{len(found)} of {count} messages"
            for message in consumer.consume(1000, 0.2):
                if message.error() is None:
                    found.append(message)
                else:
                    ended += 1
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


def _write(frame: DataFrame, data: Path, bucket: Path) -> None:
    writer = frame.write.format("stratalog").option("store", str(bucket)).option("metadata", load_state(data).metadata)
    writer.option("topic", "orders").option("partitions", PARTITIONS).mode("append").save()


def test_an_export_becomes_a_topic_again(tmp_path: Path) -> None:
    data, bucket, files = tmp_path / "data", tmp_path / "bucket", str(tmp_path / "parquet")
    cluster = ("--data", str(data))
    with up(data, bucket) as bootstrap:
        stratalog("topic", "create", "orders", "--partitions", str(PARTITIONS), "--config", "retention.ms=-1", *cluster)
        producer = Producer({"bootstrap.servers": bootstrap})
        for number in range(500):
            producer.produce(
                "orders", f"v{number}", f"k{number % 50}", partition=number % PARTITIONS, timestamp=FIRST_MS + number
            )
        assert producer.flush(30) == 0
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
        first = consumer.poll(30)
        consumer.close()
        assert first is not None
        assert (first.key(), first.value()) == (b"0", b"V0")


def _contents(messages: list[Message]) -> list[tuple[object, ...]]:
    return [(each.partition(), each.offset(), each.key(), each.value(), each.timestamp()[1]) for each in messages]
