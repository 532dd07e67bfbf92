"""Handing partitions over while clients go on: nothing fails, nothing is written twice, nothing is left to recover."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from unit.broker.hand_fed_view import HandFedView
from unit.broker.handlers.test_round_trip import consume
from unit.broker.mini_cluster import WAIT_S, MiniCluster, in_thread, run_cluster, until_served
from unit.metadata.watching import until

from stratalog_broker.partitions.handover import Owned
from stratalog_core.errors import OutcomeUnknown
from stratalog_metadata.records import (
    DrainedBroker,
    Ledger,
    LedgerState,
    Partition,
    drained_broker_key,
    partition_key,
)
from stratalog_metadata.state.commands import Applied, Command, Delete, Put

PARTITIONS = 6


class Producing:
    """A producer without idempotence, in a thread, until it is told to stop: a batch sent twice would be seen."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.delivered: list[bytes] = []
        self.failures: list[Any] = []
        self._stop = threading.Event()
        self._progress = threading.Event()
        self._done = asyncio.ensure_future(in_thread(lambda: self._run(bootstrap, topic)))

    def _run(self, bootstrap: str, topic: str) -> None:
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": False, "linger.ms": 1}
        )
        number = 0
        while not self._stop.is_set():
            producer.produce(topic, str(number).encode(), partition=number % PARTITIONS, on_delivery=self._delivered)
            producer.poll(0.002)
            number += 1
        assert producer.flush(60) == 0

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.failures.append(error)
        else:
            self.delivered.append(message.value())
        self._progress.set()

    async def some_more(self, count: int = 100) -> None:
        """Wait until so many more were delivered."""
        wanted = len(self.delivered) + count

        def wait() -> None:
            while len(self.delivered) < wanted and not self._done.done():
                self._progress.wait(1)
                self._progress.clear()

        await in_thread(wait)

    async def stop(self) -> None:
        self._stop.set()
        await self._done
        assert self.failures == []


def create_topic(cluster: MiniCluster, topic: str, replicas: int) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    (created,) = admin.create_topics([NewTopic(topic, PARTITIONS, replicas)]).values()
    created.result(60)


def owners(cluster: MiniCluster) -> Callable[[], set[int]]:
    return lambda: {partition.owner for partition in cluster.metadata.view.all(Partition)}


async def check(cluster: MiniCluster, producing: Producing, bootstrap: str) -> None:
    """Exactly what was delivered is there."""
    found = await in_thread(lambda: consume(bootstrap, "flights", len(producing.delivered)))
    assert sorted(message.value() or b"" for message in found) == sorted(producing.delivered)
    ends = sum(log.core.high_watermark for broker in cluster.brokers.values() for log in broker.server.partitions.all()
               if log.topic.name == "flights")  # fmt: skip
    assert ends == len(producing.delivered), "nothing is there twice"


async def test_a_broker_is_drained_and_put_back_under_a_running_producer(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, bookies=1, brokers=2) as cluster:
        await in_thread(lambda: create_topic(cluster, "flights", 1))
        producing = Producing(cluster.bootstrap, "flights")
        await producing.some_more()
        await cluster.metadata.propose(Command(updates=(Put(record=DrainedBroker(broker_id=1)),)))
        await until(cluster.metadata, lambda: owners(cluster)() == {2}, WAIT_S)
        await producing.some_more()
        await cluster.metadata.propose(
            Command(updates=(Delete(key=drained_broker_key(1)), Put(record=DrainedBroker(broker_id=2))))
        )
        await until(cluster.metadata, lambda: owners(cluster)() == {1}, WAIT_S)
        await producing.some_more()
        await producing.stop()
        await check(cluster, producing, cluster.bootstrap)


@pytest.mark.parametrize("takes_effect", [True, False])
async def test_quiet_partitions_share_a_command_and_go_one_by_one_if_it_is_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_effect: bool
) -> None:
    async with run_cluster(tmp_path, bookies=1, brokers=2) as cluster:
        await in_thread(lambda: create_topic(cluster, "flights", 1))
        leaving, metadata = cluster.brokers[1].server, cluster.brokers[1].server.metadata
        before = list(cluster.metadata.view.all(Partition))
        mine = [partition for partition in before if partition.owner == 1]
        for partition in mine:
            await until_served(leaving, partition.topic_id, partition.index)
        handed: list[int] = []
        propose, all_were_proposed = metadata.propose, asyncio.Event()

        async def first_is_not_answered(command: Command, timeout_s: float = 10.0) -> Applied:
            partitions = [each for each in command.updates if isinstance(each, Put) and isinstance(each.record, Partition)]
            if partitions:
                handed.append(len(partitions))
            if len(handed) == 1 + len(mine):
                all_were_proposed.set()
            if len(handed) == 1 and partitions:
                if takes_effect:
                    await propose(command, timeout_s)
                raise OutcomeUnknown
            return await propose(command, timeout_s)

        monkeypatch.setattr(metadata, "propose", first_is_not_answered)
        await cluster.metadata.propose(Command(updates=(Put(record=DrainedBroker(broker_id=1)),)))
        async with asyncio.timeout(WAIT_S):
            await all_were_proposed.wait()
        await until(cluster.metadata, lambda: owners(cluster)() == {2}, WAIT_S)
        assert handed == [len(mine)] + [1] * len(mine)
        for was, now in zip(before, cluster.metadata.view.all(Partition), strict=True):
            assert now.leader_epoch == was.leader_epoch + (was.owner == 1), "handed over once"


async def test_a_broker_that_stops_hands_over_first(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, bookies=1, brokers=2, shutdown_ms=60_000) as cluster:
        await in_thread(lambda: create_topic(cluster, "flights", 1))
        producing = Producing(cluster.bootstrap, "flights")
        await producing.some_more()
        stopping = cluster.brokers.pop(1)
        epochs = {partition.key(): partition for partition in cluster.metadata.view.all(Partition)}
        await stopping.stop()
        assert owners(cluster)() == {2}
        for partition in cluster.metadata.view.all(Partition):
            moved = epochs[partition.key()].owner == 1
            assert partition.leader_epoch == epochs[partition.key()].leader_epoch + moved, "handed over once, and no failover"
        await producing.some_more()
        await producing.stop()
        await check(cluster, producing, cluster.bootstrap)


async def test_the_last_broker_stops_without_waiting_and_leaves_sealed_ledgers(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, bookies=1, brokers=1, shutdown_ms=60_000) as cluster:
        await in_thread(lambda: create_topic(cluster, "flights", 1))
        producing = Producing(cluster.bootstrap, "flights")
        await producing.some_more()
        await producing.stop()
        async with asyncio.timeout(50):
            await cluster.brokers.pop(1).stop()
        assert {ledger.state for ledger in cluster.metadata.view.all(Ledger)} == {LedgerState.CLOSED}


def test_what_a_broker_owns_is_followed_change_by_change() -> None:
    """It was looked for among all partitions at each change: one that stopped with 5,000 looked for five seconds."""
    topic_id = UUID(int=1)
    view = HandFedView()
    view.put(*(Partition(topic_id=topic_id, index=index, owner=index % 2) for index in range(100)))
    owned = Owned(view, 1)
    view.subscribe(owned.follow)
    assert len(owned.keys) == 50
    view.put(Partition(topic_id=topic_id, index=1, owner=0), Partition(topic_id=topic_id, index=2, owner=1))
    view.remove(partition_key(topic_id, 3))
    assert owned.keys == {one.key() for one in view.all(Partition) if one.owner == 1}
    assert owned.changed.is_set()
