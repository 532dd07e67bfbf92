"""A read by Spark holds a lease that its planner writes and its tasks renew; without one it reads all the same."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from unit.pipeline.test_scan import batches

from stratalog_core.errors import Invalid
from stratalog_core.system import SystemClock
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.read_lease import kept
from stratalog_pipeline.spark.reader import StratalogReader, TaskPartition
from stratalog_pipeline.spark.stream_reader import LEASED_TASKS_MIN, StratalogStreamReader
from stratalog_tiering.cold.lease import SharedLease
from stratalog_tiering.format.descriptor import ReaderLease
from stratalog_tiering.store.filesystem import FilesystemStore

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket


def reader(cold_bucket: ColdBucket, **options: str) -> StratalogReader:
    return StratalogReader(parse_options({"path": cold_bucket.url, "subscribe": "flights", **options}), ("offset",))


def planned(cold_bucket: ColdBucket, **options: str) -> list[TaskPartition]:
    return [task for task in reader(cold_bucket, **options).partitions() if isinstance(task, TaskPartition)]


def leases(root: Path) -> list[Path]:
    return list(root.glob("leases/*.json"))


def count(cold_bucket: ColdBucket, task: TaskPartition) -> int:
    return sum(rows.num_rows for rows in reader(cold_bucket).read(task))


def test_reads_of_one_holder_and_hour_share_a_lease_on_their_topics(cold_bucket: ColdBucket) -> None:
    flights = cold_bucket.add_topic("flights", [[batches(0, 10)]])
    cold_bucket.add_topic("weather", [[batches(0, 10)]])
    (task,) = planned(cold_bucket)
    (path,) = leases(cold_bucket.root)
    document = json.loads(path.read_bytes())
    assert document["topic_ids"] == [str(flights)]
    assert 0 <= time.time() * 1000 - document["began_at_ms"] < 2 * 3_600_000
    planned(cold_bucket)
    # Two if the hour has ended in between.
    assert len(leases(cold_bucket.root)) <= 2
    written = {each: each.stat().st_mtime_ns for each in leases(cold_bucket.root)}
    assert count(cold_bucket, task) == 10
    assert {each: each.stat().st_mtime_ns for each in leases(cold_bucket.root)} == written


@pytest.mark.parametrize("planner_ahead_ms", [0, 24 * 3_600_000])
def test_a_task_renews_the_lease_when_it_is_due(cold_bucket: ColdBucket, planner_ahead_ms: int) -> None:
    """Whatever the clock of the planner's machine says."""
    begun_ms = SystemClock().wall_ms() + planner_ahead_ms
    document = ReaderLease(holder="Spark by me", began_at_ms=begun_ms, duration_ms=4_000)
    lease = SharedLease(key="leases/00.json", lease=document, begun_ms=begun_ms)
    path = cold_bucket.root / "leases" / "00.json"
    with Bucket(cold_bucket.url) as bucket, kept(bucket, lease):
        deadline = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        first = path.stat().st_mtime_ns
        while path.stat().st_mtime_ns == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_batch_of_a_stream_has_a_lease_if_it_is_large(cold_bucket: ColdBucket) -> None:
    """Such as the first one of a stream without limit that starts years back, which may take longer than the grace period."""
    flights = cold_bucket.add_topic("flights", [[batches(0, LEASED_TASKS_MIN)]])
    given = {"path": cold_bucket.url, "subscribe": "flights", "maxRecordsPerPartition": "1"}

    def tasks(end: int, **options: str) -> list[TaskPartition]:
        stream = StratalogStreamReader(parse_options({**given, **options}, "stream"), ("offset",))
        found = stream.partitions({"flights": {"0": 0}}, {"flights": {"0": end}})
        return [task for task in found if isinstance(task, TaskPartition)]

    assert {task.lease for task in tasks(LEASED_TASKS_MIN - 1)} == {None}
    assert {task.lease for task in tasks(LEASED_TASKS_MIN, lease="false")} == {None}
    assert leases(cold_bucket.root) == []
    (lease,) = {task.lease for task in tasks(LEASED_TASKS_MIN)}
    assert lease is not None
    (path,) = leases(cold_bucket.root)
    assert (path.relative_to(cold_bucket.root), lease.lease.topic_ids) == (Path(lease.key), (flights,))


def test_nothing_is_written_if_it_is_not_wanted_or_nothing_is_read(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 10)]])
    assert [count(cold_bucket, task) for task in planned(cold_bucket, lease="false")] == [10]
    planned(cold_bucket, startingOffsets='{"flights": {"0": 10}}')
    assert leases(cold_bucket.root) == []


def test_credentials_that_may_not_write_are_enough(cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 10)]])

    async def refuse(*_: Any, **__: Any) -> None:
        raise Invalid("access denied")

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(FilesystemStore, "put", refuse)
    monkeypatch.setattr("getpass.getuser", nobody)
    (task,) = planned(cold_bucket)
    assert task.lease is None
    assert count(cold_bucket, task) == 10
