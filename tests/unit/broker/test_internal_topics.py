"""Acknowledged commits survive owners that fail between opening a ledger and making its checkpoint durable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster
from unit.metadata.watching import until

from stratalog_bookies.client import LedgerWriter
from stratalog_broker.groups.application import GroupApplication
from stratalog_broker.groups.offset_rows import Commit
from stratalog_broker.groups.routing import partition_of
from stratalog_broker.internal_topics import CONSUMER_OFFSETS
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.takeover import Takeover
from stratalog_core.checkpoint import Checkpoint, encode_checkpoint
from stratalog_core.errors import Corrupt, OutcomeUnknown
from stratalog_core.ids import TopicPartition
from stratalog_metadata.commands import Command, Delete, Put
from stratalog_metadata.records import Ledger, LedgerState, Log, Partition, Topic, log_key, partition_key, topic_key

GROUP = "readers"


class Offsets:
    """Commits of one group, through the coordinator in process."""

    def __init__(self, cluster: MiniCluster) -> None:
        self._cluster = cluster

    @property
    def _topic(self) -> Topic:
        topic = self._cluster.metadata.view.find(Topic, topic_key(CONSUMER_OFFSETS))
        assert topic is not None
        return topic

    @property
    def identity(self) -> TopicPartition:
        return TopicPartition(self._topic.topic_id, partition_of(GROUP, self._topic.partition_count))

    @property
    def log(self) -> Log:
        log = self._cluster.metadata.view.find(Log, log_key(self.identity.topic_id, self.identity.partition))
        assert log is not None
        return log

    @property
    def partition(self) -> Partition:
        partition = self._cluster.metadata.view.find(Partition, partition_key(self.identity.topic_id, self.identity.partition))
        assert partition is not None
        return partition

    async def coordinator(self) -> GroupApplication:
        """The group's coordinator, when some broker serves it."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for broker in self._cluster.brokers.values():
                    try:
                        await broker.server.services.groups.find(GROUP)
                        return broker.server.services.groups.coordinator_of(GROUP)
                    except KafkaError:
                        await asyncio.sleep(0.01)

    async def commit(self, partition: int, offset: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                coordinator = await self.coordinator()
                (error,) = await coordinator.commit(GROUP, "", None, -1, [Commit("flights", partition, offset)])
                if error is ErrorCode.none:
                    return

    async def committed(self) -> dict[int, int]:
        store = (await self.coordinator()).coordinator.store
        return {partition: committed.offset for (_, partition), committed in store.offsets_of(GROUP).items()}

    async def until_trimmed(self) -> None:
        await until(self._cluster.metadata, lambda: len(self.log.ledgers) == 1, WAIT_S)


@asynccontextmanager
async def offsets_of_one_broker(path: Path, **settings: Any) -> AsyncIterator[tuple[MiniCluster, Offsets]]:
    async with run_cluster(path, bookies=3, brokers=1, **settings) as cluster:
        yield cluster, Offsets(cluster)


def fail_openings(cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch, times: int, *, parts: int = 0) -> list[int]:
    """Have the broker's next openings of a ledger take effect without its hearing of it; ids of their ledgers.

    Of a checkpoint of ``parts + 1`` entries all but the last are confirmed in each.
    """
    client, failed = next(iter(cluster.brokers.values())).ledgers, list[int]()
    create = client.create

    async def unheard(*args: Any, **keywords: Any) -> LedgerWriter:
        writer = await create(*args, **keywords)
        if len(failed) == times:
            return writer
        failed.append(writer.ledger.ledger_id)
        if parts:
            state = Checkpoint(offset=writer.ledger.base_offset, application_state=b"unfinished" * 100)
            encoded = encode_checkpoint(state, 1000 // parts)
            assert len(encoded) > parts
            for part in encoded[:parts]:
                writer.append(part)
            while writer.lac < parts - 1:  # noqa: ASYNC110 - the listener is the partition's
                await asyncio.sleep(0.005)
        writer.abandon()
        raise OutcomeUnknown

    monkeypatch.setattr(client, "create", unheard)
    return failed


async def restart(cluster: MiniCluster) -> None:
    """The broker dies, and another one takes everything over."""
    ((broker_id, broker),) = cluster.brokers.items()
    del cluster.brokers[broker_id]
    await broker.kill()
    await cluster.start_broker(broker_id + 1)


@pytest.mark.parametrize("parts", [0, 1, 2])
async def test_commits_survive_openings_that_fail_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    async with offsets_of_one_broker(tmp_path) as (cluster, offsets):
        await offsets.commit(0, 41)
        await restart(cluster)
        await offsets.coordinator()
        failed = fail_openings(cluster, monkeypatch, 3, parts=parts)
        await offsets.commit(1, 42)
        assert len(failed) == 3
        assert await offsets.committed() == {0: 41, 1: 42}
        await offsets.until_trimmed()
        await restart(cluster)
        assert await offsets.committed() == {0: 41, 1: 42}


async def test_older_ledgers_go_when_the_next_checkpoint_is_durable_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with offsets_of_one_broker(tmp_path, checkpoint_part_bytes=1024) as (cluster, offsets):
        for number in range(40):
            await offsets.commit(number, number)
        before = [ref.ledger_id for ref in offsets.log.ledgers]
        await restart(cluster)
        await offsets.coordinator()
        failed = fail_openings(cluster, monkeypatch, 1)
        (kept,) = before
        seen: list[list[int]] = []
        unsubscribe = cluster.metadata.view.subscribe(lambda _: seen.append([ref.ledger_id for ref in offsets.log.ledgers]))
        await offsets.commit(40, 40)
        await offsets.until_trimmed()
        unsubscribe()
        (last,) = [ref.ledger_id for ref in offsets.log.ledgers]
        assert [kept, *failed, last] in seen, "everything is there until the last ledger has its checkpoint"
        assert offsets.log.log_start_offset == offsets.log.ledgers[0].base_offset == 40
        log = cluster.broker.services.partitions.find(offsets.identity)
        assert log is not None
        async with asyncio.timeout(WAIT_S):
            while log.core.log_start_offset != 40:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)
        await restart(cluster)
        assert await offsets.committed() == {number: number for number in range(41)}


async def test_a_log_that_begins_above_0_without_a_checkpoint_is_corrupt(tmp_path: Path) -> None:
    async with offsets_of_one_broker(tmp_path) as (cluster, offsets):
        await offsets.commit(0, 41)
        await cluster.brokers.pop(1).stop()
        (ref,) = offsets.log.ledgers
        ledger = next(each for each in cluster.metadata.view.all(Ledger) if each.ledger_id == ref.ledger_id)
        assert ledger.state is LedgerState.CLOSED
        gone = msgspec.structs.replace(offsets.log, ledgers=(), log_start_offset=ledger.end_offset)
        await cluster.metadata.propose(Command(updates=(Put(record=gone), Delete(key=ledger.key()))))
        broker = (await cluster.start_broker(2)).server
        takeover = Takeover(broker.services, broker.services.partitions.indexes)
        with pytest.raises(Corrupt, match="begins at offset 1 and has no complete checkpoint"):
            await takeover.rebuild(offsets.partition, {}, wants_batches=True)
        assert not broker.services.partitions.is_serving(offsets.identity)
