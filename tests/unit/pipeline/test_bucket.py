"""Blocking reads of a store, local and over S3: order, reading ahead within bounds, and errors that stay what they are."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt, NoSuchObject
from stratalog_core.ports import Background
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_pipeline import bucket as bucket_module
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.scan import scan_split
from stratalog_pipeline.scan_plan import plan_scan
from stratalog_tiering.store import READ_ENGINES, ObjectStore, open_store
from stratalog_tiering.store.obstore_reads import ReadLimits
from stratalog_tiering.store.s3 import S3Store
from stratalog_tiering.store.store_url import S3Location

if TYPE_CHECKING:
    from conftest import S3Server
    from unit.pipeline.conftest import ColdBucket


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    for number in range(4):
        (tmp_path / f"object-{number}").write_bytes(bytes(range(256)) * (number + 1))
    with Bucket(str(tmp_path)) as opened:
        yield opened


def test_ranges_come_in_order_though_they_are_fetched_ahead(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "AHEAD_BYTES_MAX", 50)
    ranges = [(f"object-{number % 4}", start, 20) for number, start in enumerate(range(0, 200, 7))]
    found = [bytes(content) for content in bucket.get_ranges(ranges)]
    assert found == [bytes(range(start, start + 20)) for _, start, _ in ranges]


def test_no_more_is_fetched_ahead_than_the_bound_allows(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "AHEAD_BYTES_MAX", 45)
    asked: list[int] = []

    def ranges() -> Iterator[tuple[str, int, int]]:
        for number in range(50):
            asked.append(number)
            yield "object-0", number, 20

    fetching = bucket.get_ranges(ranges())
    next(fetching)
    # Two in flight, one in hand to be next.
    assert len(asked) <= 4
    fetching.close()


def test_one_large_range_is_read_whatever_the_bound(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "AHEAD_BYTES_MAX", 1)
    assert [len(content) for content in bucket.get_ranges([("object-3", 0, 1000), ("object-0", 0, 5)])] == [1000, 5]
    assert list(bucket.get_ranges([])) == []


def test_errors_of_the_store_arrive_as_they_are(bucket: Bucket) -> None:
    with pytest.raises(NoSuchObject):
        bucket.run(bucket.store.get("missing"))
    with pytest.raises(Corrupt):
        list(bucket.get_ranges([("object-0", 0, 10), ("object-0", 250, 10), ("object-0", 20, 10)]))


def test_a_bucket_may_be_closed_while_ranges_are_fetched(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(bytes(1000))
    with Bucket(str(tmp_path)) as opened:
        fetching = opened.get_ranges([("object", start, 10) for start in range(100)])
        next(fetching)
    fetching.close()


@pytest.mark.s3
@pytest.mark.parametrize("engine", READ_ENGINES)
def test_a_consumer_that_pauses_longer_than_a_read_may_take_loses_nothing(
    minio_server: S3Server, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = minio_server.make_bucket(f"paused-{engine}")
    content = random.Random(1).randbytes(4 << 20)
    asyncio.run(put_all(url, {"object": content}))
    limits = ReadLimits(total_s=1.0, silence_s=0.5)

    def impatient_store(url: str, *, background: Background, threads: int, **_: object) -> ObjectStore:
        location = S3Location(bucket=f"paused-{engine}", prefix="", endpoint=minio_server.endpoint, region="us-east-1")
        return S3Store(location, read_engine=engine, background=background, threads=threads, read_limits=limits)

    monkeypatch.setattr(bucket_module, "open_store", impatient_store)
    monkeypatch.setattr(bucket_module, "AHEAD_BYTES_MAX", 2 << 20)
    with Bucket(url) as opened:
        found = []
        for number, piece in enumerate(opened.get_ranges([("object", start, 1 << 18) for start in range(0, 4 << 20, 1 << 18)])):
            found.append(bytes(piece))
            if number in (0, 3):
                time.sleep(3 * limits.total_s)
    assert b"".join(found) == content


@pytest.mark.s3
def test_a_scan_over_s3_gives_what_the_same_directory_gives(minio_server: S3Server, cold_bucket: ColdBucket) -> None:
    batches = [bytes(build_batch([Record(offset=o, timestamp_ms=o, key=None, value=b"v" * 900)])) for o in range(200)]
    cold_bucket.add_topic("flights", [[batches[:120], batches[120:]]], block_bytes=5000)
    url = minio_server.make_bucket("pipeline-scan")
    root = cold_bucket.root
    asyncio.run(put_all(url, {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}))
    assert scanned(url) == scanned(cold_bucket.url) == list(range(200))


async def put_all(url: str, objects: dict[str, bytes]) -> None:
    background = ThreadBackground(2, "test-store")
    store = open_store(url, background=background, clock=SystemClock(), random=random.Random(1))
    for key, content in objects.items():
        await store.put(key, [content])
    await store.close()
    background.close()


def scanned(url: str) -> list[int]:
    options = parse_options({"path": url, "subscribe": "flights", "splitBytes": "30000"})
    with Bucket(options.store) as opened:
        return [
            offset
            for split in plan_scan(opened, options).splits
            for batch in scan_split(opened, split, ("offset",), read_committed=True)
            for offset in batch.column("offset").to_pylist()
        ]
