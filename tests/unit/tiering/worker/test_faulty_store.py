"""Offload, retention and cold reads over a MinIO whose answers fail in bursts: nothing lost, nothing left behind, few repeats.

``STRATALOG_STORE_FAULT_SEEDS`` runs more seeds than the one of every test run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final
from uuid import uuid4

import msgspec
import pytest
import pytest_asyncio
from conftest import S3Server
from support.s3_proxy import Bursts, S3Proxy

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Unavailable
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.cold.verifier import Verifier
from stratalog_tiering.store import PART_BYTES_MIN, ObjectStore, open_store

pytestmark = pytest.mark.s3
Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
FAULT_SHARE: Final = 0.12
"""Share of requests that get a fault."""
REQUESTS_RATIO_MAX: Final = 1.3
SEEDS: Final = int(os.environ.get("STRATALOG_STORE_FAULT_SEEDS", "1"))
LEDGERS: Final = 8
RECORDS: Final = 20
LARGE_RECORDS: Final = 12
LARGE_BYTES: Final = 1024 * 1024
"""The last ledger exceeds the size of a part, so that its segment is a multipart upload."""


SWEEP_AHEAD_MS: Final = 2 * 3_600_000
"""How far the clock of the worker that cleans up is ahead: uploads are aborted after an hour."""


class AheadClock(SystemClock):
    def wall_ms(self) -> int:
        return super().wall_ms() + SWEEP_AHEAD_MS


def batches_of(first: int, values: Sequence[bytes]) -> list[bytes]:
    now_ms = SystemClock().wall_ms()
    records = [Record(offset=first + n, timestamp_ms=now_ms, key=b"k", value=value) for n, value in enumerate(values)]
    return [bytes(build_batch([record], leader_epoch=0)) for record in records]


@pytest_asyncio.fixture
async def proxy(minio_server: S3Server) -> AsyncIterator[S3Proxy]:
    made = S3Proxy(minio_server.endpoint)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def direct(minio_server: S3Server) -> AsyncIterator[ObjectStore]:
    """The bucket of the worker, without the proxy."""
    background = ThreadBackground(2, "direct")
    url = minio_server.make_bucket(f"test-{uuid4().hex[:12]}")
    store = open_store(url, background=background, clock=SystemClock(), random=random.Random(1))
    yield store
    await store.close()
    background.close()


@pytest_asyncio.fixture
async def store(minio_server: S3Server, proxy: S3Proxy, direct: ObjectStore) -> AsyncIterator[ObjectStore]:
    """The store of the ``cluster``: MinIO behind the proxy."""
    background = ThreadBackground(8, "store")
    url = f"{direct.url}?endpoint={await proxy.start()}"
    opened = open_store(url, background=background, clock=SystemClock(), random=random.Random(2))
    yield opened
    await opened.close()
    background.close()


async def run(cluster: Cluster, proxy: S3Proxy, partition: int) -> int:
    """Offload small segments and a large one, read them, let retention drop the small ones; returns the number of requests."""
    before = proxy.requests
    await set_retention(cluster, -1)
    worker = await cluster.start_worker(sweep_interval_ms=86_400_000, grace_ms=3_600_000, upload_part_bytes=PART_BYTES_MIN)
    written: list[bytes] = []
    large = [random.Random(n).randbytes(LARGE_BYTES) for n in range(LARGE_RECORDS)]
    for values in [*[[b"v" * 100] * RECORDS] * LEDGERS, large]:
        batches = batches_of(len(written), values)
        await cluster.add_ledger(batches, len(written), partition=partition)
        written += batches
        # The next ledger waits for the drop of this one, too: it would change the log meanwhile, and all checks be made again.
        await cluster.until(lambda: not cluster.log(partition).ledgers, 60)
    assert await read_cold(cluster, partition) == b"".join(written)
    await set_retention(cluster, LARGE_RECORDS * LARGE_BYTES)
    await cluster.until(lambda: cluster.log(partition).log_start_offset == LEDGERS * RECORDS, 60)
    assert await read_cold(cluster, partition) == b"".join(written[LEDGERS * RECORDS :])
    await worker.close()
    return proxy.requests - before


async def set_retention(cluster: Cluster, retention_bytes: int) -> None:
    configs = {"retention.ms": "-1", "retention.bytes": str(retention_bytes)}
    await cluster.metadata.propose(Command(updates=(Put(record=msgspec.structs.replace(cluster.topic, configs=configs)),)))


async def read_cold(cluster: Cluster, partition: int) -> bytes:
    """Return the cold history, as a broker reads it."""
    reader, pointer = ColdReader(cluster.store, ColdReaderSettings(), SystemClock()), cluster.pointer(partition)
    pieces: list[bytes] = []
    offset = pointer.start_offset
    while offset < pointer.end_offset:
        with contextlib.suppress(Unavailable):
            found = await reader.fetch(pointer, offset, 4 * LARGE_BYTES, 30)
            pieces += map(bytes, found.batches)
            offset = found.end_offset
    await reader.close()
    return b"".join(pieces)


async def unneeded(cluster: Cluster, direct: ObjectStore) -> set[str]:
    """Segments and uploads in the bucket that the committed histories do not refer to."""
    archive, live = Archive(direct), set[str]()
    for partition in range(cluster.topic.partition_count):
        live |= {entry.key async for entry in archive.segments(await archive.manifest(cluster.pointer(partition)))}
    stored = {info.key async for info in direct.list("segments/")}
    assert live <= stored, "a manifest refers to objects that do not exist"
    return (stored - live) | {upload.upload_id async for upload in direct.list_uploads()}


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
async def test_faults_cost_few_requests_and_lose_nothing(
    cluster: Cluster, proxy: S3Proxy, direct: ObjectStore, background: ThreadBackground, seed: int
) -> None:
    without_faults = await run(cluster, proxy, 0)
    proxy.choose = Bursts(random.Random(seed), FAULT_SHARE)
    with_faults = await run(cluster, proxy, 1)
    assert proxy.faults.total() > with_faults * FAULT_SHARE / 4, "a run without faults proves nothing"
    assert with_faults <= without_faults * REQUESTS_RATIO_MAX
    await cluster.start_worker("worker-2", clock=AheadClock(), sweep_interval_ms=50, grace_ms=60_000)
    async with asyncio.timeout(60):
        while await unneeded(cluster, direct):  # noqa: ASYNC110 - the bucket tells nobody when it changes
            await asyncio.sleep(0.05)
    reports = [report async for report in Verifier(direct, background).bucket()]
    assert [report.findings for report in reports] == [(), ()]
