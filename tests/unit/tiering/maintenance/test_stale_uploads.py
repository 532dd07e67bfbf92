"""Uploads that were never completed are aborted after a while, by the owner of the bucket only."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stratalog_core.errors import Invalid
from stratalog_core.system import SystemClock
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.format.object_keys import segment_key
from stratalog_tiering.maintenance.deletion import abort_stale_uploads
from stratalog_tiering.offload.ownership import take_over
from stratalog_tiering.offload.ports import worker_ports
from stratalog_tiering.store import Upload

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
