"""``stratalog job erase`` on a real cluster: what a plain consumer reads before and after, and every byte of the bucket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from confluent_kafka import Producer
from integration.process_cluster import KEPT_FOR_EVER, ProcessCluster
from integration.test_spark_writes import messages
from support.directory_store import object_contents

from stratalog.exit_codes import ExitCode

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.timeout(300)]
PARTITIONS = 2
COUNT = 300
SUBJECT = b"subject-of-the-request"


def key_of(number: int) -> bytes:
    return SUBJECT if number % 10 == 0 else b"key-%d" % number


def produce(cluster: ProcessCluster, topic: str, numbers: range) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "log_level": 0})
    for number in numbers:
        name, value = ("user", SUBJECT) if number % 25 == 1 else ("number", b"%d" % number)
        producer.produce(
            topic, b"%d" % number, key_of(number), number % PARTITIONS, timestamp=1_000 + number, headers=[(name, value)]
        )
    assert producer.flush(30) == 0


def files_with(store: Path, content: bytes) -> list[str]:
    return [key for key, stored in object_contents(store).items() if content in stored]


def test_records_are_erased_from_a_cluster(cluster: ProcessCluster, tmp_path: Path) -> None:
    topic, store, page = cluster.new_topic(PARTITIONS, KEPT_FOR_EVER), cluster.data / "store", tmp_path / "erased.html"
    produce(cluster, topic, range(COUNT))
    cluster.run("tier", "offload", topic, "--wait", "--delete-hot")
    produce(cluster, topic, range(COUNT + 2, COUNT + 10))  # hot, and none of them is to go
    before = messages(cluster, topic, COUNT + 8, PARTITIONS)
    assert files_with(store, SUBJECT)
    what = ["--key", SUBJECT.decode(), "--header", f"user={SUBJECT.decode()}", "--delete-now", "--yes", "--html", str(page)]
    done = cluster.run(
        "job", "erase", topic, *what, "--store", str(store), "--master", "local[1]", "--json", expect=ExitCode.FINDINGS
    )
    found = json.loads(done)
    gone = [number for number in range(COUNT) if number % 10 == 0 or number % 25 == 1]
    assert (found["records_found"], found["records_erased"]) == (len(gone), len(gone))
    assert len(found["problems"]) == PARTITIONS
    assert all(f"offsets from {COUNT // PARTITIONS} on are still hot" in problem for problem in found["problems"])
    assert "Segments replaced" in page.read_text()
    after = messages(cluster, topic, COUNT + 8 - len(gone), PARTITIONS)
    kept = {(m.partition(), m.offset()): (m.key(), m.value(), m.timestamp(), m.headers()) for m in after}
    assert kept == {
        (m.partition(), m.offset()): (m.key(), m.value(), m.timestamp(), m.headers())
        for m in before
        if int(m.value() or b"") not in gone
    }
    assert files_with(store, SUBJECT) == []
    cluster.run("tier", "verify", topic)
