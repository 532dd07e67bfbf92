"""Uploads that were never completed are aborted after a while, by the owner of the bucket only."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from stratalog_core.errors import Invalid
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.format.object_keys import segment_key
from stratalog_tiering.maintenance.deletion import abort_stale_uploads
from stratalog_tiering.offload.ownership import take_over
from stratalog_tiering.offload.ports import worker_ports
from stratalog_tiering.store import PART_BYTES_MIN, Upload, open_store

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
DAY_MS = 86_400_000


@pytest.mark.parametrize("overtaken_after", [0, 1])
async def test_uploads_of_the_next_owner_are_not_aborted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, overtaken_after: int
) -> None:
    now_ms = SystemClock().wall_ms()
    keys = [segment_key(cluster.topic.topic_id, 0, offset, 1, 2) for offset in (0, 10, 20)]
    ages_ms = [DAY_MS, DAY_MS, 0]
    aborted = list[str]()
    ports = worker_ports(
        TieringSettings(worker_id="worker-1", grace_ms=0), cluster.metadata, cluster.store, cluster.ledgers, SystemClock(),
        random.Random(1), cluster.background,
    )  # fmt: skip
    await ports.bucket.ensure()

    async def uploads() -> AsyncIterator[Upload]:
        for key, age_ms in zip(keys, ages_ms, strict=True):
            yield Upload(key=key, upload_id=key, initiated_ms=now_ms - age_ms)

    async def abort(upload: Upload) -> None:
        aborted.append(upload.key)
        if len(aborted) == overtaken_after:
            await take_over(cluster.store, "another", now_ms)

    monkeypatch.setattr(cluster.store, "list_uploads", uploads)
    monkeypatch.setattr(cluster.store, "abort_upload", abort)
    if not overtaken_after:
        assert await abort_stale_uploads(ports) == 2
        assert aborted == keys[:2]
        await take_over(cluster.store, "another", now_ms)
    before = len(aborted)
    with pytest.raises(Invalid, match="belongs to cluster another"):
        await abort_stale_uploads(ports)
    assert len(aborted) == before + overtaken_after


class LaterClock(SystemClock):
    """A clock that is two days ahead."""

    def wall_ms(self) -> int:
        return super().wall_ms() + 2 * DAY_MS


@pytest.mark.parametrize(("copy_grace_ms", "is_aborted"), [(0, True), (DAY_MS, True), (3 * DAY_MS, False)])
async def test_uploads_to_the_second_copy_are_aborted_after_its_grace_period(
    cluster: Cluster, tmp_path: Path, background: ThreadBackground, copy_grace_ms: int, is_aborted: bool
) -> None:
    second = open_store(str(tmp_path / "second"), background=background, clock=SystemClock(), random=random.Random(7))
    passes = list[int]()

    async def uploads(listed: Callable[[], AsyncIterator[Upload]] = second.list_uploads) -> AsyncIterator[Upload]:
        passes.append(1)
        async for upload in listed():
            yield upload

    await second.create_upload(segment_key(cluster.topic.topic_id, 0, 0, 0, 1), PART_BYTES_MIN)
    second.list_uploads = uploads  # type: ignore[method-assign]
    await cluster.start_worker(second=second, clock=LaterClock(), copy_grace_ms=copy_grace_ms)
    async with asyncio.timeout(60):
        while len(passes) < 3:  # noqa: ASYNC110 - stores tell nobody
            await asyncio.sleep(0.01)
    assert bool([upload async for upload in second.list_uploads()]) != is_aborted
