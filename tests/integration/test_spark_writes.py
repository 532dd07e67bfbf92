"""The Spark sink and the replay job against a real cluster, read back by a plain consumer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from integration.committed_reads import committed_values
from integration.process_cluster import KEPT_FOR_EVER, ProcessCluster
from kafka.partitioner import murmur2
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from stratalog_core.errors import Invalid, NotFound, Unavailable
from stratalog_pipeline.jobs.replay import ReplayTarget, replay
from stratalog_pipeline.kafka_sink import check_topic, parse_write_options, send
from stratalog_pipeline.sink_markers import Unit
from stratalog_pipeline.sink_transactions import send_once

pytestmark = [pytest.mark.integration, pytest.mark.spark]
PARTITIONS = 3
FIRST_MS = 1_700_000_000_000


def messages(cluster: ProcessCluster, topic: str, count: int, partitions: int = PARTITIONS) -> list[Message]:
    """Return all messages of a topic by partition and offset; fail unless there are exactly ``count``."""
    consumer = Consumer(
        {"bootstrap.servers": cluster.bootstrap, "group.id": "none", "enable.partition.eof": True, "log_level": 0}
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
    found: list[Message] = []
    ended: set[int | None] = set()
    deadline = time.monotonic() + 120
    while len(ended) < partitions:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages"
        for message in consumer.consume(1000, 0.2):
            error = message.error()
            if error is None:
                found.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
    consumer.close()
    assert len(found) == count
    return sorted(found, key=lambda message: (message.partition(), message.offset()))


def test_rows_arrive_with_all_their_columns_where_javas_client_would_send_them(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic(PARTITIONS, KEPT_FOR_EVER)
    keys = [f"key-{number}" for number in range(200)]
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array(keys),
            "value": pa.array([None if number % 7 == 0 else b"v" * number for number in range(200)], pa.binary()),
            "timestamp": pa.array([(FIRST_MS + number) * 1000 for number in range(200)], pa.timestamp("us", tz="UTC")),
        }
    )
    options = parse_write_options({"kafka.bootstrap.servers": cluster.bootstrap, "topic": topic})
    check_topic(options)
    assert send([batch, batch.slice(0, 0)], options) == 200
    for message in messages(cluster, topic, 200):
        key = message.key()
        assert isinstance(key, bytes)
        number = int(key.decode().removeprefix("key-"))
        assert message.value() == (None if number % 7 == 0 else b"v" * number)
        assert message.timestamp()[1] == FIRST_MS + number
        assert message.partition() == (murmur2(key) & 0x7FFF_FFFF) % PARTITIONS


def test_rows_that_brokers_refuse_fail_the_task(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic(1, {"max.message.bytes": "1000"})
    servers = {"kafka.bootstrap.servers": cluster.bootstrap}
    large = pa.RecordBatch.from_pydict({"value": pa.array([b"x", os.urandom(5000)], pa.binary())})
    with pytest.raises(Invalid):
        send([large], parse_write_options({**servers, "topic": topic}))
    with pytest.raises(NotFound, match="create it first"):
        check_topic(parse_write_options({**servers, "topic": "nothing-like-it"}))
    away = {"kafka.bootstrap.servers": "127.0.0.1:1", "kafka.delivery.timeout.ms": "1500", "topic": topic}
    with pytest.raises(Unavailable):
        send([large.slice(0, 1)], parse_write_options(away))
    with pytest.raises(Invalid, match="no such"):
        send([large], parse_write_options({**servers, "topic": topic, "kafka.no such": "1"}))


def test_the_rate_is_kept(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic(1)
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"x"] * 200, pa.binary())})
    began = time.monotonic()
    send([batch], parse_write_options({"kafka.bootstrap.servers": cluster.bootstrap, "topic": topic, "rowsPerSecond": "100"}))
    assert time.monotonic() - began >= 1.9, "200 rows take two seconds at least"


@pytest.mark.timeout(600)
def test_a_batch_and_a_stream_are_written_by_spark(cluster: ProcessCluster, spark: SparkSession, tmp_path: Path) -> None:
    source, target = cluster.new_topic(PARTITIONS, KEPT_FOR_EVER), cluster.new_topic(PARTITIONS, KEPT_FOR_EVER)
    rows = spark.range(500).selectExpr(
        "cast(id as string) as key", "concat('v', id) as value", "cast(id % 3 as int) as partition"
    )
    servers = {"kafka.bootstrap.servers": cluster.bootstrap}
    rows.write.format("stratalog").options(**servers, topic=source).mode("append").save()
    assert len(messages(cluster, source, 500)) == 500
    cluster.run("tier", "offload", source, "--wait")
    stream = spark.readStream.format("stratalog").options(**servers, subscribe=source, startingOffsets="earliest")
    frame = stream.option("maxOffsetsPerTrigger", 200).load(str(cluster.data / "store"))
    shaped = frame.selectExpr("key", "value", "partition", "timestamp", f"'{target}' as topic")
    writer = (
        shaped.writeStream.format("stratalog")
        .options(**servers, topic=target)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
    )
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(400)
    written, read = messages(cluster, target, 500), messages(cluster, source, 500)
    assert [(m.partition(), m.key(), m.value(), m.timestamp()) for m in written] == [
        (m.partition(), m.key(), m.value(), m.timestamp()) for m in read
    ]
    for _ in range(2):
        # The second time continues the write, and finds nothing to do.
        rows.write.format("stratalog").options(**servers, topic=target, writeId="load").mode("append").save()
        assert len(messages(cluster, target, 1000)) == 1000
    with pytest.raises(PySparkException, match="can only be appended to"):
        rows.write.format("stratalog").options(**servers, topic=source).mode("overwrite").save()


def test_a_write_that_is_run_again_in_other_tasks_is_refused(cluster: ProcessCluster, spark: SparkSession) -> None:
    topic = cluster.new_topic(1)
    servers = {"kafka.bootstrap.servers": cluster.bootstrap, "topic": topic, "writeId": "split"}
    rows = spark.range(300, numPartitions=2).selectExpr("cast(id as string) as value")
    # A run that ended after its second task.
    second = pa.RecordBatch.from_pydict({"value": pa.array([str(number) for number in range(150, 300)])})
    unit = Unit(write="split", batch=0, task=1, run="first")
    assert send_once([second], parse_write_options(servers), unit) == 150
    with pytest.raises(PySparkException, match=r"task 1 of batch 0 of write split has \d+ rows that are not the 150"):
        rows.repartition(3).write.format("stratalog").options(**servers).mode("append").save()
    assert sorted(map(int, committed_values(cluster.bootstrap, topic))) == list(range(150, 300))
    rows.write.format("stratalog").options(**servers).mode("append").save()
    assert sorted(map(int, committed_values(cluster.bootstrap, topic))) == list(range(300))


def run(*words: str) -> Any:
    command = [sys.executable, "-m", "stratalog", "job", "replay", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(900)
def test_a_replay_is_in_order_filtered_marked_and_resumed(cluster: ProcessCluster, spark: SparkSession, tmp_path: Path) -> None:
    topic, target = cluster.new_topic(PARTITIONS, KEPT_FOR_EVER), cluster.new_topic(PARTITIONS, KEPT_FOR_EVER)
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "log_level": 0})
    for number in range(600):
        producer.produce(topic, str(number), "k", partition=number % PARTITIONS, timestamp=FIRST_MS + number)
    assert producer.flush(60) == 0
    cluster.run("tier", "offload", topic, "--wait")
    condition, progress, store = (
        "cast(cast(value as string) as int) % 2 = 0",
        tmp_path / "progress",
        str(cluster.data / "store"),
    )
    which = ["--store", store, topic, "--offsets", "50..150", "--where", condition, "--window", "120"]
    how = ["--shift", "3600", "--mark", "--keep-partitions", "--checkpoint", str(progress)]
    first = run(*which, "--to", cluster.bootstrap, "--to-topic", target, *how)
    assert (first["records"], first["offsets"], first["windows"], first["was_resumed"]) == (150, 300, 3, False)
    numbers: list[int] = []
    for message in messages(cluster, target, 150):
        value = message.value()
        assert isinstance(value, bytes)
        number = int(value)
        numbers.append(number)
        assert message.timestamp()[1] == FIRST_MS + number + 3_600_000
        assert message.headers() == [("stratalog.source", f"{topic}/{number % PARTITIONS}/{number // PARTITIONS}".encode())]
    wanted = [number for number in range(150, 450) if number % 2 == 0]
    assert numbers == sorted(wanted, key=lambda number: (number % PARTITIONS, number))
    # The position after the last window is lost: that window is run again, and its markers tell that it is written.
    *_, last = sorted(progress.glob("[0-9]*.json"))
    last.unlink()
    source = {"store": store, "subscribe": topic, "missingTail": "ignore"}
    to = ReplayTarget(
        bootstrap=cluster.bootstrap, topic=target, where=condition, keeps_partitions=True, marks=True, shift_ms=3_600_000
    )
    bounds = "--offsets 50..150"
    again = replay(spark, source, to, checkpoint=str(progress), window_offsets=120, bounds=bounds)
    assert (again.was_resumed, again.windows) == (True, 1)
    assert 0 < again.records <= 60
    assert len(messages(cluster, target, 150)) == 150
    assert replay(spark, source, to, checkpoint=str(progress), bounds=bounds).records == 0
    with pytest.raises(Invalid, match=r"a replay of --offsets 50\.\.150; use another checkpoint for everything"):
        replay(spark, source, to, checkpoint=str(progress))
    with pytest.raises(Invalid, match="use another"):
        replay(spark, source, replace(to, where=None), checkpoint=str(progress))
    with pytest.raises(Invalid, match=r"use another checkpoint .* at least once"):
        replay(spark, source, replace(to, is_exactly_once=False), checkpoint=str(progress))
    with pytest.raises(Invalid, match=r"shifted by 3600000 ms.*use another checkpoint .* with the time of sending"):
        replay(spark, source, replace(to, shift_ms=None), checkpoint=str(progress))
    with pytest.raises(Invalid, match=r"with header stratalog.source; use another checkpoint"):
        replay(spark, source, replace(to, marks=False), checkpoint=str(progress))
    with pytest.raises(Invalid, match=rf"a replay of {topic}; use another checkpoint for {target}"):
        replay(spark, {**source, "subscribe": target}, to, checkpoint=str(progress))
    with pytest.raises(NotFound, match=f"'{topic}.replay' does not exist"):
        replay(spark, source, ReplayTarget(bootstrap=cluster.bootstrap))
    with pytest.raises(Invalid, match="`nothing`"):
        replay(spark, source, replace(to, where="nothing = 1"))


def test_a_replay_goes_on_without_what_was_deleted_ahead_of_it(cluster: ProcessCluster, spark: SparkSession) -> None:
    topic, target = cluster.new_topic(1), cluster.new_topic(1)
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "log_level": 0})
    for number in range(300):
        producer.produce(topic, str(number))
    assert producer.flush(60) == 0
    source = {"kafka.bootstrap.servers": cluster.bootstrap, "store": str(cluster.data / "store"), "subscribe": topic}
    to = ReplayTarget(bootstrap=cluster.bootstrap, topic=target)
    planned = 0

    def deletion(done: int, total: int) -> None:
        nonlocal planned
        if not done:
            planned += 1
            (deleted,) = cluster.admin.delete_records([TopicPartition(topic, 0, 50 + 100 * planned)]).values()
            deleted.result(60)

    with pytest.raises(Invalid, match=rf"{topic}-0: offsets 0\.\.100 are requested; the topic holds 150\.\.300.*--allow-gaps"):
        replay(spark, source, to, window_offsets=100, on_progress=deletion)
    assert committed_values(cluster.bootstrap, target) == []
    source["startingOffsets"] = json.dumps({topic: {"0": 150}})
    done = replay(spark, source, to, window_offsets=50, allow_gaps=True, on_progress=deletion)
    assert (done.records, done.windows) == (50, 3), "nothing is left of two windows"
    assert [(gap.start_offset, gap.end_offset) for gap in done.gaps] == [(150, 250)]
    assert committed_values(cluster.bootstrap, target) == [str(number) for number in range(250, 300)]
