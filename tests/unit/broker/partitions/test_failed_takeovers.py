"""Takeovers that fail are repeated after pauses that grow, and those that wait for the object store delay no others."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster, until_served
from unit.broker.raw_client import RawClient, batch, produce
from unit.broker.reads.test_cold_reads import create, make_cold

from stratalog_broker.partitions import failed_takeovers, takeover_slots
from stratalog_broker.partitions.failed_takeovers import RETRY_MAX_S, RETRY_S
from stratalog_broker.partitions.takeover import Takeover
from stratalog_core.errors import Refused
from stratalog_metadata.records import Partition, partition_key
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.reader import ColdReader

PARTITIONS = 4


class Refusing:
    """Takeovers of one topic are refused until ``count`` were, as by a store whose credentials have expired."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, topic_id: object, count: int) -> None:
        self.times_s: list[float] = []
        rebuild = Takeover.rebuild

        async def refuse(takeover: Takeover, partition: Partition, *given: Any, **named: Any) -> Any:
            if partition.topic_id == topic_id and len(self.times_s) < count:
                self.times_s.append(asyncio.get_running_loop().time())
                raise Refused(f"403, request {len(self.times_s)}")
            return await rebuild(takeover, partition, *given, **named)

        monkeypatch.setattr(Takeover, "rebuild", refuse)


async def until_refused(refusing: Refusing, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(refusing.times_s) < count:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)


def take_over_all_again(cluster: MiniCluster) -> None:
    cluster.broker.partitions.suspend()
    cluster.broker.partitions.resume()


async def test_pauses_double_and_the_failure_is_logged_once(
    mini_cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic_id = await create(mini_cluster, "refused")
    retry_s = 0.02
    monkeypatch.setattr(failed_takeovers, "RETRY_S", retry_s)
    refusing = Refusing(monkeypatch, topic_id, 5)
    caplog.set_level(logging.WARNING)
    take_over_all_again(mini_cluster)
    await until_served(mini_cluster.broker, topic_id)
    pauses_s = [later - earlier for earlier, later in zip(refusing.times_s, refusing.times_s[1:], strict=False)]
    assert len(pauses_s) == 4
    assert all(pause_s >= retry_s * 2**number * 0.9 for number, pause_s in enumerate(pauses_s))
    assert [record.getMessage() for record in caplog.records if "request" in record.getMessage()] == [
        f"taking over {topic_id}-0 at epoch 1, attempt 1: 403, request 1"
    ]
    assert mini_cluster.broker.partitions.takeover_metrics.takeover_failures == 5
    assert RETRY_S < RETRY_MAX_S


async def test_a_new_epoch_and_a_new_session_end_the_pause(mini_cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic_id = await create(mini_cluster, "refused")
    monkeypatch.setattr(failed_takeovers, "RETRY_S", WAIT_S * 10)
    monkeypatch.setattr(failed_takeovers, "RETRY_MAX_S", WAIT_S * 10)
    refusing = Refusing(monkeypatch, topic_id, 2)
    take_over_all_again(mini_cluster)
    await until_refused(refusing, 1)
    partition = mini_cluster.broker.metadata.view.find(Partition, partition_key(topic_id, 0))
    assert partition is not None
    await mini_cluster.metadata.propose(
        Command(updates=(Put(record=replace(partition, leader_epoch=partition.leader_epoch + 1)),))
    )
    await until_refused(refusing, 2)
    take_over_all_again(mini_cluster)
    await until_served(mini_cluster.broker, topic_id)


async def test_takeovers_that_wait_for_the_store_do_not_delay_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover_slots, "TAKEOVERS_AT_ONCE", 1)
    async with run_cluster(tmp_path, bookies=1) as cluster:
        await cluster.start_tiering()
        client = await cluster.connect()
        cold_id, hot_id = await create(cluster, "cold", PARTITIONS), await create(cluster, "hot", PARTITIONS)
        for topic in ("cold", "hot"):
            for partition in range(PARTITIONS):
                assert (await produce(client, topic, batch(b"first"), partition=partition)).error_code == 0
        await make_cold(cluster, cold_id, PARTITIONS)
        answers, leader_epochs = asyncio.Event(), ColdReader.leader_epochs

        async def late(reader: ColdReader, *given: Any) -> Any:
            await answers.wait()
            return await leader_epochs(reader, *given)

        monkeypatch.setattr(ColdReader, "leader_epochs", late)
        partitions = cluster.broker.partitions
        take_over_all_again(cluster)
        for partition in range(PARTITIONS):
            async with asyncio.timeout(30):
                await until_served(cluster.broker, hot_id, partition)
        assert not any(partitions.find_by_id(cold_id.bytes, partition) for partition in range(PARTITIONS))
        answers.set()
        for partition in range(PARTITIONS):
            await until_served(cluster.broker, cold_id, partition)


async def test_a_partition_without_ledgers_is_handed_over_while_the_store_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state was dropped beyond 512 bytes, and the next owner could not serve it before the store answered."""
    producers = 40
    async with run_cluster(tmp_path, bookies=1, balance_interval_s=3600.0) as cluster:
        await cluster.start_tiering()
        client = await cluster.connect()
        topic_id = await create(cluster, "cold")
        batches = [batch(b"once", producer_id=number, producer_epoch=0, base_sequence=0) for number in range(producers)]
        for number, records in enumerate(batches):
            assert (await produce(client, "cold", records)).base_offset == number
        await make_cold(cluster, topic_id)
        following = (await cluster.start_broker(2)).server

        async def no_answer(*given: Any) -> Any:
            await asyncio.Event().wait()

        monkeypatch.setattr(ColdReader, "leader_epochs", no_answer)
        partition = cluster.metadata.view.find(Partition, partition_key(topic_id, 0))
        assert partition is not None
        await cluster.metadata.propose(Command(updates=(Put(record=replace(partition, next_owner=2)),)))
        async with asyncio.timeout(30):
            await until_served(following, topic_id)
        client = await RawClient.connect(following.kafka_address)
        for number, records in enumerate(batches):
            assert (await produce(client, "cold", records)).base_offset == number, "a retry is recognised"
        await client.close()
