"""The same queries by Spark's own Kafka connector and by ours, over a topic half of which is only in the bucket.

Nothing differs but the format's name: our source asks the brokers for the bucket's URL. ``make spark-connector`` runs all
queries, ``make test`` a few of each kind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pyspark
import pytest
from confluent_kafka import Producer
from integration.process_cluster import KEPT_FOR_EVER, ProcessCluster
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from stratalog_loadgen.java_tools import spark_connector

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.usefixtures("java_tools"), pytest.mark.timeout(600)]
RUNS_ALL = "STRATALOG_SPARK_CONNECTOR" in os.environ
PARTITIONS = 3
COLD, HOT = 90, 60
FIRST_MS = 1_700_000_000_000
LAST_MS = FIRST_MS + COLD + HOT - 1


@pytest.fixture(scope="module")
def kafka_format(spark: SparkSession) -> None:
    """Add Spark's Kafka connector to the session."""
    for jar in spark_connector(Path(pyspark.__file__).parent / "jars"):
        spark.sql(f"ADD JAR '{jar}'")


@pytest.fixture(scope="module")
def topics(cluster: ProcessCluster) -> tuple[str, str]:
    """A topic whose first records are only in the bucket and whose last are only at the brokers, and one without history."""
    half_cold, hot = cluster.new_topic(PARTITIONS, KEPT_FOR_EVER), cluster.new_topic(1, KEPT_FOR_EVER)
    _produce(cluster, half_cold, range(COLD), "zstd")
    cluster.run("tier", "offload", half_cold, "--wait", "--delete-hot")
    _produce(cluster, half_cold, range(COLD, COLD + HOT), "lz4")
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "log_level": 0})
    producer.produce(hot, b"only", b"hot", timestamp=FIRST_MS)
    assert producer.flush(60) == 0
    return half_cold, hot


def _produce(cluster: ProcessCluster, topic: str, numbers: range, codec: str) -> None:
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "compression.type": codec, "linger.ms": 50, "enable.idempotence": True}
    )
    for number in numbers:
        producer.produce(
            topic,
            None if number % 11 == 0 else str(number).encode(),
            None if number % 7 == 0 else b"k%d" % number,
            partition=number % PARTITIONS,
            timestamp=FIRST_MS + number,
            headers=[("number", b"%d" % number), ("none", None), ("number", b"")] if number % 3 == 0 else [],
        )
    assert producer.flush(60) == 0


def load(session: SparkSession, cluster: ProcessCluster, source: str, options: Mapping[str, Any]) -> DataFrame:
    return session.read.format(source).option("kafka.bootstrap.servers", cluster.bootstrap).options(**options).load()


def by_partition(topic: str, *values: int) -> str:
    return json.dumps({topic: {str(number): value for number, value in enumerate(values)}})


def queries(topic: str, hot: str) -> dict[str, dict[str, Any]]:
    """Options of reads with the same result by both connectors, by what they are about."""
    offsets = {"startingOffsets": by_partition(topic, 3, -2, 28), "endingOffsets": by_partition(topic, 5, -1, 33)}
    times = {
        "startingOffsetsByTimestamp": by_partition(topic, FIRST_MS, FIRST_MS + 40, FIRST_MS + 95),
        "endingOffsetsByTimestamp": by_partition(topic, FIRST_MS + 9, LAST_MS, LAST_MS + 1000),
    }
    globally = {"startingTimestamp": FIRST_MS + 80, "endingTimestamp": FIRST_MS + 100}
    one = {"subscribe": topic}
    return {
        "subscribe": {"subscribe": f"{topic}, {hot} ,"},
        "assign": {"assign": json.dumps({topic: [2, 0]})},
        "pattern": {"subscribePattern": f"{topic[:-1]}({topic[-1]}|none)"},
        "pattern of nothing": {"subscribePattern": "no such topic"},
        "offsets": {**one, **offsets},
        "offsets of assigned": {
            "assign": json.dumps({topic: [1]}),
            "startingOffsets": json.dumps({topic: {"1": 10}}),
            "endingOffsets": json.dumps({topic: {"1": 40}}),
        },
        "words": {**one, "startingOffsets": " Earliest ", "endingOffsets": "LATEST"},
        "times": {**one, **times},
        "times before offsets": {**one, **offsets, **times},
        "global times": {**one, **globally},
        "global times before all": {**one, **offsets, **times, **globally},
        "start by time, end by offset": {**one, "startingTimestamp": FIRST_MS + 7, "endingOffsets": offsets["endingOffsets"]},
        "no record so late": {
            **one,
            "startingTimestamp": LAST_MS + 1,
            "startingOffsetsByTimestampStrategy": "latest",
        },
        "an end before all": {**one, "endingTimestamp": FIRST_MS - 5},
        "splits": {**one, "minPartitions": 7},
        "few records in a task": {**one, "maxRecordsPerPartition": 20},
        "options without effect": {
            **one, "maxOffsetsPerTrigger": 5, "minOffsetsPerTrigger": 5, "maxTriggerDelay": "1m", "groupIdPrefix": "x",
            "fetchOffset.numRetries": 2, "kafka.client.id": "me", "kafkaConsumer.pollTimeoutMs": 60_000,
        },
        "beyond the end is left out": {
            **one, "failOnDataLoss": "false", "endingOffsets": by_partition(topic, 60, 10, 10),
            "kafkaConsumer.pollTimeoutMs": 500,
        },
    }  # fmt: skip


SAMPLE = ("subscribe", "assign", "offsets", "times before offsets", "splits")
"""Queries that ``make test`` runs, too."""


def rows(frames: Mapping[str, DataFrame]) -> dict[str, list[Sequence[Any]]]:
    """The rows of all queries, in order, by one job of Spark."""
    named = [frame.selectExpr(f"'{name}' as query", "*") for name, frame in frames.items()]
    found: dict[str, list[Sequence[Any]]] = {name: [] for name in frames}
    for row in reduce(DataFrame.unionByName, named).collect():
        found[row["query"]].append(row[1:])
    return {name: sorted(of_query, key=lambda row: (row[2], row[3], row[4])) for name, of_query in found.items()}


@pytest.mark.usefixtures("kafka_format")
def test_the_same_rows_by_the_same_options(spark: SparkSession, cluster: ProcessCluster, topics: tuple[str, str]) -> None:
    asked = {name: options for name, options in queries(*topics).items() if RUNS_ALL or name in SAMPLE}
    for headers in ("true", "false"):
        names = asked if headers == "true" else ("subscribe",)
        frames = {
            source: {name: load(spark, cluster, source, {**asked[name], "includeHeaders": headers}) for name in names}
            for source in ("kafka", "stratalog")
        }
        for name in names:
            assert frames["stratalog"][name].schema == frames["kafka"][name].schema
        theirs, ours = rows(frames["kafka"]), rows(frames["stratalog"])
        for name in names:
            assert ours[name] == theirs[name], name
    assert len(theirs["subscribe"]) == COLD + HOT + 1


@pytest.mark.usefixtures("kafka_format")
def test_splits_are_no_fewer(spark: SparkSession, cluster: ProcessCluster, topics: tuple[str, str]) -> None:
    for options in ({"minPartitions": 7}, {"maxRecordsPerPartition": 20}):
        frame = load(spark, cluster, "stratalog", {"subscribe": topics[0], **options})
        # A segment is cut between its blocks, of which so few records have one; the brokers' part has no such limit.
        assert frame.rdd.getNumPartitions() >= 6


@pytest.mark.usefixtures("kafka_format")
def test_the_same_queries_fail(spark: SparkSession, cluster: ProcessCluster, topics: tuple[str, str]) -> None:
    topic = topics[0]
    wrong: list[dict[str, Any]] = [
        {},
        {"subscribe": topic, "assign": json.dumps({topic: [0]})},
        {"subscribePattern": " "},
        {"subscribe": topic, "startingOffsets": "latest"},
        {"subscribe": topic, "endingOffsets": "earliest"},
        {"subscribe": topic, "startingOffsets": by_partition(topic, 0, 0, -1)},
        {"subscribe": topic, "startingOffsets": by_partition(topic, 0, 0)},
        {"subscribe": topic, "endingOffsets": by_partition(topic, 9, 9, 9, 9)},
        {"subscribe": topic, "startingOffsetsByTimestamp": by_partition(topic, 0)},
        {"subscribe": topic, "startingTimestamp": LAST_MS + 1},
        {"subscribe": topic, "startingOffsets": by_partition(topic, 5, 0, 0), "endingOffsets": by_partition(topic, 4, 9, 9)},
        {"subscribe": topic, "startingTimestamp": FIRST_MS + 100, "endingTimestamp": FIRST_MS + 50},
        {"subscribe": topic, "startingTimestamp": FIRST_MS + 100, "endingOffsets": by_partition(topic, 4, -1, -1)},
        {"subscribe": topic, "endingOffsets": by_partition(topic, 51, 1, 1), "kafkaConsumer.pollTimeoutMs": 500},
        {"subscribe": topic, "minPartitions": 0},
        {"subscribe": topic, "kafka.auto.offset.reset": "earliest"},
        {"subscribe": topic, "kafka.enable.auto.commit": "true"},
        {"subscribe": topic, "minOffsetsPerTrigger": 9, "maxOffsetsPerTrigger": 3},
    ]
    at_once = {"fetchOffset.numRetries": 1, "fetchOffset.retryIntervalMs": 1}
    for options in [{**at_once, **one} for one in (wrong if RUNS_ALL else wrong[:: len(wrong) // 3])]:
        for source in ("kafka", "stratalog"):
            assert fails(load, spark, cluster, source, options), f"{source} took {options}"


def fails(read: Callable[..., DataFrame], *arguments: Any) -> bool:
    try:
        read(*arguments).collect()
    except Exception as error:
        # Spark does not convert what its connector raises while it plans.
        return isinstance(error, PySparkException) or type(error).__name__ == "Py4JJavaError"
    return False
