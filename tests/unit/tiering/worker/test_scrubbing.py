"""The continuous scrub finds damage within its interval, repairs it if it can, and says so in metrics and in the log."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from support.directory_store import object_contents
from unit.tiering.worker.test_copying import is_copied, segments_of
from unit.tiering.worker.test_deleted_topics import delete
from unit.tiering.worker.test_worker import Batches, Cluster

from stratalog_core.errors import Conflict, Unavailable
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import TierStatus, tier_status_key
from stratalog_tiering.copies.hot_repair import HotLedgers
from stratalog_tiering.metrics import ScrubMetrics
from stratalog_tiering.store import ObjectStore, open_store
from stratalog_tiering.worker.worker import TieringWorker

HOUR_MS = 3_600_000
INTERVAL_MS = 1_000


@pytest.fixture
def second(tmp_path: Path, background: ThreadBackground) -> ObjectStore:
    return open_store(str(tmp_path / "second"), background=background, clock=SystemClock(), random=random.Random(4))


def status_of(cluster: Cluster) -> TierStatus:
    found: TierStatus | None = cluster.metadata.view.find(TierStatus, tier_status_key(cluster.topic.topic_id, 0))
    assert found is not None
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - stores tell nobody
            await asyncio.sleep(0.02)


def scrubbed(worker: TieringWorker) -> ScrubMetrics:
    return next(group for group in worker.metrics() if isinstance(group, ScrubMetrics))


async def offloaded(cluster: Cluster, make_batches: Batches, count: int, deletion_lag_ms: int = 0) -> None:
    """Without ``deletion_lag_ms``, no segment has a hot copy afterwards."""
    for number in range(count):
        await cluster.add_ledger(make_batches(10 * number, [10]), 10 * number)
    worker = await cluster.start_worker("writer", segment_bytes=1, deletion_lag_ms=deletion_lag_ms)
    await cluster.until(lambda: cluster.pointer() is not None and cluster.pointer().end_offset == 10 * count)
    if not deletion_lag_ms:
        await cluster.until(lambda: not cluster.log().ledgers)
    await worker.close()


def alter(path: Path) -> bytes:
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    return content


async def test_every_segment_is_checked_in_each_interval(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    await offloaded(cluster, make_batches, 6)
    worker = await cluster.start_worker(scrub_interval_ms=INTERVAL_MS)
    await until(lambda: scrubbed(worker).segments_checked >= 18)
    metrics = scrubbed(worker)
    stored = sum(path.stat().st_size for path in segments_of(store_directory))
    assert metrics.checked_bytes == pytest.approx(metrics.segments_checked * stored / 6, rel=0.1)
    assert (metrics.findings, metrics.unrepaired, metrics.failures) == (0, 0, 0)
    await until(lambda: scrubbed(worker).behind_seconds < 1)


async def copy_all(cluster: Cluster, second: ObjectStore, directory: Path) -> None:
    copier = await cluster.start_worker("copier", second=second)
    await until(lambda: is_copied(cluster, directory))
    await copier.close()


async def test_damage_is_repaired_from_the_second_copy(
    cluster: Cluster, make_batches: Batches, store_directory: Path, tmp_path: Path, second: ObjectStore
) -> None:
    await offloaded(cluster, make_batches, 6)
    await copy_all(cluster, second, tmp_path / "second")
    before = object_contents(store_directory)
    altered, missing, *_ = segments_of(store_directory)
    alter(altered)
    missing.unlink()
    worker = await cluster.start_worker(second=second, scrub_interval_ms=INTERVAL_MS)
    await until(lambda: scrubbed(worker).repaired == 2)
    assert object_contents(store_directory) == before
    assert (scrubbed(worker).findings, scrubbed(worker).unrepaired) == (2, 0)


async def test_damage_is_repaired_from_the_hot_copy(
    cluster: Cluster, make_batches: Batches, store_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    await offloaded(cluster, make_batches, 3, deletion_lag_ms=HOUR_MS)
    alter(segments_of(store_directory)[1])
    worker = await cluster.start_worker(scrub_interval_ms=INTERVAL_MS, deletion_lag_ms=HOUR_MS)
    await until(lambda: scrubbed(worker).repaired == 1)
    assert "segment-data-altered" in caplog.text
    assert "repaired from the hot-copy" in caplog.text


def away(cluster: Cluster, second: ObjectStore) -> ObjectStore:
    """``second``, which does not answer."""
    found = type(cluster.store)(second)
    found.before = lambda name, key: Unavailable("away")
    return cast(ObjectStore, found)


async def test_damage_is_repaired_from_the_hot_copy_while_the_second_copy_is_away(
    cluster: Cluster, make_batches: Batches, store_directory: Path, second: ObjectStore
) -> None:
    await offloaded(cluster, make_batches, 3, deletion_lag_ms=HOUR_MS)
    alter(segments_of(store_directory)[1])
    worker = await cluster.start_worker(second=away(cluster, second), scrub_interval_ms=INTERVAL_MS, deletion_lag_ms=HOUR_MS)
    await until(lambda: scrubbed(worker).repaired == 1)


async def test_damage_is_reported_while_the_second_copy_is_away_and_repaired_when_it_is_back(
    cluster: Cluster, make_batches: Batches, store_directory: Path, second: ObjectStore, tmp_path: Path
) -> None:
    await offloaded(cluster, make_batches, 3)
    await copy_all(cluster, second, tmp_path / "second")
    for damaged in segments_of(store_directory)[:2]:
        alter(damaged)
    copy = away(cluster, second)
    worker = await cluster.start_worker(second=copy, scrub_interval_ms=INTERVAL_MS)
    await until(lambda: scrubbed(worker).unrepaired == 2)
    assert scrubbed(worker).findings == 2
    cast(Any, copy).before = lambda name, key: None
    await until(lambda: (scrubbed(worker).repaired, scrubbed(worker).unrepaired) == (2, 0))


async def test_the_hot_copy_stays_while_damage_of_the_cold_one_is_not_repaired(
    cluster: Cluster, make_batches: Batches, store_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repair lost a race with a commit, and is tried again later. Size, footer and sections of the segment are sound."""

    async def overtaken(*_: Any) -> str:
        raise Conflict("the partition has changed during the repair: repeat it")

    await offloaded(cluster, make_batches, 3, deletion_lag_ms=HOUR_MS)
    alter(segments_of(store_directory)[1])
    with monkeypatch.context() as patched:
        patched.setattr(HotLedgers, "rewrite", overtaken)
        worker = await cluster.start_worker(scrub_interval_ms=INTERVAL_MS, deletion_lag_ms=HOUR_MS)
        await until(lambda: bool(status_of(cluster).unrepaired))
        await worker.close()
        worker = await cluster.start_worker("worker-2", scrub_interval_ms=INTERVAL_MS)
        await cluster.until(lambda: "is damaged" in cluster.last_error() or not cluster.log().ledgers)
        assert [ref.base_offset for ref in cluster.log().ledgers] == [0, 10, 20]
    await cluster.until(lambda: not cluster.log().ledgers)
    await until(lambda: scrubbed(worker).repaired == 1)


async def test_damage_without_another_copy_is_reported_once_and_until_it_is_gone(
    cluster: Cluster, make_batches: Batches, store_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await offloaded(cluster, make_batches, 3)
    damaged = segments_of(store_directory)[1]
    content = alter(damaged)
    worker = await cluster.start_worker(scrub_interval_ms=INTERVAL_MS)
    await until(lambda: scrubbed(worker).unrepaired == 1)
    checked = scrubbed(worker).segments_checked
    await until(lambda: scrubbed(worker).segments_checked > checked + 8)
    assert (scrubbed(worker).findings, scrubbed(worker).repaired, scrubbed(worker).unrepaired) == (1, 0, 1)
    assert caplog.text.count("not repaired") == 1
    damaged.write_bytes(content)
    await until(lambda: scrubbed(worker).unrepaired == 0)


async def test_damage_stays_reported_after_a_restart(
    cluster: Cluster, make_batches: Batches, store_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by another worker, and while no segment is due."""
    await offloaded(cluster, make_batches, 3)
    damaged = segments_of(store_directory)[1]
    content = alter(damaged)
    worker = await cluster.start_worker(scrub_interval_ms=INTERVAL_MS)
    await until(lambda: scrubbed(worker).unrepaired == 1 and bool(status_of(cluster).unrepaired))
    await worker.close()
    worker = await cluster.start_worker("another", scrub_interval_ms=30 * 24 * HOUR_MS)
    await until(lambda: scrubbed(worker).unrepaired == 1)
    await until(lambda: scrubbed(worker).segments_checked > 0)
    assert (scrubbed(worker).unrepaired, scrubbed(worker).findings) == (1, 0)
    assert caplog.text.count("not repaired") == 1
    await worker.close()
    damaged.write_bytes(content)
    worker = await cluster.start_worker("third", scrub_interval_ms=INTERVAL_MS)
    await until(lambda: scrubbed(worker).segments_checked > 0 and not status_of(cluster).unrepaired)
    assert scrubbed(worker).unrepaired == 0


async def test_what_a_deleted_topic_had_is_reported_no_more(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    await offloaded(cluster, make_batches, 3)
    alter(segments_of(store_directory)[1])
    worker = await cluster.start_worker(scrub_interval_ms=INTERVAL_MS)
    await until(lambda: scrubbed(worker).unrepaired == 1)
    await delete(cluster, restorable_ms=24 * HOUR_MS)
    await until(lambda: (scrubbed(worker).unrepaired, scrubbed(worker).behind_seconds) == (0, 0))


async def test_without_an_interval_nothing_is_scrubbed(cluster: Cluster, make_batches: Batches) -> None:
    await offloaded(cluster, make_batches, 1)
    worker = await cluster.start_worker()
    assert not [group for group in worker.metrics() if isinstance(group, ScrubMetrics)]
