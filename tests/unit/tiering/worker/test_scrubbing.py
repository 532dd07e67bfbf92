"""The continuous scrub finds damage within its interval, repairs it if it can, and says so in metrics and in the log."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from support.directory_store import object_contents
from unit.tiering.worker.test_copying import is_copied, segments_of
from unit.tiering.worker.test_deleted_topics import delete
from unit.tiering.worker.test_worker import Batches, Cluster

from stratalog_core.errors import Conflict, OutcomeUnknown, Refused, StratalogError, Unavailable
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import TierRequest, TierStatus, tier_status_key
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.copies.hot_repair import HotLedgers
from stratalog_tiering.core.damage import REMEMBERED_MAX
from stratalog_tiering.format import manifest_edit
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.metrics import ScrubMetrics
from stratalog_tiering.offload import offloading
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


async def test_the_hot_copy_stays_while_the_damage_of_the_cold_one_is_being_repaired(
    cluster: Cluster, make_batches: Batches, store_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, resumed, rewrite = asyncio.Event(), asyncio.Event(), HotLedgers.rewrite

    async def slowly(*arguments: Any) -> str:
        begun.set()
        await resumed.wait()
        return await rewrite(*arguments)

    monkeypatch.setattr(HotLedgers, "rewrite", slowly)
    await offloaded(cluster, make_batches, 3, deletion_lag_ms=HOUR_MS)
    alter(segments_of(store_directory)[1])
    worker = await cluster.start_worker(scrub_interval_ms=INTERVAL_MS, deletion_lag_ms=HOUR_MS)
    await begun.wait()
    request = TierRequest(topic_id=cluster.topic.topic_id, index=0, end_offset=30, delete_hot=True)
    await cluster.metadata.propose(Command(updates=(Put(record=request),)))
    await cluster.until(lambda: "is damaged" in cluster.last_error() or not cluster.log().ledgers)
    assert [ref.base_offset for ref in cluster.log().ledgers] == [0, 10, 20]
    resumed.set()
    await cluster.until(lambda: not cluster.log().ledgers)
    await until(lambda: (scrubbed(worker).repaired, scrubbed(worker).findings) == (1, 1))


async def test_a_hot_copy_is_not_dropped_by_a_look_at_the_status_from_before_the_damage_was_found(
    cluster: Cluster, make_batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, check = 0, offloading.check_presence  # type: ignore[attr-defined]

    async def meanwhile_found(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 1:
            status = TierStatus(topic_id=cluster.topic.topic_id, index=0, worker_id="scrub", unrepaired=("segments/0",))
            await cluster.metadata.propose(Command(updates=(Put(record=status),)))
        return await check(*arguments)

    await offloaded(cluster, make_batches, 1, deletion_lag_ms=HOUR_MS)
    monkeypatch.setattr(offloading, "check_presence", meanwhile_found)
    await cluster.start_worker(scrub_interval_ms=INTERVAL_MS)
    await cluster.until(lambda: not cluster.log().ledgers)
    assert looks > 1


async def fill_status(cluster: Cluster) -> None:
    """Let the next worker check all segments in its first pass, because its predecessor had no room for more damage."""
    gone = tuple(f"segments/{number:020d}" for number in range(REMEMBERED_MAX))
    status = TierStatus(topic_id=cluster.topic.topic_id, index=0, worker_id="before", unrepaired=gone)
    await cluster.metadata.propose(Command(updates=(Put(record=status),)))


async def test_damage_that_the_status_has_no_room_for_is_found_again(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    """By a worker that takes the partition over, although the segment is not due."""
    await offloaded(cluster, make_batches, 3)
    damaged = segments_of(store_directory)[1]
    alter(damaged)
    await fill_status(cluster)
    await cluster.start_worker(scrub_interval_ms=30 * 24 * HOUR_MS)
    await cluster.until(lambda: [key.endswith(damaged.name) for key in status_of(cluster).unrepaired] == [True])


async def test_damage_stays_reported_while_the_manifest_is_damaged(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    await offloaded(cluster, make_batches, 3)
    alter(segments_of(store_directory)[1])
    worker = await cluster.start_worker(scrub_interval_ms=INTERVAL_MS)
    await until(lambda: scrubbed(worker).unrepaired == 1)
    alter(store_directory / cluster.pointer().object_key)
    await until(lambda: scrubbed(worker).unrepaired == 2)


def fail_at(cluster: Cluster, place: Path, failure: StratalogError) -> None:
    """Let the store answer any request about one object with ``failure``."""
    cluster.store.before = lambda name, key: failure if Path(key).name == place.name else None


@pytest.mark.parametrize("failure", [Refused("archived"), Unavailable("no read quorum"), OutcomeUnknown("no answer")])
async def test_a_segment_that_the_store_does_not_return_is_reported_and_the_others_are_repaired(
    cluster: Cluster, make_batches: Batches, store_directory: Path, failure: StratalogError
) -> None:
    await offloaded(cluster, make_batches, 4, deletion_lag_ms=HOUR_MS)
    damaged, unread, *_ = segments_of(store_directory)
    alter(damaged)
    fail_at(cluster, unread, failure)
    worker = await cluster.start_worker(scrub_interval_ms=INTERVAL_MS, deletion_lag_ms=HOUR_MS)
    await until(lambda: (scrubbed(worker).repaired, scrubbed(worker).unrepaired) == (1, 1))
    await cluster.until(lambda: [key.endswith(unread.name) for key in status_of(cluster).unrepaired] == [True])
    await until(lambda: scrubbed(worker).behind_seconds < 1)
    cluster.store.before = lambda name, key: None
    await until(lambda: scrubbed(worker).unrepaired == 0)
    assert scrubbed(worker).findings == 2


@pytest.mark.parametrize(("kind", "failure"), [("pages", Refused("archived")), ("tree", Unavailable("no read quorum"))])
async def test_damage_is_found_beside_a_part_of_the_manifest_that_the_store_does_not_return(
    cluster: Cluster,
    make_batches: Batches,
    store_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    failure: StratalogError,
) -> None:
    limits = partial(ManifestLimits, inline_segments_max=2, page_segments=1, page_fan_in=2, inline_spans_max=1)
    monkeypatch.setattr(manifest_edit, "ManifestLimits", limits)
    await offloaded(cluster, make_batches, 5)
    part = max(store_directory.glob(f"{kind}/*/0/*"), key=lambda path: path.stat().st_mtime_ns)  # noqa: ASYNC240 - a test
    damaged = segments_of(store_directory)[-1]
    content = alter(damaged)
    fail_at(cluster, part, failure)
    worker = await cluster.start_worker(scrub_interval_ms=INTERVAL_MS)
    await cluster.until(lambda: {Path(key).name for key in status_of(cluster).unrepaired} == {part.name, damaged.name})
    cluster.store.before = lambda name, key: None
    damaged.write_bytes(content)
    await until(lambda: scrubbed(worker).unrepaired == 0)


async def test_a_segment_about_which_the_store_did_not_answer_once_is_checked_again_soon(
    cluster: Cluster, make_batches: Batches, store_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await offloaded(cluster, make_batches, 3)
    _, unread, _ = segments_of(store_directory)
    failures: list[StratalogError] = [Unavailable("busy")]
    worker = await cluster.start_worker(scrub_interval_ms=INTERVAL_MS)
    cluster.store.before = lambda name, key: failures.pop() if failures and Path(key).name == unread.name else None
    await until(lambda: "is checked again soon: busy" in caplog.text)
    checked = scrubbed(worker).segments_checked
    await until(lambda: scrubbed(worker).segments_checked > checked + 3)
    assert (scrubbed(worker).findings, scrubbed(worker).unrepaired) == (0, 0)


async def test_damage_that_was_found_before_the_store_was_away_is_repaired_when_it_is_back(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    await offloaded(cluster, make_batches, 3, deletion_lag_ms=HOUR_MS)
    damaged, unread, _ = segments_of(store_directory)
    alter(damaged)
    is_away = False

    def before(name: str, key: str) -> StratalogError | None:
        nonlocal is_away
        is_away = is_away or Path(key).name == unread.name
        return Unavailable("away") if is_away else None

    cluster.store.before = before
    await fill_status(cluster)
    worker = await cluster.start_worker(scrub_interval_ms=INTERVAL_MS, deletion_lag_ms=HOUR_MS)
    await until(lambda: scrubbed(worker).failures > 1)
    assert any(key.endswith(damaged.name) for key in status_of(cluster).unrepaired)
    cluster.store.before = lambda name, key: None
    await until(lambda: scrubbed(worker).repaired == 1)
    assert scrubbed(worker).findings == 1


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
