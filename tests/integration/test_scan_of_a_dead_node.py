"""The bucket is enough: the Spark source's scan reads an unmodified client's records when no process runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from stratalog_pipeline.arrow.schema import COLUMNS_WITH_HEADERS
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.audit import audit_segments, audit_tasks, plan_audit, verdicts
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.scan import scan_split
from stratalog_pipeline.scan_plan import plan_scan

pytestmark = pytest.mark.integration
RECORDS = 4000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def fields(number: int) -> dict[str, Any]:
    return {
        "key": None if number % 7 == 0 else f"key-{number}".encode(),
        "value": None if number % 11 == 0 else f"value {number} ".encode() * (number % 30),
        "headers": [("number", str(number).encode()), ("empty", None)] if number % 3 == 0 else [],
        "timestamp": 1_700_000_000_000 + (number * 7919) % 100_000,
    }


def produce(bootstrap: str) -> None:
    for offset, codec in enumerate(CODECS):
        producer = Producer(
            {"bootstrap.servers": bootstrap, "compression.type": codec, "linger.ms": 5, "enable.idempotence": True}
        )
        for number in range(offset, RECORDS, len(CODECS)):
            producer.produce("events", **fields(number))
            producer.poll(0)
        assert producer.flush(60) == 0


def stratalog(data: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "stratalog", *words, "--data", str(data)], check=True, timeout=120)


def fill(data: Path, store: Path) -> None:
    """Run one node that takes the records, offloads them, and is killed."""
    command = [sys.executable, "-m", "stratalog", "up", "--kafka", "127.0.0.1:0", "--data", str(data), "--store", str(store)]
    log = data.with_name("log")
    with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as node:
        try:
            assert node.stdout is not None
            line = node.stdout.readline()
            assert "serves Kafka clients at" in line, log.read_text()
            # The records have old timestamps: retention would remove them at once.
            stratalog(data, "topic", "create", "events", "--partitions", "3", "--config", "retention.ms=-1")
            produce(line.split("serves Kafka clients at", 1)[1].split()[0].strip(".,;"))
            stratalog(data, "tier", "offload", "events", "--wait")
        finally:
            node.kill()


def test_every_record_is_there_when_nothing_runs(tmp_path: Path) -> None:
    fill(tmp_path / "data", tmp_path / "store")
    options = parse_options({"path": str(tmp_path / "store"), "subscribe": "events", "splitBytes": "50000"})
    with Bucket(options.store) as bucket:
        splits = plan_scan(bucket, options).splits
        scans = [scan_split(bucket, split, COLUMNS_WITH_HEADERS, read_committed=True) for split in splits]
        rows = [row for scan in scans for batch in scan for row in batch.to_pylist()]
        plans = plan_audit(bucket, options)
        audits = verdicts(plans, [result for task in audit_tasks(plans, 50_000) for result in audit_segments(bucket, task)])
    assert sorted(map(comparable, rows)) == sorted(comparable(as_row(fields(number))) for number in range(RECORDS))
    assert [(one.partition, one.problems) for one in audits] == [(0, ()), (1, ()), (2, ())]
    assert sum(one.records for one in audits) == RECORDS
    by_partition: dict[int, list[int]] = {}
    for row in rows:
        by_partition.setdefault(row["partition"], []).append(row["offset"])
    assert all(offsets == list(range(len(offsets))) for offsets in by_partition.values())


def as_row(sent: dict[str, Any]) -> dict[str, Any]:
    # Without any header the column is null, as in Spark's Kafka source.
    return {**sent, "headers": [{"key": key, "value": value} for key, value in sent["headers"]] or None}


def comparable(row: dict[str, Any]) -> str:
    timestamp = row["timestamp"]
    timestamp_ms = timestamp if isinstance(timestamp, int) else int(timestamp.timestamp() * 1000 + 0.5)
    return repr((timestamp_ms, row["key"], row["value"], row["headers"]))
