"""The ``stratalog`` command against a real cluster."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from integration.process_cluster import KEPT_FOR_EVER, ProcessCluster

from stratalog.exit_codes import ExitCode

pytestmark = pytest.mark.integration


def test_a_topic_from_creation_to_deletion(cluster: ProcessCluster) -> None:
    cluster.run(
        "topic", "create", "cli-topic", "--partitions", "3", "--replication-factor", "3", "--config", "retention.ms=86400000"
    )
    assert {"name": "cli-topic", "partitions": 3} in cluster.json("topic", "list")["topics"]
    described = cluster.json("topic", "describe", "cli-topic")
    assert [row["partition"] for row in described["partitions"]] == [0, 1, 2]
    assert described["changed_configs"]["retention.ms"] == "86400000"
    shorter = ("topic", "config", "cli-topic", "--set", "retention.ms=1000000", "--unset", "segment.ms")
    cluster.run(*shorter, stdin="y\n", expect=ExitCode.USAGE)  # no terminal to ask on
    (expiring,) = cluster.json(*shorter, "--yes")["expiring"]
    assert (expiring["topic"], expiring["cold_records"], expiring["hot_records"]) == ("cli-topic", 0, 0)
    configs = {row["name"]: row["value"] for row in cluster.json("topic", "config", "cli-topic")["configs"]}
    assert configs["retention.ms"] == "1000000"
    cluster.run("topic", "create", "cli-topic", expect=ExitCode.CONFLICT)
    cluster.run("topic", "config", "cli-topic", "--unset", "retention.ms")
    cluster.run("topic", "config", "cli-topic", "--set", "no.such.setting=1", expect=ExitCode.USAGE)
    cluster.run("topic", "delete", "cli-topic", "--yes")
    cluster.run("topic", "describe", "cli-topic", expect=ExitCode.NOT_FOUND)


def test_a_deleted_topic_is_restored_with_hot_and_cold_records_and_positions(cluster: ProcessCluster) -> None:
    topic, group = cluster.new_topic(partitions=1, configs=KEPT_FOR_EVER), cluster.new_group()
    cluster.run("produce", topic, stdin="1\n2\n")
    cluster.run("tier", "offload", topic, "--wait", "--delete-hot")
    cluster.run("produce", topic, stdin="3\n4\n")
    assert cluster.run("consume", topic, "--group", group, "--count", "1") == "1\n"
    cluster.run("topic", "delete", topic, "--yes")
    assert topic not in {row["name"] for row in cluster.json("topic", "list")["topics"]}
    (row,) = [row for row in cluster.json("topic", "list", "--deleted")["deleted_topics"] if row["name"] == topic]
    assert 0 < row["seconds_left"] <= 86_400
    cluster.run("topic", "create", topic)
    cluster.run("topic", "undelete", topic, expect=ExitCode.CONFLICT)
    cluster.run("topic", "delete", topic, "--now", "--yes")
    done = {"name": topic, "topic_id": row["topic_id"], "partitions": 1, "in_bucket": "restored"}
    assert cluster.json("topic", "undelete", topic) == done
    assert cluster.run("consume", topic) == "1\n2\n3\n4\n"
    assert cluster.run("consume", topic, "--group", group, "--count", "3") == "2\n3\n4\n"
    cluster.run("produce", topic, stdin="5\n")
    cluster.run("tier", "offload", topic, "--wait")
    cluster.run("tier", "verify", topic)
    cluster.run("topic", "delete", topic, "--yes")
    cluster.run("topic", "undelete", row["topic_id"], "--as", f"{topic}-again")
    assert cluster.run("consume", f"{topic}-again", "--count", "5") == "1\n2\n3\n4\n5\n"
    cluster.run("topic", "delete", f"{topic}-again", "--now", "--yes")
    cluster.run("topic", "undelete", f"{topic}-again", expect=ExitCode.NOT_FOUND)


def test_a_protected_topic_is_not_deleted(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic(configs={"stratalog.deletion.protection": "true"})
    cluster.run("produce", topic, stdin="1\n2\n")
    cluster.run("topic", "delete", topic, "--yes", expect=ExitCode.USAGE)
    cluster.run("topic", "delete", topic, "--now", "--yes", expect=ExitCode.USAGE)
    cluster.run("topic", "delete-records", topic, "--before", "1", "--yes", expect=ExitCode.USAGE)
    cluster.run("topic", "config", topic, "--set", "stratalog.deletion.protection=false")
    cluster.run("topic", "delete-records", topic, "--before", "1", "--yes")
    assert cluster.run("consume", topic) == "2\n"
    cluster.run("topic", "delete", topic, "--now", "--yes")


def test_the_clusters_defaults_make_a_topic(cluster: ProcessCluster) -> None:
    assert cluster.json("topic", "create", "cli-default") == {"name": "cli-default", "partitions": 1}
    assert cluster.json("topic", "alter", "cli-default", "--partitions", "3") == {"name": "cli-default", "partitions": 3}
    assert len(cluster.json("topic", "describe", "cli-default")["partitions"]) == 3
    assert cluster.json("topic", "alter", "cli-default", "--replication-factor", "2")["replication_factor"] == 2
    cluster.run("topic", "alter", "cli-default", "--replication-factor", "9", expect=ExitCode.USAGE)
    cluster.run("topic", "alter", "cli-default", expect=ExitCode.USAGE)
    cluster.run("topic", "alter", "cli-default", "--partitions", "2", expect=ExitCode.USAGE)
    cluster.run("topic", "alter", "no-such-topic", "--partitions", "2", expect=ExitCode.NOT_FOUND)
    cluster.run("broker", "defaults", "--set", "segment.ms=123456")
    try:
        configs = {row["name"]: row for row in cluster.json("topic", "config", "cli-default")["configs"]}
        assert configs["segment.ms"] == {"name": "segment.ms", "value": "123456", "source": "cluster"}
        assert configs["retention.ms"]["source"] == "built-in"
        assert "segment.ms" not in cluster.json("topic", "describe", "cli-default")["changed_configs"]
    finally:
        cluster.run("broker", "defaults", "--unset", "segment.ms")
    assert cluster.json("topic", "delete", "cli-default", "--yes") == {"deleted": ["cli-default"]}


def test_records_are_deleted_from_the_start_of_a_topic(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic()
    assert cluster.json_after("1\n2\n3\n", "produce", topic)["records"] == 3
    cluster.run("topic", "delete-records", topic, "--before", "2", stdin="y\n", expect=ExitCode.USAGE)
    (row,) = cluster.json("topic", "delete-records", topic, "--before", "2", "--yes")["partitions"]
    assert row == {"topic": topic, "partition": 0, "earliest_offset": 2}
    assert cluster.run("consume", topic) == "3\n"
    cluster.run("topic", "delete-records", topic, "--before", "some", "--yes", expect=ExitCode.USAGE)
    cluster.run("topic", "delete-records", "no-such-topic", "--before", "1", "--yes", expect=ExitCode.NOT_FOUND)


def test_groups_and_their_offsets_are_deleted(cluster: ProcessCluster) -> None:
    topic, other, group = cluster.new_topic(), cluster.new_topic(), cluster.new_group()
    for name in (topic, other):
        cluster.run("produce", name, stdin="1\n")
        reset = ("group", "reset", group, name, "--to", "latest")
        cluster.run(*reset, stdin="y\n", expect=ExitCode.USAGE)
        assert [row["committed_offset"] for row in cluster.json(*reset, "--dry-run")["offsets"]] == [1]
        cluster.run(*reset, "--yes")
    cluster.run("group", "delete-offsets", group, topic, stdin="y\n", expect=ExitCode.USAGE)
    deleted = cluster.json("group", "delete-offsets", group, topic, "--yes")
    assert deleted == {"group": group, "topic": topic, "partitions": [0]}
    assert [row["topic"] for row in cluster.json("group", "describe", group)["offsets"]] == [other]
    assert cluster.json("group", "delete", group, "--yes") == {"deleted": [group]}
    cluster.run("group", "describe", group, expect=ExitCode.NOT_FOUND)
    cluster.run("group", "delete", group, "--yes", expect=ExitCode.NOT_FOUND)
    cluster.run("group", "delete-offsets", group, other, "--yes", expect=ExitCode.NOT_FOUND)


def test_the_doctor_checks_the_cluster_that_it_finds(cluster: ProcessCluster) -> None:
    place = cluster.data.parent / "beside"
    place.mkdir()
    (place / "data").symlink_to(cluster.data)
    done = subprocess.run(
        [sys.executable, "-m", "stratalog", "doctor", "--json"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert {"processes", "metadata", "bookies", "store"} <= {row["check"] for row in json.loads(done.stdout)["findings"]}


def test_producing_and_consuming_with_everything(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic(configs=KEPT_FOR_EVER)
    cluster.run("produce", topic, "--key-separator", ":", "--compression", "zstd", stdin="a:one\nb:two\n")
    cluster.run("produce", topic, "--value", "three", "--key", "c", "--header", "by=me", "--timestamp", "1372896000000")
    cluster.run("produce", topic, "--null", "--key", "d")
    records = [json.loads(line) for line in cluster.run("consume", topic, "--json").splitlines()]
    assert [(record["key"], record["value"]) for record in records] == [("a", "one"), ("b", "two"), ("c", "three"), ("d", None)]
    assert records[2]["headers"] == [["by", "me"]]
    assert records[2]["timestamp_ms"] == 1_372_896_000_000
    shown = cluster.run(
        "consume", topic, "--offset", "2", "--partition", "0", "--count", "1", "--keys", "--headers", "--timestamps"
    )
    assert shown == "2013-07-04T00:00:00.000Z\tc\tby=me\tthree\n"
    assert cluster.run("consume", topic, "--time", "2013-07-05", "--count", "1") == "one\n"


def test_a_group_commits_what_it_consumed(cluster: ProcessCluster) -> None:
    topic, group = cluster.new_topic(), cluster.new_group()
    cluster.run("produce", topic, stdin="1\n2\n3\n")
    assert cluster.run("consume", topic, "--group", group, "--count", "2") == "1\n2\n"
    assert cluster.run("consume", topic, "--group", group) == "3\n"
    (row,) = cluster.json("group", "describe", group)["offsets"]
    assert (row["committed_offset"], row["lag"]) == (3, 0)
    cluster.run("group", "describe", "no-such-group", expect=ExitCode.NOT_FOUND)


def test_history_moves_to_the_store_and_is_verified(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic(partitions=2)
    lines = [f"line {number}" for number in range(1000)]
    cluster.run("produce", topic, stdin="\n".join(lines) + "\n")
    cluster.run("tier", "offload", topic, "--wait", "--delete-hot")
    rows = cluster.json("tier", "status", topic)["partitions"]
    assert sum(row["cold_end_offset"] for row in rows) == 1000
    assert sum(row["hot_bytes"] for row in rows) == 0
    assert sum(row["lag_records"] for row in rows) == 0
    segments = cluster.json("tier", "show", topic)["segments"]
    assert sum(segment["record_count"] for segment in segments) == 1000
    cluster.run("tier", "verify", topic)
    assert sorted(cluster.run("consume", topic).splitlines()) == sorted(lines)


def test_the_doctor_finds_nothing_wrong_and_status_shows_every_process(cluster: ProcessCluster) -> None:
    findings = cluster.json("doctor")["findings"]
    assert not [finding for finding in findings if finding["verdict"] == "fail"], findings
    states = {process["name"]: process["state"] for process in cluster.json("cluster", "status")["processes"]}
    assert set(states.values()) == {"running"}
    assert len(states) == 9


def test_the_doctor_names_what_died(cluster: ProcessCluster) -> None:
    cluster.kill("tiering-1")
    try:
        warnings = [finding for finding in cluster.json("doctor")["findings"] if finding["check"] == "processes"]
        assert "tiering-1" in warnings[0]["detail"]
        cluster.run("cluster", "kill", "tiering-1", expect=ExitCode.CONFLICT)
        cluster.run("cluster", "kill", "no-such", expect=ExitCode.NOT_FOUND)
    finally:
        cluster.restart("tiering-1")
