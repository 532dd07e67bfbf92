"""OpenMessaging Benchmark's files: read as they are published, and refused by name where they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratalog_core.errors import Invalid, NotFound
from stratalog_loadgen.processes.loads import Payload
from stratalog_loadgen.workload_file import client_options, plan_of, read_driver, read_workload

WORKLOAD = """
name: 1 topic / 16 partitions / 1kb
topics: 1
partitionsPerTopic: 16
keyDistributor: "NO_KEY"
messageSize: 1024
payloadFile: "payload/payload-1Kb.data"
subscriptionsPerTopic: 2
consumerPerSubscription: 3
producersPerTopic: 4
producerRate: 50000
consumerBacklogSizeGB: 0
testDurationMinutes: 15
"""
DRIVER = """
name: Kafka
driverClass: io.openmessaging.benchmark.driver.kafka.KafkaBenchmarkDriver
replicationFactor: 3
reset: false
topicConfig: |
  min.insync.replicas=2
commonConfig: |
  bootstrap.servers=localhost:9092
  default.api.timeout.ms=600000
producerConfig: |
  acks=all
  linger.ms=1
  batch.size=1048576
consumerConfig: |
  auto.offset.reset=earliest
  enable.auto.commit=false
  max.partition.fetch.bytes=10485760
"""


def test_a_workload_file_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "workload.yaml").write_text(WORKLOAD)
    (tmp_path / "driver.yaml").write_text(DRIVER)
    (tmp_path / "payload-1Kb.data").write_bytes(bytes(1024))
    workload, driver = read_workload(tmp_path / "workload.yaml"), read_driver(tmp_path / "driver.yaml")
    plan = plan_of(workload, driver, payload_directory=tmp_path)
    assert (plan.topics.partitions, plan.topics.replication_factor) == (16, 3)
    assert plan.topics.configs == {"min.insync.replicas": "2"}
    assert (plan.traffic.producers, plan.readers.groups, plan.readers.consumers) == (4, 2, 3)
    assert plan.traffic.payload.file == str(tmp_path / "payload-1Kb.data")
    assert (plan.traffic.linger_ms, plan.traffic.batch_bytes, plan.traffic.compression) == (1.0, 1_048_576, "none")
    assert plan.traffic.client == {}
    assert plan.readers.client["fetch.message.max.bytes"] == "10485760"
    assert (plan.window.warmup_s, plan.window.duration_s, plan.records_per_s) == (60, 900, 50_000)


def test_a_backlog_and_random_payloads_are_understood(tmp_path: Path) -> None:
    more = "useRandomizedPayloads: true\nrandomBytesRatio: 0.5\nrandomizedPayloadPoolSize: 100\nwarmupDurationMinutes: 5\n"
    (tmp_path / "w.yaml").write_text(WORKLOAD.replace("BacklogSizeGB: 0", "BacklogSizeGB: 2") + more)
    plan = plan_of(read_workload(tmp_path / "w.yaml"), None, payload_directory=tmp_path)
    assert plan.backlog_bytes == 2_000_000_000
    assert plan.traffic.payload == Payload(record_bytes=1024, random_ratio=0.5, pool=100)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("fooBar: 1\n", "fooBar"),
        ("keyDistributor: SOME\n", "SOME"),
        ("topics: many\n", "topics"),
        ("topics: 0\n", "topics"),
        ("messageSize: 0\n", "messageSize"),
        ("producerRate: -1\n", "producerRate"),
        ("testDurationMinutes: 0\n", "testDurationMinutes"),
        ("- x\n", "yaml"),
    ],
)
def test_what_a_workload_file_may_not_say_is_named(tmp_path: Path, change: str, complaint: str) -> None:
    (tmp_path / "wrong.yaml").write_text(WORKLOAD + change)
    with pytest.raises(Invalid, match=complaint):
        read_workload(tmp_path / "wrong.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Invalid, match=r"picture\.yaml"):
        read_workload(tmp_path / "picture.yaml")


def test_a_payload_that_does_not_fit_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "workload.yaml").write_text(WORKLOAD)
    with pytest.raises(Invalid, match=r"payload-1Kb\.data"):
        plan_of(read_workload(tmp_path / "workload.yaml"), None, payload_directory=tmp_path)


@pytest.mark.parametrize("setting", ["linger.ms=soon", "batch.size=big"])
def test_a_driver_s_batches_are_numbers(tmp_path: Path, setting: str) -> None:
    (tmp_path / "driver.yaml").write_text(f"name: x\nproducerConfig: |\n  {setting}\n")
    (tmp_path / "workload.yaml").write_text(WORKLOAD.replace("payloadFile", "#"))
    with pytest.raises(Invalid, match=r"batch\.size and linger\.ms"):
        plan_of(read_workload(tmp_path / "workload.yaml"), read_driver(tmp_path / "driver.yaml"), payload_directory=tmp_path)


def test_a_missing_key_or_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text("name: x\n")
    with pytest.raises(Invalid, match="topics"):
        read_workload(tmp_path / "short.yaml")
    with pytest.raises(NotFound, match="gone"):
        read_workload(tmp_path / "gone.yaml")


def test_properties_without_a_value_are_refused() -> None:
    with pytest.raises(Invalid, match="NAME=VALUE"):
        client_options("acks")
