"""``stratalog job erase`` on a real cluster: what a plain consumer reads before and after, and every byte of the bucket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from confluent_kafka import Producer
from integration.bad_batches import send_to_new_topic
from integration.process_cluster import KEPT_FOR_EVER, ProcessCluster
from integration.test_spark_writes import messages
from support.directory_store import object_contents
from support.hostile_batches import hostile_batch

from stratalog.exit_codes import ExitCode
from stratalog_core.batches.compression import LZ4

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.timeout(300)]
PARTITIONS = 2
COUNT = 300
KIND = "cut short"
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
    assert producer.flush(60) == 0


def files_with(store: Path, content: bytes) -> list[str]:
    return [key for key, stored in object_contents(store).items() if content in stored]


def test_records_are_erased_from_a_cluster(cluster: ProcessCluster, tmp_path: Path) -> None:
    topic, store, page = cluster.new_topic(PARTITIONS, KEPT_FOR_EVER), cluster.data / "store", tmp_path / "erased.html"
    produce(cluster, topic, range(COUNT))
    unreadable = f"{topic}-unreadable"
    written = send_to_new_topic(cluster.admin, unreadable, KEPT_FOR_EVER, {KIND: hostile_batch(KIND, LZ4)})
    assert written == {KIND: "none"}, "a broker does not decompress"
    for name in (topic, unreadable):
        cluster.run("tier", "offload", name, "--wait", "--delete-hot")
    cluster.keep_hot(topic)
    produce(cluster, topic, range(COUNT + 2, COUNT + 10))  # hot, and none of them is to go
    before = messages(cluster, topic, COUNT + 8, PARTITIONS)
    assert files_with(store, SUBJECT)
    what = ["--key", SUBJECT.decode(), "--header", f"user={SUBJECT.decode()}", "--delete-now", "--yes", "--html", str(page)]
    done = cluster.run(
        "job",
        "erase",
        topic,
        unreadable,
        *what,
        "--store",
        str(store),
        "--master",
        "local[1]",
        "--json",
        expect=ExitCode.FINDINGS,
    )
    found = json.loads(done)
    gone = [number for number in range(COUNT) if number % 10 == 0 or number % 25 == 1]
    assert (found["records_found"], found["records_erased"]) == (len(gone), len(gone))
    assert found["unreadable_batches"] == 1
    (of_unreadable,) = [problem for problem in found["problems"] if problem.startswith(f"{unreadable}-0: 1 batches")]
    hot = [problem for problem in found["problems"] if problem != of_unreadable]
    assert len(hot) == PARTITIONS
    assert all(f"offsets from {COUNT // PARTITIONS} on are still hot" in problem for problem in hot)
    assert "Segments replaced" in page.read_text()
    after = messages(cluster, topic, COUNT + 8 - len(gone), PARTITIONS)
    kept = {(m.partition(), m.offset()): (m.key(), m.value(), m.timestamp(), m.headers()) for m in after}
    assert kept == {
        (m.partition(), m.offset()): (m.key(), m.value(), m.timestamp(), m.headers())
        for m in before
        if int(m.value() or b"") not in gone
    }
    assert files_with(store, SUBJECT) == []
    for name in (topic, unreadable):
        cluster.run("tier", "verify", name)
    # Tests that read every topic of this cluster could not read this one.
    cluster.admin.delete_topics([unreadable])[unreadable].result(60)
