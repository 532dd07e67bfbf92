"""History in Azure and Google Cloud, on emulators: cold reads by a Kafka client, commands, an archive, and Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, Producer
from conftest import AZURITE, FAKE_GCS

from stratalog.local.state import load_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.integration,
    pytest.mark.s3,
    pytest.mark.spark,
    pytest.mark.timeout(300),
]
EMULATORS = {"azurite": AZURITE, "gcs": FAKE_GCS}
RECORDS = 500


@contextmanager
def server(log: Path, *words: str) -> Iterator[str]:
    """A server of the command line; the first line that it prints."""
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "stratalog", *words], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            yield line
        finally:
            process.terminate()


def stratalog(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stratalog", *words], capture_output=True, text=True, timeout=200, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def consume(bootstrap: str, count: int) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": uuid4().hex, "auto.offset.reset": "earliest"})
    consumer.subscribe(["events"])
    found: list[bytes] = []
    while len(found) < count:
        for message in consumer.consume(count - len(found), 60):
            assert message.error() is None, message.error()
            found.append(message.value() or b"")
    consumer.close()
    return found


@pytest.mark.parametrize("emulator", EMULATORS)
def test_history_in_a_cloud_is_read_by_clients_commands_archives_and_spark(
    tmp_path: Path, request: pytest.FixtureRequest, emulator: str
) -> None:
    if EMULATORS[emulator] not in os.environ:
        pytest.skip("suites of their own: make contract-azure, make contract-gcs")
    spark: SparkSession = request.getfixturevalue("spark")
    store = (
        request.getfixturevalue(f"{emulator}_server").make_bucket(f"history-{uuid4().hex[:12]}").replace("?", "/some/prefix?")
    )
    data = tmp_path / "data"
    written = [b"record %d" % number for number in range(RECORDS)]
    with server(tmp_path / "log", "up", "--data", str(data), "--store", store, "--kafka", "127.0.0.1:0") as line:
        assert "serves Kafka clients at" in line
        bootstrap = load_state(data).bootstrap
        stratalog("topic", "create", "events", "--partitions", "1", "--data", str(data))
        producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
        for value in written:
            producer.produce("events", value, partition=0)
        assert producer.flush(60) == 0
        stratalog("tier", "offload", "events", "--wait", "--delete-hot", "--data", str(data))
        assert consume(bootstrap, RECORDS) == written
        stratalog("tier", "verify", "events", "--data", str(data))
        findings = json.loads(stratalog("doctor", "--data", str(data), "--json"))
        assert [each["verdict"] for each in findings["findings"] if each["check"] == "store"] == ["ok"]
        told = spark.read.format("stratalog").option("kafka.bootstrap.servers", bootstrap).option("subscribe", "events").load()
        assert told.count() == RECORDS
    # Nothing runs any more: the container is enough.
    report = json.loads(stratalog("store", "info", "--store", store, "--json"))
    assert (report["writable"], report["refusal"]) == (True, "")
    stratalog("tier", "scrub", "--store", store)
    assert "events" in stratalog("cost", "events", "--store", store)
    frame = spark.read.format("stratalog").option("store", store).option("subscribe", "events").load()
    assert sorted(bytes(row.value) for row in frame.select("value").collect()) == sorted(written)
    archive = ("serve-archive", "--store", store, "--listen", "127.0.0.1:0", "--positions", str(tmp_path / "positions"))
    with server(tmp_path / "archive-log", *archive) as line:
        assert consume(line.split(" at ", 1)[1].split(";")[0].strip(), RECORDS) == written
