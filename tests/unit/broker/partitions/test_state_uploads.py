"""States of coordinators reach the bucket by few requests, and a restored one is what the first owner begins with."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster
from unit.broker.partitions.test_internal_topics import GROUP, Offsets
from unit.metadata.watching import until

from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.partitions.internal_topics import CONSUMER_OFFSETS
from stratalog_broker.partitions.state_uploads import StateUploads
from stratalog_core.errors import OutcomeUnknown, Refused, Unavailable
from stratalog_core.system import SystemClock
from stratalog_metadata.records import Log, Topic, log_key, partition_key, topic_key
from stratalog_metadata.state.commands import Command, Delete, Put
from stratalog_tiering.format.coordinator_state import CoordinatorState, decode_state
from stratalog_tiering.format.object_keys import COORDINATORS_PREFIX, StateKey, parse_state_key, state_key
from stratalog_tiering.maintenance.restoring_coordinators import read_internal_topics, restore_internal_topic
from stratalog_tiering.offload.coordinator_states import CoordinatorStates
from stratalog_tiering.offload.ownership import claim_bucket, cluster_id_in
from stratalog_tiering.store import ObjectStore

HOUR_MS = 3_600_000


class CountedStore:
    """A store whose requests are counted, and fail before or after they took effect if a test wants it."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.requests: Counter[str] = Counter()
        self.before: Exception | None = None
        self.after_put: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        called = getattr(self.inner, name)
        if name not in ("put", "get", "head", "list", "delete"):
            return called

        def count(*args: Any, **keywords: Any) -> Any:
            self.requests[name] += 1
            if self.before is not None:
                raise self.before
            return self._put(*args, **keywords) if name == "put" else called(*args, **keywords)

        return count

    async def _put(self, *args: Any, **keywords: Any) -> None:
        await self.inner.put(*args, **keywords)
        if self.after_put is not None:
            raise self.after_put


async def new_uploads(cluster: MiniCluster, number: int = 1) -> tuple[StateUploads, CountedStore]:
    await claim_bucket(cluster.store, cluster_id_in(cluster.metadata), SystemClock().wall_ms())
    store, broker = CountedStore(cluster.store), cluster.brokers[number]
    states = CoordinatorStates(cast("ObjectStore", store), broker.metadata, SystemClock())
    return StateUploads(broker.server.partitions.all, states, SystemClock(), HOUR_MS), store


async def stored(cluster: MiniCluster) -> list[CoordinatorState]:
    keys = [info.key async for info in cluster.store.list(COORDINATORS_PREFIX)]
    places = [place for key in keys if (place := parse_state_key(key)) is not None]
    return [decode_state(await cluster.store.get(key), place) for key, place in zip(keys, places, strict=True)]


def positions(state: CoordinatorState) -> dict[int, int]:
    offsets = GroupStore.from_snapshot(state.checkpoint.application_state).offsets_of(GROUP)
    return {partition: committed.offset for (_, partition), committed in offsets.items()}


async def test_an_idle_partition_costs_nothing_and_a_changed_one_a_write(tmp_path: Path) -> None:
    async with run_cluster(tmp_path) as cluster:
        offsets, (uploads, store) = Offsets(cluster), await new_uploads(cluster)
        await uploads.run_round()
        assert not store.requests, "no group, no request"
        await offsets.commit(0, 5)
        await uploads.run_round()
        # Who owns the bucket, and what the partition's earlier owners have stored: once.
        assert store.requests["put"] == 1
        for number in range(3):
            await offsets.commit(0, 6 + number)
            await offsets.commit(1, number)
            store.requests.clear()
            await uploads.run_round()
            assert store.requests["put"] == 1
            assert store.requests["list"] == store.requests["get"] == 0
            assert store.requests["head"] <= 1, "rounds within a second share the look for another owner"
            store.requests.clear()
            for _ in range(3):
                await uploads.run_round()
            assert not store.requests
        newest, before = await stored(cluster)
        assert (positions(newest), positions(before)) == ({0: 8, 1: 2}, {0: 7, 1: 1})
        assert uploads.metrics()[0].partitions_waiting == 0


async def test_a_round_goes_through_the_partitions_in_the_order_in_which_they_are_served() -> None:
    """Not in that of their addresses: a round ends when the store is away, and a simulated run must repeat."""
    asked: list[int] = []

    class Serving(SimpleNamespace):
        __hash__ = object.__hash__  # type: ignore[assignment]

    class States:
        async def owner(self) -> tuple[str, int]:
            return "cluster", 1

        async def stored(self, topic: str, partition: int) -> list[StateKey]:
            asked.append(partition)
            raise OutcomeUnknown("the store does not answer")

    served = [
        Serving(
            application=object(), is_serving=True, core=SimpleNamespace(high_watermark=1),
            topic=SimpleNamespace(name=CONSUMER_OFFSETS), topic_partition=SimpleNamespace(partition=number),
        )
        for number in range(20)
    ]  # fmt: skip
    uploads = StateUploads(lambda: cast("Any", served), cast("Any", States()), SystemClock(), HOUR_MS)
    await uploads.run_round()
    assert asked == list(range(20))


async def test_the_next_owner_stores_what_the_last_one_did_not(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, brokers=1) as cluster:
        offsets, (uploads, _) = Offsets(cluster), await new_uploads(cluster)
        await offsets.commit(0, 5)
        await uploads.run_round()
        await offsets.commit(0, 6)
        await cluster.start_broker(2)
        await cluster.brokers.pop(1).stop()
        await offsets.coordinator()
        uploads, store = await new_uploads(cluster, 2)
        await uploads.run_round()
        newest, before = await stored(cluster)
        assert (positions(newest), positions(before)) == ({0: 6}, {0: 5})
        assert newest.leader_epoch > before.leader_epoch
        assert store.requests["put"] == 1
        uploads, store = await new_uploads(cluster, 2)
        await uploads.run_round()
        assert store.requests["put"] == 0, "everything is stored"
        assert uploads.metrics()[0].partitions_waiting == 0


@pytest.mark.parametrize(("leader_epoch", "is_stored"), [(0, True), (99, False)])
async def test_only_a_later_owner_has_a_newer_state(tmp_path: Path, leader_epoch: int, is_stored: bool) -> None:
    """An earlier owner's state of a greater offset is of a log that went back with restored metadata."""
    async with run_cluster(tmp_path) as cluster:
        offsets, (uploads, store) = Offsets(cluster), await new_uploads(cluster)
        await offsets.commit(0, 5)
        other = StateKey(CONSUMER_OFFSETS, offsets.identity.partition, 0, leader_epoch, 1_000)
        await cluster.store.put(state_key(other), [b"another owner's"])
        await uploads.run_round()
        assert store.requests["put"] == is_stored


@pytest.mark.parametrize(
    "failure", [Unavailable("away"), Refused("expired"), OutcomeUnknown("no answer"), ValueError("nobody expects it")]
)
async def test_a_failed_write_is_tried_again(tmp_path: Path, failure: Exception) -> None:
    async with run_cluster(tmp_path) as cluster:
        offsets, (uploads, store) = Offsets(cluster), await new_uploads(cluster)
        await offsets.commit(0, 5)
        store.before, store.after_put = (failure, None) if isinstance(failure, Unavailable | Refused) else (None, failure)
        await uploads.run_round()
        assert uploads.metrics()[0].failures == 1
        assert uploads.metrics()[0].partitions_waiting == 1
        store.before = store.after_put = None
        await uploads.run_round()
        (only,) = await stored(cluster)
        assert positions(only) == {0: 5}
        assert uploads.metrics()[0].partitions_waiting == 0


async def forget_internal_topic(cluster: MiniCluster) -> None:
    """As in a new cluster: metadata does not know the topic."""
    topic = cluster.metadata.view.find(Topic, topic_key(CONSUMER_OFFSETS))
    assert topic is not None
    keys = [make(topic.topic_id, index) for index in range(topic.partition_count) for make in (partition_key, log_key)]
    await cluster.metadata.propose(Command(updates=tuple(Delete(key=key) for key in (topic.key(), *keys))))
    await until(cluster.metadata, lambda: cluster.metadata.view.get(topic.key()) is None, WAIT_S)


async def test_the_first_owner_begins_with_the_restored_state(tmp_path: Path) -> None:
    async with run_cluster(tmp_path) as cluster:
        offsets, (uploads, _) = Offsets(cluster), await new_uploads(cluster)
        for partition in range(3):
            await offsets.commit(partition, 10 * partition)
        await uploads.run_round()
        await cluster.brokers.pop(1).stop()
        await forget_internal_topic(cluster)
        (found,) = await read_internal_topics(cluster.store, 1)
        assert await restore_internal_topic(
            cluster.metadata, cluster.store, found, 1, 1, cluster_id_in(cluster.metadata), 5, lambda content: content
        )
        await cluster.start_broker(2)
        assert await offsets.committed() == {0: 0, 1: 10, 2: 20}
        assert offsets.log.restored_from != "", "nothing was written yet"
        await cluster.brokers.pop(2).kill()
        await cluster.start_broker(3)
        await offsets.commit(0, 7)
        await until(cluster.metadata, lambda: offsets.log.restored_from == "", WAIT_S)
        assert await offsets.committed() == {0: 7, 1: 10, 2: 20}
        await cluster.brokers.pop(3).stop()
        await cluster.start_broker(4)
        assert await offsets.committed() == {0: 7, 1: 10, 2: 20}


async def test_a_restored_state_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    async with run_cluster(tmp_path) as cluster:
        offsets = Offsets(cluster)
        await offsets.commit(0, 5)
        await cluster.brokers.pop(1).stop()
        gone = state_key(StateKey(CONSUMER_OFFSETS, offsets.identity.partition, 1, 200_000, 9))
        log = replace(offsets.log, ledgers=(), log_start_offset=9, restored_from=gone)
        assert isinstance(log, Log)
        await cluster.metadata.propose(Command(updates=(Put(record=log),)))
        await until(cluster.metadata, lambda: offsets.log.restored_from != "", WAIT_S)
        broker = (await cluster.start_broker(2)).server
        async with asyncio.timeout(60):
            while broker.partitions.takeover_metrics.takeover_failures < 2:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.05)
        assert not broker.partitions.is_serving(offsets.identity)
