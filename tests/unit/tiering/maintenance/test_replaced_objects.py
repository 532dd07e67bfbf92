"""The objects that ``stratalog job erase`` reports and deletes: all that may have the records that it erased."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import msgspec
import pytest
from support.compaction_kernels import load_kernels
from unit.tiering.maintenance.test_compaction import LAZY
from unit.tiering.maintenance.test_erasure import ALICE, SEGMENTS, cold, erase, ports_of
from unit.tiering.maintenance.test_superseded import compact

from stratalog.tier import erasing
from stratalog.tier.erasing import EraseFrom, Erasure, erase_found
from stratalog_core.errors import Conflict, NotFound
from stratalog_metadata.records import Topic
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.erase import SearchedHistory, plan_search
from stratalog_pipeline.options import Subscribed, parse_options
from stratalog_pipeline.planning import OffsetRange, PartitionName
from stratalog_tiering.format.manifest import Reason
from stratalog_tiering.maintenance.erasure import Erased
from stratalog_tiering.maintenance.superseded import Compacted
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.worker import collection

Cluster = Any


@pytest.fixture
def topic(topic: Topic) -> Topic:
    return msgspec.structs.replace(topic, configs=LAZY)


@pytest.fixture
async def origin(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> EraseFrom:
    @asynccontextmanager
    async def session(addresses: Sequence[str], store_url: str, writer: str) -> AsyncIterator[WorkerPorts]:
        yield ports_of(cluster)

    monkeypatch.setattr(erasing, "editing_session", session)
    return EraseFrom(addresses=(), store=cluster.store.url, grace_ms=86_400_000, deletes_now=True)


async def searched(cluster: Cluster) -> dict[PartitionName, SearchedHistory]:
    """The histories in the bucket, as a search finds them."""

    def plan() -> dict[PartitionName, SearchedHistory]:
        with Bucket(cluster.store.url) as bucket:
            return plan_search(bucket, parse_options({"store": cluster.store.url, "subscribe": cluster.topic.name}))[0]

    return await asyncio.to_thread(plan)


async def erase_all(origin: EraseFrom, cluster: Cluster, *, found: bool) -> Erasure:
    return await erase_searched(origin, cluster, await searched(cluster), found=found)


async def erase_searched(
    origin: EraseFrom, cluster: Cluster, held: Mapping[PartitionName, SearchedHistory], *, found: bool
) -> Erasure:
    name, history = next(iter(held.items()))
    ranges = {name: [(0, history.offsets.end)]} if found else {}
    return await erase_found(origin, Subscribed(topics=(cluster.topic.name,)), held, ranges, ALICE)


async def test_a_job_that_is_run_again_deletes_what_the_interrupted_one_replaced(cluster: Cluster, origin: EraseFrom) -> None:
    await cold(cluster, SEGMENTS)
    replaced = [each.source.key for each in await erase(cluster) if isinstance(each, Erased)]
    done = await erase_all(origin, cluster, found=False)
    assert {each.key for each in done.objects} == set(replaced)
    assert all(each.is_deleted for each in done.objects)
    stored = {info.key async for info in cluster.store.list("")}
    assert stored.isdisjoint(replaced)


async def test_what_a_compaction_replaced_before_the_erasure_goes_too(cluster: Cluster, origin: EraseFrom) -> None:
    load_kernels()
    await cold(cluster, SEGMENTS)
    compacted = [each for each in await compact(cluster) if isinstance(each, Compacted)]
    done = await erase_all(origin, cluster, found=True)
    assert [each.records for _, each in done.erased] == [1, 1], "the other record was superseded"
    assert {each.reason for each in done.objects if each.is_deleted} == {Reason.ERASED, Reason.COMPACTED}
    assert compacted[0].source.key in {each.key for each in done.objects}, "it has both records"
    stored = {info.key async for info in cluster.store.list("")}
    assert stored.isdisjoint(each.key for each in done.objects)


async def test_objects_that_cannot_be_judged_are_named(
    cluster: Cluster, origin: EraseFrom, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cold(cluster, SEGMENTS)

    async def changed(*_: object) -> None:
        raise Conflict("it has changed meanwhile")

    monkeypatch.setattr(collection, "find_garbage", changed)
    done = await erase_all(origin, cluster, found=True)
    assert (len(done.erased), done.objects) == (2, [])
    assert set(done.unlisted.values()) == {"it has changed meanwhile"}


async def test_a_topic_that_the_cluster_does_not_have_is_refused_before_any_change(cluster: Cluster, origin: EraseFrom) -> None:
    await cold(cluster, SEGMENTS)
    version = cluster.pointer().manifest_version
    gone = PartitionName(topic="gone", topic_id=UUID(int=99), partition=0)
    held = await searched(cluster) | {gone: SearchedHistory(offsets=OffsetRange(first=0, end=1))}
    with pytest.raises(NotFound, match=r"topic 'gone' with the id .* is in the bucket and not in the cluster"):
        await erase_found(origin, Subscribed(topics=("flights", "gone")), held, {next(iter(held)): [(0, 11)]}, ALICE)
    assert cluster.pointer().manifest_version == version
