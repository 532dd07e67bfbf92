"""The number of requests to a real store that a sealed segment costs, counted on the wire."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final
from uuid import uuid4

import pytest
import pytest_asyncio
from conftest import S3Server
from support.s3_proxy import Fault, S3Proxy

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.metrics import TieringMetrics
from stratalog_tiering.store import ObjectStore, open_store
from stratalog_tiering.worker.worker import TieringWorker

pytestmark = pytest.mark.s3
Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
DAY_MS: Final = 86_400_000
LEDGERS: Final = 12


@pytest_asyncio.fixture
async def requests(minio_server: S3Server) -> AsyncIterator[Counter[str]]:
    yield Counter()


@pytest_asyncio.fixture
async def store(minio_server: S3Server, requests: Counter[str]) -> AsyncIterator[ObjectStore]:
    """The store of the ``cluster``: MinIO behind a proxy that notes each request."""
    proxy = S3Proxy(minio_server.endpoint)

    def note(line: str) -> Fault | None:
        requests[kind(line)] += 1
        return None

    proxy.choose = note
    url = minio_server.make_bucket(f"test-{uuid4().hex[:12]}")
    background = ThreadBackground(8, "store")
    location = url.partition("?")[0]
    opened = open_store(
        f"{location}?endpoint={await proxy.start()}", background=background, clock=SystemClock(), random=random.Random(2)
    )
    yield opened
    await opened.close()
    await proxy.close()
    background.close()


def kind(line: str) -> str:
    """Return method and kind of object of a request's first line, such as ``GET segments``; a listing is ``LIST``."""
    method, target, _ = line.split(" ", 2)
    path, _, query = target.partition("?")
    if method == "GET" and "list-type" in query:
        return "LIST"
    parts = path.strip("/").split("/")
    return f"{method} {parts[1] if len(parts) > 1 else 'bucket'}"


def ended(cluster: Cluster, offset: int) -> bool:
    pointer = cluster.pointer(0)
    return pointer is not None and pointer.end_offset == offset and not cluster.log(0).ledgers


def is_working(worker: TieringWorker) -> bool:
    return any(group.work_in_progress for group in worker.metrics() if isinstance(group, TieringMetrics))


async def quiet(worker: TieringWorker, requests: Counter[str], for_s: float) -> None:
    """Wait until a worker that has begun is at no work and sends no more requests for so long, and forget those sent."""
    async with asyncio.timeout(60):
        while requests or is_working(worker):
            requests.clear()
            await asyncio.sleep(for_s)


@pytest.mark.parametrize(
    ("verify", "reads"), [("read", {"GET segments": 2}), ("checksum", {"GET segments": 1, "HEAD segments": 1})]
)
async def test_a_sealed_segment_costs_few_requests(
    cluster: Cluster, requests: Counter[str], verify: str, reads: dict[str, float]
) -> None:
    worker = await cluster.start_worker(
        sweep_interval_ms=DAY_MS, retention_interval_ms=DAY_MS, block_bytes=1024 * 1024, verify=verify
    )  # fmt: skip
    for number in range(LEDGERS + 1):
        batch = bytes(build_batch([Record(offset=number, timestamp_ms=number, key=None, value=b"v" * 100)], leader_epoch=0))
        await cluster.add_ledger([batch], number, partition=0)
        await cluster.until(partial(ended, cluster, number + 1), 60)
        if number == 0:
            await quiet(worker, requests, 1.0)
    # Commits of one second share a look for another owner. One that takes longer looks again before it stores its manifest.
    # A HEAD finds none, and the refusal of a GET confirms it.
    assert 0 < requests.pop("HEAD owners") <= 2 * LEDGERS
    assert 0 < requests.pop("GET owners") <= 2 * LEDGERS
    counted = Counter({name: count / LEDGERS for name, count in requests.items()})
    assert counted == {
        # Offload: upload, read back, commit, store the manifest and read it back.
        "PUT segments": 1,
        "PUT manifests": 1,
        "GET manifests": 1,
        # The segment is verified, and its end is read before the hot copy is dropped.
        **reads,
    }


async def test_an_idle_partition_costs_nothing(cluster: Cluster, requests: Counter[str]) -> None:
    worker = await cluster.start_worker(sweep_interval_ms=DAY_MS, retention_interval_ms=20)
    batch = bytes(build_batch([Record(offset=0, timestamp_ms=0, key=None, value=b"v" * 100)], leader_epoch=0))
    await cluster.add_ledger([batch], 0, partition=0)
    await cluster.until(partial(ended, cluster, 1), 60)
    # More than a hundred intervals of retention.
    await quiet(worker, requests, 3.0)
