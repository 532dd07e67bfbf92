"""``stratalog tier attach`` of what Apache Kafka has written, and of another cluster's bucket; clients go on with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.kafka_control import KafkaCluster
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from integration.test_restore import stratalog, up

from stratalog.exit_codes import ExitCode

pytestmark = pytest.mark.integration
PARTITIONS = 3
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
ONE_BROKER = {
    "default.replication.factor": "1",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
}
Row = tuple[int, int, bytes | None, bytes | None, int, tuple[Sequence[str | bytes | None], ...]]


def create(bootstrap: str, name: str, **configs: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (made,) = admin.create_topics([NewTopic(name, PARTITIONS, 1, config=configs)]).values()
    made.result(60)


def produce(bootstrap: str, name: str, codec: str, first: int, count: int, transaction: str = "") -> None:
    """Records with keys, headers and timestamps, some without a value; in one committed transaction if it has a name."""
    settings = {"bootstrap.servers": bootstrap, "compression.type": codec, "linger.ms": 5, "enable.idempotence": True}
    producer = Producer({**settings, "transactional.id": transaction} if transaction else settings)
    if transaction:
        producer.init_transactions(120)
        producer.begin_transaction()
    for number in range(first, first + count):
        producer.produce(
            name, None if number % 7 == 0 else str(number).encode() * 20, str(number).encode(), partition=number % PARTITIONS,
            headers=[("number", str(number).encode())], timestamp=1_700_000_000_000 + number,
        )  # fmt: skip
    if transaction:
        producer.commit_transaction(120)
    assert producer.flush(60) == 0


def consume(bootstrap: str, name: str, count: int) -> list[Row]:
    """All records of the topic, at least ``count``: Kafka writes the markers of a transaction after its commit is answered."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "all", "enable.partition.eof": True})
    consumer.assign([TopicPartition(name, partition, 0) for partition in range(PARTITIONS)])
    rows: list[Row] = []
    ended: set[int] = set()
    try:
        while len(ended) < PARTITIONS or len(rows) < count:
            message = consumer.poll(120)
            assert message is not None
            partition, offset, error = message.partition(), message.offset(), message.error()
            assert partition is not None
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    ended.add(partition)
                continue
            assert offset is not None
            headers = tuple(message.headers() or ())
            rows.append((partition, offset, message.key(), message.value(), message.timestamp()[1], headers))
    finally:
        consumer.close()
    return sorted(rows, key=lambda row: row[:2])


def test_a_topic_of_apache_kafka_is_attached_from_its_log_directory(tmp_path: Path) -> None:
    with KafkaCluster(tmp_path, brokers=1, heap="512m", extra=ONE_BROKER) as kafka:
        create(kafka.bootstrap, "orders", **{"segment.bytes": "1048576"})
        for number, codec in enumerate(CODECS):
            produce(kafka.bootstrap, "orders", codec, number * 1000, 1000)
        produce(kafka.bootstrap, "orders", "lz4", 5000, 30, transaction="orders-writer")
        written = consume(kafka.bootstrap, "orders", 5030)
    assert len(written) == 5030
    data, logs = tmp_path / "data", str(tmp_path / "kafka-1" / "data")
    with up(data, tmp_path / "bucket") as bootstrap:
        cluster = ("--data", str(data))
        planned = json.loads(stratalog("tier", "attach", logs, "--topic", "orders", "--dry-run", "--json").stdout)["partitions"]
        assert [(row["partition"], row["start_offset"]) for row in planned] == [(0, 0), (1, 0), (2, 0)]
        again = stratalog("tier", "attach", logs, "--topic", "trains", *cluster, expect=ExitCode.USAGE)
        assert "there are orders" in again.stderr
        done = stratalog("tier", "attach", logs, "--topic", "orders", "--config", "stratalog.tier.compression=zstd", *cluster)
        assert "records are attached" in done.stderr
        taken = stratalog("tier", "attach", logs, "--topic", "orders", *cluster, expect=ExitCode.CONFLICT)
        assert "choose another name" in taken.stderr
        assert consume(bootstrap, "orders", 5030) == written
        produce(bootstrap, "orders", "zstd", 6000, 300)
        stratalog("tier", "offload", "orders", "--wait", "--delete-hot", *cluster)
        longer = consume(bootstrap, "orders", 5330)
        assert [row for row in longer if int(row[2] or b"0") < 6000] == written
        assert len(longer) == len(written) + 300
        stratalog("tier", "verify", "orders", *cluster)
        assert json.loads(stratalog("tier", "scrub", *cluster, "--json").stdout)["findings"] == []


def restorable(bucket: Path) -> list[dict[str, Any]]:
    """The partitions that a restore from the bucket would bring back."""
    report = json.loads(stratalog("restore", "--store", str(bucket), "--dry-run", "--json").stdout)
    return list(report["partitions"])


def test_a_topic_of_another_cluster_is_attached_and_a_killed_attachment_leaves_nothing_to_see(tmp_path: Path) -> None:
    other, data = tmp_path / "other", tmp_path / "data"
    with up(other, tmp_path / "other-bucket") as bootstrap:
        create(bootstrap, "orders", **{"retention.ms": "-1", "segment.ms": "7200000"})
        produce(bootstrap, "orders", "lz4", 0, 3000)
        stratalog("tier", "offload", "orders", "--wait", "--data", str(other))
        written = consume(bootstrap, "orders", 3000)
    with up(data, tmp_path / "bucket") as bootstrap:
        cluster = ("--data", str(data))
        command = [sys.executable, "-m", "stratalog", "tier", "attach", str(tmp_path / "other-bucket"), *cluster]
        for pause_s in (0.5, 0.7, 0.9):
            with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as killed:
                time.sleep(pause_s)
                killed.send_signal(signal.SIGKILL)
            listed = json.loads(stratalog("topic", "list", *cluster, "--json").stdout)
            if listed["topics"]:
                stratalog("topic", "delete", "orders", "--yes", "--now", *cluster)
        stratalog("tier", "attach", str(tmp_path / "other-bucket"), *cluster, "--as", "orders-copy")
        assert consume(bootstrap, "orders-copy", 3000) == written
        configs = json.loads(stratalog("topic", "config", "orders-copy", *cluster, "--json").stdout)["configs"]
        assert {row["name"]: row["value"] for row in configs}["segment.ms"] == "7200000"
        deadline = time.monotonic() + 120
        found = restorable(tmp_path / "bucket")
        while {row["topic"] for row in found} != {"orders-copy"}:
            assert time.monotonic() < deadline, "a topic that was deleted at once is left"
            found = restorable(tmp_path / "bucket")
        assert sum(row["records"] for row in found) == 3000


def test_a_detached_topic_is_in_its_bucket_only_and_comes_back(tmp_path: Path) -> None:
    data, bucket = tmp_path / "data", tmp_path / "bucket"
    cluster = ("--data", str(data))
    with up(data, bucket) as bootstrap:
        create(bootstrap, "orders", **{"retention.ms": "-1", "stratalog.deletion.protection": "true"})
        produce(bootstrap, "orders", "lz4", 0, 900)
        written = consume(bootstrap, "orders", 900)
        refused = stratalog("tier", "detach", "orders", "--yes", *cluster, expect=ExitCode.USAGE)
        assert "protected against deletion" in refused.stderr
        stratalog("topic", "config", "orders", "--set", "stratalog.deletion.protection=false", *cluster)
        stratalog("tier", "detach", "orders", "--yes", *cluster)
        assert json.loads(stratalog("topic", "list", *cluster, "--json").stdout)["topics"] == []
        assert json.loads(stratalog("tier", "gc", "--dry-run", *cluster, "--json").stdout)["due"] == []
        assert json.loads(stratalog("tier", "scrub", *cluster, "--json").stdout)["findings"] == []
        stratalog("tier", "attach", str(bucket), "--topic", "orders", "--as", "orders-again", *cluster)
        assert consume(bootstrap, "orders-again", 900) == written
    stratalog("restore", "--store", str(bucket), "--topic", "orders", *cluster, "--yes")
    with up(data, bucket) as bootstrap:
        assert consume(bootstrap, "orders", 900) == written
        produce(bootstrap, "orders", "lz4", 900, 90)
        assert len(consume(bootstrap, "orders", 990)) == 990
