"""``stratalog job compact`` on a real cluster: what a plain consumer reads before and after, and what a worker does then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from integration.process_cluster import ProcessCluster
from integration.test_spark_writes import messages

from stratalog.exit_codes import ExitCode

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.timeout(300)]
PARTITIONS = 2
KEYS = 20
COUNT = 300
COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1", "delete.retention.ms": "86400000"}


def produce(cluster: ProcessCluster, topic: str, numbers: range, *, commits: bool = True) -> None:
    """Records of a few keys, every seventh a tombstone, in one transaction."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": f"{topic}-writer", "log_level": 0})
    producer.init_transactions(60)
    producer.begin_transaction()
    for number in numbers:
        key, value = b"key-%d" % (number * number % KEYS), None if number % 7 == 0 else b"%d" % number
        producer.produce(topic, value, key, number % PARTITIONS, timestamp=1_000 + number)
    assert producer.flush(60) == 0
    if commits:
        producer.commit_transaction(60)
    else:
        producer.abort_transaction(60)


def table(read: list[Any]) -> dict[tuple[int, bytes], tuple[int, bytes | None]]:
    """The newest record of each key: offset and value."""
    found: dict[tuple[int, bytes], tuple[int, bytes | None]] = {}
    for each in sorted(read, key=lambda one: (one.partition(), one.offset())):
        found[each.partition(), each.key()] = (each.offset(), each.value())
    return found


def test_cold_history_is_compacted_on_spark(cluster: ProcessCluster, tmp_path: Path) -> None:
    topic, store, page = cluster.new_topic(PARTITIONS, COMPACTED), cluster.data / "store", tmp_path / "compacted.html"
    for first in range(0, COUNT, 100):
        produce(cluster, topic, range(first, first + 100))
        produce(cluster, topic, range(1_000, 1_020), commits=False)
        cluster.run("tier", "offload", topic, "--wait", "--delete-hot")
    before = messages(cluster, topic, COUNT, PARTITIONS)
    newest = table(before)
    gone = len(before) - len(newest)
    words = ["job", "compact", topic, "--store", str(store), "--metadata", cluster.metadata, "--master", "local[1]", "--json"]
    done = json.loads(cluster.run(*words, "--html", str(page)))
    assert (done["records_superseded"], done["records_removed"], done["problems"]) == (gone, gone, [])
    assert done["stored_bytes_after"] < done["stored_bytes_before"]
    assert "Segments replaced" in page.read_text()
    after = messages(cluster, topic, len(newest), PARTITIONS)
    assert len(after) == len(newest), "each key once"
    assert table(after) == newest
    again = json.loads(cluster.run(*words, "--dry-run"))
    assert (again["dry_run"], again["records_superseded"], again["segments_found"]) == (True, 0, 0)
    cluster.run("tier", "verify", topic)
    cluster.run("tier", "compact", topic)
    assert table(messages(cluster, topic, len(newest), PARTITIONS)) == newest, "tombstones stay for delete.retention.ms"
    other = cluster.new_topic(1, {"retention.ms": "-1"})
    refused = [*words[:2], other, *words[3:]]
    cluster.run(*refused, expect=ExitCode.USAGE)
