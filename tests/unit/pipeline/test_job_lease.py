"""A job holds a lease on what it reads while it runs, and only then; one that expired is an error of its own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from unit.pipeline.test_scan import batches

from stratalog_core.errors import Corrupt, Invalid, Unavailable
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.lease import reader_lease
from stratalog_pipeline.options import ReadOptions, parse_options
from stratalog_tiering.cold.lease import LeaseExpired

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket

LEASED_MS = 400


def options(cold_bucket: ColdBucket) -> ReadOptions:
    cold_bucket.add_topic("flights", [[batches(0, 10)]])
    cold_bucket.add_topic("weather", [[batches(0, 10)]])
    return parse_options({"path": cold_bucket.url, "subscribe": "flights"})


def leases(root: Path) -> list[Path]:
    return list(root.glob("leases/*.json"))


def failing(failure: Exception) -> Any:
    async def put(*_: Any, **__: Any) -> None:
        raise failure

    return put


def test_the_lease_is_held_and_renewed_while_the_job_runs(cold_bucket: ColdBucket) -> None:
    wanted = options(cold_bucket)
    with Bucket(wanted.store) as bucket:
        with reader_lease(bucket, wanted, "audit", LEASED_MS):
            (path,) = leases(cold_bucket.root)
            written = path.stat().st_mtime_ns
            document = json.loads(path.read_bytes())
            assert document["holder"].startswith("audit by ")
            (topic,) = (each for each in bucket.topics() if each.name == "flights")
            assert document["topic_ids"] == [str(topic.topic_id)]
            time.sleep(2 * LEASED_MS / 1000)
            assert path.stat().st_mtime_ns > written
        assert leases(cold_bucket.root) == []


def test_a_job_that_outlived_its_lease_says_so(cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = options(cold_bucket)

    def run(bucket: Bucket) -> None:
        with reader_lease(bucket, wanted, "audit", LEASED_MS):
            monkeypatch.setattr(bucket.store, "put", failing(Unavailable("away")))
            time.sleep(1.5 * LEASED_MS / 1000)
            raise Corrupt("a segment is missing")

    with Bucket(wanted.store) as bucket, pytest.raises(LeaseExpired) as expired:
        run(bucket)
    assert isinstance(expired.value.__cause__, Corrupt)


def test_a_failure_under_a_lease_is_the_jobs_own(cold_bucket: ColdBucket) -> None:
    wanted = options(cold_bucket)
    with Bucket(wanted.store) as bucket, pytest.raises(Corrupt), reader_lease(bucket, wanted, "audit", LEASED_MS):
        raise Corrupt("a segment is missing")
    assert leases(cold_bucket.root) == []


def test_credentials_that_may_not_write_are_enough(
    cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = options(cold_bucket)
    with Bucket(wanted.store) as bucket:
        monkeypatch.setattr(bucket.store, "put", failing(Invalid("access denied")))
        with reader_lease(bucket, wanted, "audit"):
            assert leases(cold_bucket.root) == []
    assert "is read without a lease" in caplog.text
