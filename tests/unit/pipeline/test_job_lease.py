"""A job holds a lease on what it reads while it runs, and only then; one that expired is an error of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from unit.pipeline.test_scan import batches

from stratalog_core.errors import Corrupt, Refused, Unavailable
from stratalog_core.system import SystemClock
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.lease import reader_lease
from stratalog_pipeline.options import ReadOptions, parse_options
from stratalog_tiering.cold.lease import HeldLease, LeaseExpired

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket

LEASED_MS = 240_000
"""A machine that stands still for seconds ends no such lease."""
EXPIRED_MS = 400


def options(cold_bucket: ColdBucket) -> ReadOptions:
    cold_bucket.add_topic("flights", [[batches(0, 10)]])
    cold_bucket.add_topic("weather", [[batches(0, 10)]])
    return parse_options({"path": cold_bucket.url, "subscribe": "flights"})


def leases(root: Path) -> list[Path]:
    return list(root.glob("leases/*.json"))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def often_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldLease, "renew_after_s", 0.05)


def test_a_lease_is_renewed_after_a_quarter_of_its_time(cold_bucket: ColdBucket) -> None:
    with Bucket(cold_bucket.url) as bucket:
        lease = HeldLease(bucket.store, SystemClock(), 1, "me", (), LEASED_MS)
    assert lease.renew_after_s == LEASED_MS / 1000 / 4


def failing(failure: Exception) -> Any:
    async def put(*_: Any, **__: Any) -> None:
        raise failure

    return put


@pytest.mark.usefixtures("often_renewed")
def test_the_lease_is_held_and_renewed_while_the_job_runs(cold_bucket: ColdBucket) -> None:
    wanted = options(cold_bucket)
    with Bucket(wanted.store) as bucket:
        with reader_lease(bucket, wanted, "audit", duration_ms=LEASED_MS):
            (path,) = leases(cold_bucket.root)
            written = path.stat().st_mtime_ns
            document = json.loads(path.read_bytes())
            assert document["holder"].startswith("audit by ")
            (topic,) = (each for each in bucket.topics() if each.name == "flights")
            assert document["topic_ids"] == [str(topic.topic_id)]
            wait_until(lambda: path.stat().st_mtime_ns > written)
        assert leases(cold_bucket.root) == []


@pytest.mark.usefixtures("often_renewed")
def test_a_renewal_under_way_at_the_end_is_not_written_after_the_deletion(
    cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, has_begun = options(cold_bucket), threading.Event()
    writes = list[asyncio.Task[None]]()
    with Bucket(wanted.store) as bucket:
        put = bucket.store.put

        async def slowly(*words: Any, **options: Any) -> None:
            await asyncio.sleep(0.2)
            await put(*words, **options)

        async def renewal(*words: Any, **options: Any) -> None:
            # Once begun, it is written even if its caller is cancelled, as by a server that has the request.
            writes.append(asyncio.create_task(slowly(*words, **options)))
            has_begun.set()
            await asyncio.shield(writes[-1])

        async def all_written() -> None:
            await asyncio.gather(*writes)

        with reader_lease(bucket, wanted, "audit", duration_ms=LEASED_MS):
            monkeypatch.setattr(bucket.store, "put", renewal)
            assert has_begun.wait(60)
        bucket.run(all_written())
    assert leases(cold_bucket.root) == []


def test_a_job_that_outlived_its_lease_says_so(cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = options(cold_bucket)

    def run(bucket: Bucket) -> None:
        with reader_lease(bucket, wanted, "audit", duration_ms=EXPIRED_MS):
            monkeypatch.setattr(bucket.store, "put", failing(Unavailable("away")))
            time.sleep(1.5 * EXPIRED_MS / 1000)
            raise Corrupt("a segment is missing")

    with Bucket(wanted.store) as bucket, pytest.raises(LeaseExpired) as expired:
        run(bucket)
    assert isinstance(expired.value.__cause__, Corrupt)


def test_a_failure_under_a_lease_is_the_jobs_own(cold_bucket: ColdBucket) -> None:
    wanted = options(cold_bucket)
    with Bucket(wanted.store) as bucket, pytest.raises(Corrupt), reader_lease(bucket, wanted, "audit", duration_ms=LEASED_MS):
        raise Corrupt("a segment is missing")
    assert leases(cold_bucket.root) == []


def test_credentials_that_may_not_write_are_enough(
    cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = options(cold_bucket)
    with Bucket(wanted.store) as bucket:
        monkeypatch.setattr(bucket.store, "put", failing(Refused("access denied")))
        with reader_lease(bucket, wanted, "audit"):
            assert leases(cold_bucket.root) == []
    assert "is read without a lease" in caplog.text
