"""``stratalog cost`` against what a MinIO counted: its stored bytes and its requests, within five per cent."""

from __future__ import annotations

import asyncio
import os
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Producer
from integration.process_cluster import ProcessCluster

from stratalog.local.minio import minio_program
from stratalog.tier.offload import Waiting, request_offload, wait_for_offload
from stratalog.tier.report import topics_named
from stratalog.tier.session import metadata_session
from stratalog_core.errors import NotFound

pytestmark = [pytest.mark.integration, pytest.mark.s3]
ROUNDS: Final = 17
"""Sixteen neighbouring segments are merged."""
MIB: Final = 2**20
PUTS: Final = {"PutObject", "NewMultipartUpload", "PutObjectPart", "CompleteMultipartUpload", "ListObjectsV2"}
GETS: Final = {"GetObject", "HeadObject"}
_REQUESTS: Final = re.compile(r'^minio_api_requests_total\{name="(\w+)".*\} ([\d.e+]+)$', re.M)
_BYTES: Final = re.compile(r"^minio_cluster_usage_total_bytes\{.*\} ([\d.e+]+)$", re.M)


@pytest.fixture
def minio_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessCluster]:
    """A small cluster on a MinIO that shows its metrics and counts its bytes every few seconds. Merges are due at once."""
    try:
        minio_program()
    except NotFound as missing:
        pytest.skip(missing.message)
    settings = {
        "MINIO_PROMETHEUS_AUTH_TYPE": "public", "MINIO_SCANNER_CYCLE": "3s", "MINIO_SCANNER_SPEED": "fastest",
        "STRATALOG_TIERING_RETENTION_INTERVAL_MS": "500", "STRATALOG_TIERING_DELETION_LAG_MS": "0",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    running = ProcessCluster(tmp_path / "cluster")
    running.run("cluster", "start", "--metadata", "1", "--bookies", "1", "--brokers", "1", "--tiering", "1", "--minio")
    yield running
    running.run("cluster", "stop")


def metrics(cluster: ProcessCluster, path: str) -> str:
    (minio,) = cluster.processes("store")
    with urllib.request.urlopen(f"http://{minio['address']}/minio/{path}", timeout=60) as answer:
        return str(answer.read().decode())


def requests(cluster: ProcessCluster) -> Counter[str]:
    return Counter({name: int(float(count)) for name, count in _REQUESTS.findall(metrics(cluster, "metrics/v3/api/requests"))})


def settled_requests(cluster: ProcessCluster) -> Counter[str]:
    """The requests that MinIO has counted, as soon as there are some and no more arrive for three seconds."""
    last, since = requests(cluster), time.monotonic()
    while not last["PutObject"] or time.monotonic() - since < 3:
        time.sleep(0.2)
        if (now := requests(cluster)) != last:
            last, since = now, time.monotonic()
    return last


def until(condition: Callable[[], bool], timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def produce(cluster: ProcessCluster, topic: str, count: int, size: int, partition: int = 0) -> None:
    """Append incompressible records in batches of at most 128 KiB."""
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "linger.ms": 20, "batch.size": 131_072, "enable.idempotence": True}
    )
    for _ in range(count):
        producer.produce(topic, os.urandom(size), partition=partition)
        producer.poll(0)
    assert producer.flush(60) == 0


def offload(cluster: ProcessCluster, topic: str) -> None:
    """Do what ``stratalog tier offload --wait --delete-hot`` does, without starting a process each time."""

    async def until_cold() -> None:
        async with metadata_session(cluster.metadata.split(",")) as metadata:
            (found,) = topics_named(metadata.view, [topic])
            await request_offload(metadata, found, delete_hot=True)
            await wait_for_offload(metadata, found, Waiting(timeout_s=120.0, on_progress=lambda _: None))

    asyncio.run(until_cold())


def counted(found: Counter[str], kinds: set[str]) -> int:
    return sum(found[kind] for kind in kinds)


def total(topics: list[dict[str, Any]], member: str) -> int:
    return sum(topic["observed"][member] for topic in topics)


def manifest_version(cluster: ProcessCluster, topic: str) -> int:
    return int(cluster.json("tier", "status", topic)["partitions"][0]["manifest_version"])


@pytest.mark.timeout(600)
def test_bytes_and_requests_are_those_that_minio_counted(minio_cluster: ProcessCluster) -> None:
    """Small segments with a merge, a segment of several parts, and a replay of both by consumers."""
    small, large = minio_cluster.new_topic(copies=1), minio_cluster.new_topic(copies=1)
    before = settled_requests(minio_cluster)
    for _ in range(ROUNDS):
        produce(minio_cluster, small, 200, 1000)
        offload(minio_cluster, small)
    produce(minio_cluster, large, 2 * 20_000, 1000)
    offload(minio_cluster, large)
    until(lambda: manifest_version(minio_cluster, small) > ROUNDS)  # merged
    worked = settled_requests(minio_cluster) - before

    document = minio_cluster.json("cost", "--replays-per-month", "1")
    topics = document["topics"]
    assert [topic["observed"]["merges"] for topic in topics] == [1, 0]
    assert total(topics, "put_requests") == pytest.approx(counted(worked, PUTS), rel=0.05)
    # A commit that takes more than a second looks for another owner twice, which its objects do not show.
    looks = total(topics, "commits")
    assert 0.95 * total(topics, "get_requests") <= counted(worked, GETS) <= 1.05 * total(topics, "get_requests") + looks

    cold_bytes: int = sum(row["cold_bytes"] for row in document["costs"])
    assert cold_bytes > 40 * MIB

    def minio_counted_them() -> bool:
        found = _BYTES.findall(metrics(minio_cluster, "v2/metrics/cluster"))
        return any(abs(cold_bytes - float(count)) <= 0.05 * cold_bytes for count in found)

    until(minio_counted_them)

    before = settled_requests(minio_cluster)
    minio_cluster.restart("broker-1")  # it has the records in memory
    for topic, count in ((small, ROUNDS * 200), (large, 40_000)):
        read = minio_cluster.run("consume", topic, "--count", str(count), "--json")
        assert len(read.splitlines()) == count
    replayed = settled_requests(minio_cluster) - before
    derived = sum(topic["replay_get_requests"] for topic in topics)
    # Derived for a reader that gets four blocks with each GET. One that overtakes its read-ahead gets some blocks alone.
    alone = cold_bytes // MIB * 3 // 4
    assert derived - 2 <= counted(replayed, GETS) <= derived + alone
