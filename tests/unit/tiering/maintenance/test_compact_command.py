"""``stratalog job compact`` reads from the bucket what metadata has, or nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from support.compaction_kernels import load_kernels
from support.hostile_batches import hostile_batch
from support.superseded import offset_set
from unit.tiering.maintenance.test_compaction import LAZY, ask
from unit.tiering.maintenance.test_erasure import SEGMENTS, batch_of, cold, erase
from unit.tiering.maintenance.test_superseded import ports_of

from stratalog.tier import compacting
from stratalog.tier.compacting import Removal, histories_to_read, remove_found
from stratalog_core.errors import StratalogError, Unavailable
from stratalog_metadata.records import Topic
from stratalog_pipeline.jobs.page import render_page
from stratalog_pipeline.jobs.report import Report
from stratalog_pipeline.jobs.report_compaction import compaction_report
from stratalog_tiering.format.object_keys import parse_manifest_key
from stratalog_tiering.offload.ports import WorkerPorts

Cluster = Any


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_kernels()


@pytest.fixture
def topic(topic: Topic) -> Topic:
    return msgspec.structs.replace(topic, configs=LAZY)


@pytest.fixture(autouse=True)
def session_of_the_cluster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def session(addresses: Sequence[str], store_url: str, writer: str) -> AsyncIterator[WorkerPorts]:
        yield ports_of(cluster)

    monkeypatch.setattr(compacting, "editing_session", session)


def hostile(base_offset: int) -> bytes:
    """A batch of one record that brokers store and only a lenient decoder can read."""
    return hostile_batch("a value beyond its record", 0, base_offset=base_offset)


async def remove(cluster: Cluster, *gone: int) -> tuple[Removal, Report]:
    """The removal of the records at these offsets, and its report."""
    read = await histories_to_read((), cluster.store.url, [cluster.topic.name])
    found = {name: offset_set(gone if name.partition == 0 else ()) for name in read}
    done = await remove_found((), cluster.store.url, read, found)
    return done, compaction_report(read, found, done.compacted, done.refused, now_ms=1, is_dry_run=False)


async def test_a_segment_whose_superseded_records_cannot_be_read_is_reported(cluster: Cluster) -> None:
    """The job removed nothing from it, and said that it was complete."""
    batches = [batch_of(0, "a"), hostile(1), batch_of(2, "b", "a", "b"), batch_of(5, "c")]
    await cold(cluster, [batches[:2], batches[2:3], batches[3:]])
    before = cluster.pointer()
    done, report = await remove(cluster, 1)
    assert (done.compacted, cluster.pointer()) == ([], before)
    ((name, kept),) = done.refused
    assert (str(name), kept.entry.base_offset) == ("flights-0", 0)
    text = "1 batches with superseded records cannot be read, and stay; the batch at offset 1: "
    assert kept.reason.startswith(text)
    (problem,) = report.problems
    assert text in problem
    assert report.facts["verdict"] == "1 parts left"
    assert report.document["refused"][0]["reason"] == kept.reason
    assert text in render_page(report, "compact", "now")
    partly, report = await remove(cluster, 0, 1, 2)
    assert [(each.records, each.unreadable_batches) for _, each in partly.compacted] == [(1, 1), (1, 0)]
    assert len(report.problems) == 1, "a segment that was replaced is reported as such alone"


async def test_segments_that_a_worker_has_compacted_since_are_not_reported(cluster: Cluster) -> None:
    await cold(cluster, SEGMENTS)
    read = await histories_to_read((), cluster.store.url, [cluster.topic.name])
    found = {name: offset_set([0, 1, 3] if name.partition == 0 else ()) for name in read}
    worker = await cluster.start_worker("worker")
    await ask(cluster)
    await worker.close()
    done = await remove_found((), cluster.store.url, read, found)
    assert (done.compacted, done.refused) == ([], [])


async def test_a_history_that_has_changed_is_named_once(cluster: Cluster) -> None:
    await cold(cluster, [[batch_of(0, "alice"), batch_of(1, "a")], [hostile(2)], [batch_of(3, "a")]])
    read = await histories_to_read((), cluster.store.url, [cluster.topic.name])
    found = {name: offset_set([1, 2] if name.partition == 0 else ()) for name in read}
    await erase(cluster)
    done = await remove_found((), cluster.store.url, read, found)
    assert [each.reason for _, each in done.refused] == [
        "records were erased since the job has read the history: run the job again"
    ]


async def test_a_version_that_is_in_metadata_alone_ends_the_job(cluster: Cluster) -> None:
    """Spark would read the bucket's version, which has the records that were erased: they would supersede others."""
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
