"""``stratalog bench`` with tiny loads against a real cluster: checks that it works and its totals are right, not any speed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from integration.process_cluster import ProcessCluster

from stratalog_loadgen.processes.loads import ConsumerLoad, Payload
from stratalog_loadgen.processes.workers import Workers
from stratalog_loadgen.runs.copy import measure_copy
from stratalog_loadgen.settings import Readers, Topics, Traffic, Window, consumer_options

pytestmark = pytest.mark.integration
_SHORT = ("--warmup", "0.2", "--duration", "1")


def _measured(cluster: ProcessCluster, *words: str) -> dict[str, Any]:
    result = cluster.json("bench", *words)
    assert result["settings"]
    assert result["machine"]["cores"] == os.cpu_count()
    return dict(result["measured"])


def test_producers_at_full_speed_and_nothing_else_in_the_log(cluster: ProcessCluster) -> None:
    options = ("--producers", "4", "--processes", "2", "--compression", "zstd", "--keys", "round-robin")
    measured = _measured(cluster, "produce", *_SHORT, *options)
    assert measured["records_per_s"] > 0
    assert measured["sent_in_all"] == measured["in_the_log"] >= measured["records"]


def test_a_number_of_records_in_single_batches(cluster: ProcessCluster) -> None:
    measured = _measured(cluster, "produce", "--records", "3000", "--batch-records", "1", "--linger-ms", "0")
    assert (measured["records"], measured["sent_in_all"], measured["in_the_log"]) == (3000, 3000, 3000)


def test_the_client_alone(cluster: ProcessCluster) -> None:
    assert _measured(cluster, "produce", *_SHORT, "--client-limit")["records_per_s"] > 0


def test_latency_at_a_rate_to_the_acknowledgement_and_to_the_consumer(cluster: ProcessCluster) -> None:
    measured = _measured(cluster, "latency", *_SHORT, "--rate", "200")
    assert 190 <= measured["records"] <= 210
    assert 0 < measured["latency_p50_ms"] <= measured["latency_p99_ms"] <= measured["latency_max_ms"]
    assert 0 < measured["end_to_end_p50_ms"] <= measured["end_to_end_max_ms"]


def test_a_copier_passes_on_each_record_in_a_transaction(cluster: ProcessCluster) -> None:
    found = measure_copy(
        cluster.bootstrap,
        Topics(partitions=3, replication_factor=3),
        Traffic(payload=Payload(record_bytes=100), batch_bytes=131_072, linger_ms=0),
        Window(warmup_s=0.2, duration_s=1),
        records_per_s=200,
        commit_ms=50,
    )
    assert 190 <= found.measured["records"] <= 210
    assert found.measured["failed"] == 0
    assert found.measured["copied_records"] > 0  # How many come within the second depends on the machine.
    assert found.measured["transactions_per_s"] > 0
    assert 0 < found.measured["end_to_end_p50_ms"] <= found.measured["end_to_end_p99_ms"]


@pytest.mark.parametrize("light", [(), ("--light",), ("--light", "--protocol", "consumer")])
def test_two_groups_read_all_while_one_consumer_leaves(cluster: ProcessCluster, light: tuple[str, ...]) -> None:
    options = ("--groups", "2", "--consumers", "2", "--consumer-processes", "4", "--rate", "300", "--leave", *_SHORT)
    measured = _measured(cluster, "consume", *options, *light)
    assert measured["slowest_group_records"] > 0
    assert measured["rebalance_s"] > 0


def test_assigned_consumers_begin_again_at_the_end(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic(partitions=2)
    cluster.fill(topic, *map(str, range(20)))
    client = consumer_options(cluster.bootstrap, Readers(consumers=2), earliest=True) | {"enable.auto.commit": False}
    load = ConsumerLoad(client=client, topics=[topic], groups=["none"], consumers=2, assigned=[[0], [1]], repeat=True)
    with Workers([load]) as workers:
        workers.begin(ConsumerLoad)
        workers.follow_until(lambda: workers.records(ConsumerLoad) >= 100, 60, "read everything five times")
        workers.stop(ConsumerLoad)
        (counted,) = workers.finish(ConsumerLoad, 0)
    assert counted.records >= 100
    assert counted.assigned == {"none": 2}
    assert counted.failure == ""


def test_catching_up_while_producers_go_on(cluster: ProcessCluster) -> None:
    options = ("--mode", "catch-up", "--history-bytes", "2000000", "--rate", "500")
    measured = _measured(cluster, "consume", *options)
    assert measured["records"] >= 2000
    assert measured["produced_records"] > 0


def test_idle_connections(cluster: ProcessCluster) -> None:
    measured = _measured(cluster, "connections", "--count", "200", "--duration", "0.5")
    assert (measured["connections"], measured["failed"]) == (200, 0)


def test_gaps_while_a_broker_dies(cluster: ProcessCluster) -> None:
    victim = cluster.processes("broker")[0]
    try:
        options = ("--kill-pid", str(victim["pid"]), "--partitions", "8", "--before", "6", "--after", "30")
        measured = _measured(cluster, "failover", *options)
    finally:
        cluster.restart(victim["name"])
    assert measured["partitions_moved"] > 0
    assert 0 < measured["gap_median_s"] <= measured["gap_max_s"]


def test_a_workload_file_and_the_table_for_people(cluster: ProcessCluster, tmp_path: Path) -> None:
    keys = "topics: 2\npartitionsPerTopic: 3\nmessageSize: 100\nsubscriptionsPerTopic: 1\nproducersPerTopic: 1\n"
    rest = "consumerPerSubscription: 1\nproducerRate: 400\ntestDurationMinutes: 0.02\nwarmupDurationMinutes: 0.005\n"
    (tmp_path / "tiny.yaml").write_text(f"name: tiny\n{keys}{rest}")
    text = cluster.run("bench", "workload", str(tmp_path / "tiny.yaml"))
    assert text.startswith("workload tiny, ")
    assert re.search(r"end_to_end_p99_ms +[\d.]+", text)


def test_a_record_that_the_client_refuses_ends_the_run(cluster: ProcessCluster) -> None:
    cluster.run("bench", "produce", *_SHORT, "--record-bytes", "5000", "--set", "message.max.bytes=2000", expect=3)


def test_wrong_settings_are_refused_by_name(cluster: ProcessCluster) -> None:
    cluster.run("bench", "produce", "--producers", "1", "--processes", "2", expect=2)
    cluster.run("bench", "consume", "--leave", expect=2)
    cluster.run("bench", "consume", "--light", "--topic", cluster.new_topic(), expect=2)
    cluster.run("bench", "failover", "--kill-pid", "99999999", expect=4)
