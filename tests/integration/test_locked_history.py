"""Locked history on a cluster of processes with a real MinIO: who is refused what until when, and what is left afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import confluent_kafka
import pytest
from botocore.exceptions import ClientError
from confluent_kafka import TopicPartition
from integration.process_cluster import ProcessCluster

from stratalog.exit_codes import ExitCode
from stratalog.local.minio import BUCKET
from stratalog.local.secrets import store_environment
from stratalog_core.moments import utc_text

pytestmark = [pytest.mark.integration, pytest.mark.s3]
HELD_S = 86_400
BRIEF_S = 10
"""Long enough for the worker to write one segment and its manifest."""
FAST = "grace_ms = 0\nretention_interval_ms = 500\nsweep_interval_ms = 1000\ndeletion_lag_ms = 0\n"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    """A cluster with its own MinIO with Object Lock, whose worker deletes garbage at once."""
    made = ProcessCluster(tmp_path / "cluster")
    sizes = [word for role in ("metadata", "bookies", "brokers") for word in (f"--{role}", "1")]
    made.run("cluster", "start", *sizes, "--tiering", "1", "--minio", "--object-lock")
    try:
        configuration = made.data / "config" / "tiering-1.toml"
        configuration.write_text(configuration.read_text().replace("[tiering]\n", f"[tiering]\n{FAST}"))
        made.restart("tiering-1")
        yield made
    finally:
        made.run("cluster", "stop")


@pytest.fixture
def administrator(cluster: ProcessCluster) -> Iterator[Any]:
    """A client of MinIO that may do anything."""
    (server,) = cluster.processes("store")
    secrets = store_environment(cluster.data)
    client = boto3.client(
        "s3", endpoint_url=f"http://{server['address']}", region_name="us-east-1",
        aws_access_key_id=secrets["AWS_ACCESS_KEY_ID"], aws_secret_access_key=secrets["AWS_SECRET_ACCESS_KEY"],
    )  # fmt: skip
    yield client
    client.close()


def versions(administrator: Any) -> list[dict[str, Any]]:
    """All versions and delete markers but those of the probe that a restart of the worker may interrupt."""
    answer = administrator.list_object_versions(Bucket=BUCKET)
    found = [*answer.get("Versions", ()), *answer.get("DeleteMarkers", ())]
    return [each for each in found if not each["Key"].startswith("probe/")]


def refusal(cluster: ProcessCluster, *words: str) -> str:
    """The message of a command that is refused."""
    command = [sys.executable, "-m", "stratalog", *words, "--data", str(cluster.data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == ExitCode.USAGE, done.stderr
    return done.stderr


def test_locked_history_is_kept_by_everybody_until_its_date_and_then_goes_completely(
    cluster: ProcessCluster, administrator: Any
) -> None:
    brief, topic = locked_topic(cluster, BRIEF_S), locked_topic(cluster, HELD_S)
    (segment,) = cluster.json("tier", "show", topic)["segments"]
    (status,) = cluster.json("tier", "status", topic)["partitions"]
    until_ms = segment["lock_until_ms"]
    assert (segment["lock_mode"], status["lock_mode"], status["lock_until_ms"]) == ("compliance", "compliance", until_ms)
    assert 0 < until_ms / 1000 - time.time() <= HELD_S + 1
    assert f"compliance  {utc_text(until_ms)[:-1]}" in cluster.run("tier", "show", topic)

    # Deletions by the store's administrator are refused by the store, or leave the version.
    stored = [each for each in versions(administrator) if topic_id_of(segment["key"]) in each["Key"]]
    locked = {each["Key"]: each["VersionId"] for each in stored if not each["Key"].startswith(("owners/", "topics/"))}
    assert {key.split("/")[0] for key in locked} == {"segments", "manifests"}
    assert locked[segment["key"]] == segment["version_id"]
    for key, version in locked.items():
        held = administrator.get_object_retention(Bucket=BUCKET, Key=key, VersionId=version)["Retention"]
        assert (held["Mode"], held["RetainUntilDate"]) == ("COMPLIANCE", datetime.fromtimestamp(until_ms / 1000, UTC))
        with pytest.raises(ClientError, match="WORM protected"):
            administrator.delete_object(Bucket=BUCKET, Key=key, VersionId=version)
    # Deletions by us are refused with the date.
    for words in (("delete", topic), ("delete", topic, "--now"), ("delete-records", topic, "--before", "2")):
        assert f"are locked in the object store until {utc_text(until_ms)} (compliance)" in refusal(
            cluster, "topic", *words, "--yes"
        )
    for futures in (cluster.admin.delete_topics([topic]), cluster.admin.delete_records([TopicPartition(topic, 0, 2)])):
        (future,) = futures.values()
        with pytest.raises(confluent_kafka.KafkaException, match="POLICY_VIOLATION"):
            future.result(60)
    assert "maximum is retention.ms" in refusal(cluster, "topic", "config", topic, "--set", "retention.ms=1000", "--yes")
    assert cluster.run("consume", topic, "--count", "3") == "1\n2\n3\n"

    # After the date everything can be deleted, and no version is left.
    (segment,) = cluster.json("tier", "show", brief)["segments"]
    time.sleep(max(0.0, segment["lock_until_ms"] / 1000 - time.time()) + 1)
    cluster.run("topic", "delete", brief, "--now", "--yes")
    deadline = time.monotonic() + 120
    while left := [each["Key"] for each in versions(administrator) if topic_id_of(segment["key"]) in each["Key"]]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
    assert [each["name"] for each in cluster.json("topic", "list")["topics"]] == [topic]
    assert cluster.json("tier", "status", topic)["partitions"][0]["last_error"] == ""


def locked_topic(cluster: ProcessCluster, lock_s: int) -> str:
    """Return a topic of three records in a segment that is locked for this time."""
    configs = {"stratalog.tier.lock.mode": "compliance", "stratalog.tier.lock.ms": str(lock_s * 1000)}
    topic = cluster.new_topic(configs=configs, copies=1)
    cluster.run("produce", topic, stdin="1\n2\n3\n")
    cluster.run("tier", "offload", topic, "--wait", "--delete-hot")
    return topic


def topic_id_of(key: str) -> str:
    return key.split("/")[1]


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.skipif("STRATALOG_ERASE_MINIO" not in os.environ, reason="a suite of its own: make erase-minio")
def test_erased_records_are_in_no_version_of_any_object_and_locked_ones_are_named(
    cluster: ProcessCluster, administrator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store_environment(cluster.data).items():
        monkeypatch.setenv(name, value)
    free = cluster.new_topic(copies=1)
    locked = cluster.new_topic(
        configs={"stratalog.tier.lock.mode": "compliance", "stratalog.tier.lock.ms": "3600000"}, copies=1
    )
    for topic in (free, locked):
        cluster.run("produce", topic, "--key-separator", ":", stdin=f"{topic}-subject:a\nother:b\n{topic}-subject:c\n")
        cluster.run("tier", "offload", topic, "--wait", "--delete-hot")
    (segment,) = cluster.json("tier", "show", locked)["segments"]
    assert versions_with(administrator, f"{free}-subject")
    keys = [word for topic in (free, locked) for word in ("--key", f"{topic}-subject")]
    store = json.loads((cluster.data / "cluster.json").read_text())["store"]
    done = cluster.run(
        "job", "erase", free, locked, *keys, "--delete-now", "--yes", "--store", store, "--master", "local[1]", "--json",
        expect=ExitCode.FINDINGS,
    )  # fmt: skip
    found = json.loads(done)
    assert (found["records_found"], found["records_erased"]) == (4, 2)
    (problem,) = found["problems"]
    assert locked in problem
    assert f"until {utc_text(segment['lock_until_ms'])[:-1]}" in problem
    assert versions_with(administrator, f"{free}-subject") == []
    assert versions_with(administrator, f"{locked}-subject") == [segment["key"]]
    assert cluster.run("consume", free, "--count", "1") == "b\n"
    assert cluster.run("consume", locked, "--count", "3") == "a\nb\nc\n"
    cluster.run("tier", "verify", free)


def versions_with(administrator: Any, content: str) -> list[str]:
    """Keys of the versions of which the bytes contain ``content``, as often as they do."""
    stored = [each for each in versions(administrator) if "Size" in each]
    bodies = [
        (each["Key"], administrator.get_object(Bucket=BUCKET, Key=each["Key"], VersionId=each["VersionId"])) for each in stored
    ]
    return sorted(key for key, answer in bodies if content.encode() in answer["Body"].read())
