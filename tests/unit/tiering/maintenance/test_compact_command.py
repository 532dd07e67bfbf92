"""``stratalog job compact`` reads from the bucket what metadata has, or nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from support.compaction_kernels import load_kernels
from unit.tiering.maintenance.test_compaction import LAZY
from unit.tiering.maintenance.test_erasure import SEGMENTS, cold, erase
from unit.tiering.maintenance.test_superseded import ports_of

from stratalog.tier import compacting
from stratalog.tier.compacting import histories_to_read
from stratalog_core.errors import StratalogError, Unavailable
from stratalog_metadata.records import Topic
from stratalog_tiering.format.object_keys import parse_manifest_key
from stratalog_tiering.offload.ports import WorkerPorts

Cluster = Any


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_kernels()


@pytest.fixture
def topic(topic: Topic) -> Topic:
    return msgspec.structs.replace(topic, configs=LAZY)


async def test_a_version_that_is_in_metadata_alone_ends_the_job(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark would read the bucket's version, which has the records that were erased: they would supersede others."""

    @asynccontextmanager
    async def session(addresses: Sequence[str], store_url: str, writer: str) -> AsyncIterator[WorkerPorts]:
        yield ports_of(cluster)

    monkeypatch.setattr(compacting, "editing_session", session)
    await cold(cluster, SEGMENTS)

    def away(call: str, key: str) -> StratalogError | None:
        return Unavailable("away") if call == "put" and parse_manifest_key(key) is not None else None

    cluster.store.before = away
    await erase(cluster)
    cluster.store.before = lambda call, key: None
    with pytest.raises(Unavailable, match=r"manifest version \d+ of flights-0 is committed and not in the bucket yet"):
        await histories_to_read((), cluster.store.url, [cluster.topic.name])
    await cluster.start_worker("worker")
    await cluster.until(lambda: not cluster.pointer().content)
    read = await histories_to_read((), cluster.store.url, [cluster.topic.name])
    assert {name.partition: len(held.segments) for name, held in read.items()} == {0: 3, 1: 0}
