"""Many partitions: ten thousand made in one call, and a failover that asks little more for a thousand than for a hundred."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster

from stratalog_bookies.client import Recovered
from stratalog_bookies.protocol import messages as bookie_messages
from stratalog_broker.partitions import takeover_slots
from stratalog_broker.partitions.takeover import Takeover
from stratalog_core.errors import StratalogError
from stratalog_core.ports import Buffer, OnReply
from stratalog_core.rpc.tcp import TcpChannel
from stratalog_metadata.protocol import messages as metadata_messages
from stratalog_metadata.records import Partition, Topic

MANY = 10_000
WAIT_S = 120.0
LEASE_MS = 60_000
"""Everything shares one loop here; who dies is noticed by its connections."""


def create(bootstrap: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (created,) = admin.create_topics([NewTopic("flights", partitions, 1)], operation_timeout=60, request_timeout=60).values()
    created.result(90)


def produce_one_each(bootstrap: str, partitions: Sequence[int]) -> int:
    """Delivered records."""
    failures: list[object] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 5})
    for partition in partitions:
        producer.produce("flights", b"x", partition=partition, on_delivery=lambda error, _: failures.append(error))
        producer.poll(0)
    assert producer.flush(90) == 0
    assert set(failures) <= {None}
    return len(failures)


async def until_taken(cluster: MiniCluster, broker_id: int, count: int) -> None:
    partitions = cluster.brokers[broker_id].server.partitions
    async with asyncio.timeout(WAIT_S):
        while sum(log.topic.name == "flights" for log in partitions.all()) < count:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)


async def test_ten_thousand_partitions_are_created_in_one_call(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, bookies=1, brokers=1, lease_ms=LEASE_MS) as cluster:
        bootstrap = cluster.bootstrap
        await in_thread(lambda: create(bootstrap, MANY))
        assert sum(partition.owner == 1 for partition in cluster.metadata.view.all(Partition)) == MANY
        some = range(0, MANY, MANY // 50)
        assert await in_thread(lambda: produce_one_each(bootstrap, some)) == len(some)


async def test_takeovers_that_wait_for_a_place_end_with_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They went on, and were refused one by one: in a cluster that is short of time, what ended one session ended the next."""
    partition_count, at_once = 60, 8
    monkeypatch.setattr(takeover_slots, "TAKEOVERS_AT_ONCE", at_once)
    begun: list[Partition] = []
    recover, go_on = Takeover.recover, asyncio.Event()

    async def counting(takeover: Takeover, partition: Partition, topic: Topic) -> Mapping[int, Recovered]:
        begun.append(partition)
        await go_on.wait()
        return await recover(takeover, partition, topic)

    async with run_cluster(tmp_path, bookies=1, brokers=1, lease_ms=LEASE_MS) as cluster:
        bootstrap = cluster.bootstrap
        await in_thread(lambda: create(bootstrap, partition_count))
        await until_taken(cluster, 1, partition_count)
        partitions = cluster.brokers[1].server.partitions
        monkeypatch.setattr(Takeover, "recover", counting)
        partitions.suspend()
        partitions.resume()
        while not begun:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)
        partitions.suspend()
        go_on.set()
        async with asyncio.timeout(WAIT_S):
            while partitions._tasks:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0)
        assert len(begun) == at_once
        partitions.resume()
        await until_taken(cluster, 1, partition_count)


class Counted:
    """Counts what this process's channels send: requests by method, commands and their bytes, bytes of watch notifications."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: Counter[int] = Counter()
        self.commands: list[bytes] = []
        self.news_bytes = 0
        send = TcpChannel.send

        def counting(channel: TcpChannel, method: int, parts: Sequence[Buffer], on_reply: OnReply, timeout_s: float) -> None:
            self.sent[method] += 1
            if method == metadata_messages.PROPOSE:
                request = metadata_messages.decode(b"".join(parts), metadata_messages.ProposeRequest)
                self.commands += request.commands
            elif method == metadata_messages.WATCH:
                on_reply = partial(self._news, on_reply)
            send(channel, method, parts, on_reply, timeout_s)

        monkeypatch.setattr(TcpChannel, "send", counting)

    def _news(self, on_reply: OnReply, answer: memoryview | StratalogError) -> None:
        self.news_bytes += 0 if isinstance(answer, StratalogError) else len(answer)
        on_reply(answer)


async def failover(path: Path, partitions: int, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Return what a failover of so many partitions sends, each with an open ledger.

    Balancing is off: on a slow machine it would move partitions to the second broker before the first one is killed.
    """
    async with run_cluster(path, bookies=1, brokers=1, balance_interval_s=0, lease_ms=LEASE_MS) as cluster:
        bootstrap = cluster.bootstrap
        await in_thread(lambda: create(bootstrap, partitions))
        await in_thread(lambda: produce_one_each(bootstrap, range(partitions)))
        await cluster.start_broker(2, lease_ms=LEASE_MS)
        with monkeypatch.context() as patched:
            counted = Counted(patched)
            await cluster.brokers.pop(1).kill()
            await until_taken(cluster, 2, partitions)
        return counted


@pytest.mark.alone
async def test_a_failover_asks_hardly_more_for_ten_times_the_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = await failover(tmp_path / "few", 100, monkeypatch)
    partitions = 1000
    many = await failover(tmp_path / "many", partitions, monkeypatch)
    for method in (
        metadata_messages.PROPOSE, bookie_messages.FENCE, bookie_messages.READ_HEADERS, bookie_messages.READ
    ):  # fmt: skip
        assert few.sent[method] > 0
        assert many.sent[method] <= 4 * few.sent[method] + 20, (hex(method), few.sent, many.sent)
    assert few.sent[metadata_messages.READ] <= 1, "the view has every record that the old owner left"
    assert many.sent[metadata_messages.READ] <= 1
    # Of a partition the quorum takes the record that closes its ledger, and tells that and the new owner: many in one command.
    assert len(many.commands) <= partitions / 20
    assert sum(map(len, many.commands)) <= 500 * partitions
    assert many.news_bytes <= 750 * partitions
