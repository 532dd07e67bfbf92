"""Applications of internal topics are loaded one at a time; one that is not served in the end has resigned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from support.replayed import replayed
from unit.broker.mini_cluster import WAIT_S
from unit.broker.partitions.test_internal_topics import GROUP, offsets_of_one_broker, restart

from stratalog_broker.coordination.coordinator_partition import CoordinatorPartition
from stratalog_broker.coordination.groups.application import GroupApplication
from stratalog_broker.coordination.groups.core.offset_rows import Commit
from stratalog_broker.partitions import failed_takeovers, ownership
from stratalog_broker.partitions.core import PartitionCore
from stratalog_broker.partitions.internal_topics import CONSUMER_OFFSETS, Applications, InternalTopicApplication
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core.errors import Corrupt, Fenced
from stratalog_core.ports import Buffer
from stratalog_metadata.records import Partition

BATCHES = (b"1", b"2", b"3")


class Loaded:
    """An application whose load waits for ``go_on`` before each batch."""

    def __init__(self, go_on: asyncio.Event) -> None:
        self.go_on = go_on
        self.batches: list[Buffer] = []
        self.leader_epoch = -1
        self.has_resigned = False

    async def load(self, state: bytes | None, batches: AsyncIterable[Buffer], leader_epoch: int) -> None:
        self.leader_epoch = leader_epoch
        async for batch in batches:
            await self.go_on.wait()
            if batch == b"damaged":
                raise Corrupt
            self.batches.append(batch)

    def apply(self, batch: Buffer) -> None:
        raise AssertionError("not served")

    def snapshot(self) -> bytes:
        raise AssertionError("not served")

    def resigned(self) -> None:
        self.has_resigned = True


class Loading:
    """Loads partitions of one internal topic; ``lost`` has the indexes of those that are not due any more."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.made: dict[int, Loaded] = {}
        self.lost: set[int] = set()
        self.applications = Applications()
        self.applications.register(CONSUMER_OFFSETS, self._make)

    def _make(self, index: int) -> InternalTopicApplication:
        self.made[index] = Loaded(self.go_on)
        return self.made[index]

    def start(self, index: int, batches: Iterable[Buffer] = BATCHES) -> asyncio.Task[InternalTopicApplication | None]:
        partition = Partition(topic_id=UUID(int=1), index=index, owner=1, leader_epoch=7)
        load = self.applications.load(CONSUMER_OFFSETS, partition, None, replayed(batches), lambda: index not in self.lost)
        return asyncio.get_running_loop().create_task(load)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_partitions_are_loaded_one_at_a_time() -> None:
    loading = Loading()
    first, second = loading.start(0), loading.start(1)
    await settled()
    assert list(loading.made) == [0]
    loading.go_on.set()
    assert await first is loading.made[0]
    assert await second is loading.made[1]
    assert [made.batches for made in loading.made.values()] == [list(BATCHES)] * 2
    assert loading.made[0].leader_epoch == 7
    assert not any(made.has_resigned for made in loading.made.values())


async def test_a_topic_without_application_is_not_queued() -> None:
    loading = Loading()
    loading.start(0)
    await settled()
    partition = Partition(topic_id=UUID(int=2), index=0, owner=1, leader_epoch=7)
    assert await loading.applications.load("flights", partition, None, replayed(), lambda: True) is None


@pytest.mark.parametrize("batches", [BATCHES, BATCHES[:1]])
async def test_a_partition_that_is_lost_while_it_is_loaded_resigns(batches: Iterable[Buffer]) -> None:
    loading = Loading()
    lost, following = loading.start(0, batches), loading.start(1)
    await settled()
    loading.lost.add(0)
    loading.go_on.set()
    with pytest.raises(Fenced):
        await lost
    assert loading.made[0].has_resigned
    assert loading.made[0].batches == list(BATCHES[:1]), "no batch is replayed for a partition that is lost"
    assert await following is loading.made[1]


async def test_a_partition_that_is_lost_while_it_is_queued_is_not_made() -> None:
    """Making it would replace the coordinator of a topic that was created again with the same name."""
    loading = Loading()
    first, lost = loading.start(0), loading.start(1)
    await settled()
    loading.lost.add(1)
    loading.go_on.set()
    await first
    with pytest.raises(Fenced):
        await lost
    assert list(loading.made) == [0]


async def test_a_load_that_is_cancelled_resigns_and_lets_the_next_begin() -> None:
    loading = Loading()
    cancelled, queued, following = (loading.start(index) for index in range(3))
    await settled()
    for task in (queued, cancelled):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert loading.made[0].has_resigned
    loading.go_on.set()
    assert await following is loading.made[2]
    assert list(loading.made) == [0, 2]


async def test_a_load_that_fails_resigns_and_lets_the_next_begin() -> None:
    loading = Loading()
    failed, following = loading.start(0, (b"1", b"damaged")), loading.start(1)
    loading.go_on.set()
    with pytest.raises(Corrupt):
        await failed
    assert loading.made[0].has_resigned
    assert await following is loading.made[1]


async def test_a_broker_answers_and_may_lose_a_coordinator_that_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    load = CoordinatorPartition.load

    async def load_late(self: CoordinatorPartition[Any, Any], *given: Any) -> None:
        begun.set()
        await go_on.wait()
        await load(self, *given)

    async with offsets_of_one_broker(tmp_path) as (cluster, offsets):
        await offsets.commit(0, 41)
        monkeypatch.setattr(CoordinatorPartition, "load", load_late)
        await restart(cluster)
        groups, partitions = cluster.broker.groups, cluster.broker.partitions
        async with asyncio.timeout(WAIT_S):
            await begun.wait()
            with pytest.raises(KafkaError) as refused:
                groups.coordinator_of(GROUP)
            assert refused.value.code is ErrorCode.coordinator_load_in_progress
            assert groups.is_loading
            partitions.suspend()
            go_on.set()
            while not partitions.takeover_metrics.takeover_failures:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
        assert not list(groups.coordinators())
        partitions.resume()
        await offsets.commit(1, 42)
        assert await offsets.committed() == {0: 41, 1: 42}


async def test_a_coordinator_that_is_not_served_after_its_load_has_resigned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a defect that the core of its partition meets.

    It went on beside the coordinator of the next takeover, and what it wrote from its old state came into that one's log.
    """
    loaded = list[GroupApplication]()
    load = CoordinatorPartition.load

    async def load_and_tell(self: CoordinatorPartition[Any, Any], *given: Any) -> None:
        await load(self, *given)
        if isinstance(self.application, GroupApplication):
            loaded.append(self.application)

    def fail_at_first(**given: Any) -> PartitionCore:
        assert len(loaded) != 1, "a defect"
        return PartitionCore(**given)

    async with offsets_of_one_broker(tmp_path, offsets_topic_partitions=1) as (cluster, offsets):
        await offsets.commit(0, 41)
        monkeypatch.setattr(CoordinatorPartition, "load", load_and_tell)
        monkeypatch.setattr(ownership, "PartitionCore", fail_at_first)
        monkeypatch.setattr(failed_takeovers, "UNEXPECTED_RETRY_S", 0.05)
        await restart(cluster)
        await offsets.commit(1, 42)
        stale, present = loaded
        assert await offsets.coordinator() is present
        with pytest.raises(KafkaError) as refused:
            await stale.commit(GROUP, "", None, -1, [Commit("flights", 0, 7)])
        assert refused.value.code is ErrorCode.not_coordinator
        assert await offsets.committed() == {0: 41, 1: 42}
