"""A client with a rack reads history from a broker in its rack, and everything else from the owner (KIP-392)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import confluent_kafka
import pytest
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import WAIT_S, MiniCluster, in_thread, run_cluster
from unit.broker.network.test_authorization import Denying
from unit.broker.raw_client import RawClient, batch, fetch, fetch_request, produce
from unit.broker.reads.test_cold_reads import create, make_cold
from unit.broker.transactional import COMMITTED, TransactionalHistory, committed

from stratalog_broker.admin.record_deletion import delete_records
from stratalog_broker.admin.topics import NewTopic
from stratalog_broker.network.server import BrokerServer
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.protocol.entities import encode_response as encode_entity
from stratalog_broker.requests.access import AccessRules, Resource
from stratalog_core.batches.batch import iterate_headers
from stratalog_core.batches.batch_run import BatchRun
from stratalog_core.batches.records import iterate_records
from stratalog_core.errors import Unavailable
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Partition, partition_key

TOPIC = "flights"
OWNER, REPLICA = 1, 2
RECORDS = 20
NOT_LEADER = ErrorCode.not_leader_or_follower


@dataclass(slots=True, kw_only=True)
class Replicated:
    """A topic whose first ``RECORDS`` records are only in the object store; broker 1 in rack ``a`` owns it, 2 is in ``b``."""

    cluster: MiniCluster
    topic_id: UUID
    owner: RawClient
    replica: RawClient
    values: list[bytes]

    @property
    def epoch(self) -> int:
        partition = self.cluster.metadata.view.find(Partition, partition_key(self.topic_id, 0))
        assert partition is not None
        assert partition.owner == OWNER
        return partition.leader_epoch

    async def ask(self, client: RawClient, offset: int, *, rack: str = "b", **options: Any) -> Any:
        """Fetch until the read that the fetch began has found something."""
        if "leader_epoch" not in options:
            options["leader_epoch"] = self.epoch
        async with asyncio.timeout(WAIT_S):
            while True:
                found = await fetch(client, TOPIC, offset, rack=rack, max_wait_ms=500, **options)
                if found.error_code is not ErrorCode.none or found.records or found.preferred_read_replica >= 0:
                    return found


def server(cluster: MiniCluster, broker_id: int) -> BrokerServer:
    return cluster.brokers[broker_id].server


async def connect(cluster: MiniCluster, broker_id: int) -> RawClient:
    client = await RawClient.connect(server(cluster, broker_id).kafka_address)
    cluster.stack.push_async_callback(client.close)
    return client


async def until_seen(cluster: MiniCluster, topic_id: UUID) -> None:
    """Wait until the views of all brokers have what the cluster's has."""
    for running in cluster.brokers.values():
        await running.metadata.refresh()


@asynccontextmanager
async def replicated(tmp_path: Path, **second: Any) -> AsyncIterator[Replicated]:
    async with run_cluster(tmp_path, bookies=2, rack="a", balance_interval_s=3600.0) as cluster:
        await cluster.start_tiering()
        topic_id = await create(cluster, TOPIC, segment_bytes=65_536, replication_factor=2)
        owner = await cluster.connect()
        values = [str(number).encode() * 100 for number in range(RECORDS)]
        for value in values:
            await produce(owner, TOPIC, batch(value))
        await make_cold(cluster, topic_id)
        await cluster.start_broker(REPLICA, **{"rack": "b", **second})
        await until_seen(cluster, topic_id)
        yield Replicated(
            cluster=cluster, topic_id=topic_id, owner=owner, replica=await connect(cluster, REPLICA), values=values
        )  # fmt: skip


def values_of(found: Any) -> list[bytes | None]:
    records = found.records or b""
    return [
        record.value
        for position, header in iterate_headers(records)
        for record in iterate_records(records[position : position + header.size_bytes])
    ]


async def test_history_comes_from_the_replica_and_the_rest_from_the_owner(tmp_path: Path) -> None:
    async with replicated(tmp_path) as topic:
        sent = await topic.ask(topic.owner, 0)
        assert (sent.error_code, sent.preferred_read_replica, sent.records) == (ErrorCode.none, REPLICA, b"")
        assert (sent.high_watermark, sent.log_start_offset) == (RECORDS, 0)
        read: list[bytes | None] = []
        while len(read) < RECORDS:
            found = await topic.ask(topic.replica, len(read), max_bytes=700)
            assert found.error_code is ErrorCode.none
            assert (found.high_watermark, found.last_stable_offset, found.log_start_offset) == (RECORDS, RECORDS, 0)
            read += values_of(found)
        assert read == topic.values
        await produce(topic.owner, TOPIC, batch(b"hot"))
        past = await topic.ask(topic.replica, RECORDS)
        assert past.error_code is NOT_LEADER
        back = await topic.ask(topic.owner, RECORDS)
        assert (back.preferred_read_replica, values_of(back)) == (-1, [b"hot"])
        owner, replica = (server(topic.cluster, broker)._replica_reads.metrics for broker in (OWNER, REPLICA))
        assert (owner.redirects, owner.returns, owner.out_bytes) == (1, 0, 0)
        assert (replica.redirects, replica.returns) == (0, 1)
        assert replica.out_bytes > sum(map(len, topic.values))


@pytest.mark.parametrize(
    "options",
    [{"rack": ""}, {"rack": "a"}, {"rack": "unknown"}, {"leader_epoch": -1}],
    ids=["no rack", "the owner's rack", "a rack without brokers", "no epoch"],
)
async def test_others_read_everything_from_the_owner(tmp_path: Path, options: dict[str, Any]) -> None:
    async with replicated(tmp_path) as topic:
        found = await topic.ask(topic.owner, 0, **options)
        assert (found.preferred_read_replica, values_of(found)[:1]) == (-1, topic.values[:1])
        if options != {"rack": "a"} and options != {"rack": "unknown"}:
            assert (await topic.ask(topic.replica, 0, **options)).error_code is NOT_LEADER


async def test_a_broker_that_stops_gets_no_more_readers(tmp_path: Path) -> None:
    async with replicated(tmp_path) as topic:
        await topic.cluster.brokers.pop(REPLICA).stop()
        await until_seen(topic.cluster, topic.topic_id)
        found = await topic.ask(topic.owner, 0)
        assert (found.preferred_read_replica, values_of(found)[:1]) == (-1, topic.values[:1])


async def test_another_epoch_is_refused_as_a_follower_of_kafka_refuses_it(tmp_path: Path) -> None:
    async with replicated(tmp_path) as topic:
        older = await topic.ask(topic.replica, 0, leader_epoch=topic.epoch - 1) if topic.epoch else None
        assert older is None or older.error_code is ErrorCode.fenced_leader_epoch
        newer = await topic.ask(topic.replica, 0, leader_epoch=topic.epoch + 1)
        assert newer.error_code is ErrorCode.unknown_leader_epoch


async def test_what_is_deleted_is_not_served(tmp_path: Path) -> None:
    async with replicated(tmp_path) as topic:
        assert values_of(await topic.ask(topic.replica, 0, max_bytes=100)) == topic.values[:1]
        owner = server(topic.cluster, OWNER)
        assert await delete_records(
            owner.metadata, owner.partitions, owner.partitions.cold, owner.clock, TOPIC, 0, 7, WAIT_S
        ) == 7  # fmt: skip
        await until_seen(topic.cluster, topic.topic_id)
        assert (await topic.ask(topic.replica, 6)).error_code is NOT_LEADER, "only the owner says what is out of range"
        assert (await topic.ask(topic.owner, 6)).error_code is ErrorCode.offset_out_of_range
        found = await topic.ask(topic.replica, 7, max_bytes=100)
        assert (values_of(found), found.log_start_offset) == (topic.values[7:8], 7)


async def test_a_deleted_topic_is_not_served(tmp_path: Path) -> None:
    async with replicated(tmp_path) as topic:
        assert values_of(await topic.ask(topic.replica, 0, max_bytes=100)) == topic.values[:1]
        epoch = topic.epoch
        await topic.cluster.broker.topic_commands.delete(TOPIC, WAIT_S)
        await until_seen(topic.cluster, topic.topic_id)
        found = await topic.ask(topic.replica, 0, leader_epoch=epoch)
        assert found.error_code is ErrorCode.unknown_topic_or_partition


async def test_a_broker_whose_view_cannot_be_refreshed_refuses(tmp_path: Path) -> None:
    async with replicated(tmp_path) as topic:
        replica = server(topic.cluster, REPLICA)._replica_reads
        metadata, replica._metadata = replica._metadata, Unreachable()  # type: ignore[assignment]
        found = await topic.ask(topic.replica, 0)
        assert (found.error_code, found.records or b"") == (NOT_LEADER, b"")
        replica._metadata = metadata
        assert values_of(await topic.ask(topic.replica, 0, max_bytes=100)) == topic.values[:1]


class Unreachable:
    """A metadata quorum that does not answer."""

    async def refresh(self) -> int:
        raise Unavailable("no node answers")


@pytest.mark.parametrize("is_refreshed", [True, False])
async def test_changes_of_another_partition_are_seen_while_the_view_is_refreshed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_refreshed: bool
) -> None:
    """The fetch waited for the next change, up to its maximum wait."""
    async with replicated(tmp_path) as topic:
        replica = server(topic.cluster, REPLICA)
        created = await replica.topic_commands.create(NewTopic(name="owned", partition_count=8), WAIT_S)
        owned: list[PartitionLog] = []
        async with asyncio.timeout(WAIT_S):
            while not owned:
                await asyncio.sleep(0.01)
                owned = [log for log in replica.partitions.all() if log.topic_partition.topic_id == created.topic_id]
        index = owned[0].topic_partition.partition
        owned[0].is_releasing = not is_refreshed

        async def fail(*arguments: object) -> BatchRun:
            raise Unavailable("later")

        monkeypatch.setattr(replica.reader, "read", fail)
        reads = replica._replica_reads
        slow = SlowRefresh(reads._metadata if is_refreshed else Unreachable())
        monkeypatch.setattr(reads, "_metadata", slow)
        request = fetch_request(TOPIC, 0, rack="b", leader_epoch=topic.epoch, max_wait_ms=600_000)
        (history,) = request.topics
        (wanted,) = fetch_request("owned", 0, partition=index).topics
        topic.replica.send(1, 11, encode_entity(replace(request, topics=(history, wanted))))
        await slow.has_begun.wait()
        assert (await produce(await connect(topic.cluster, REPLICA), "owned", batch(b"new"), partition=index)).error_code == 0
        owned[0].is_releasing = False
        slow.may_end.set()
        async with asyncio.timeout(30):
            answer = await topic.replica.receive()
        assert [values_of(row) for one in answer.responses for row in one.partitions] == [[], [b"new"]]


class SlowRefresh:
    """A metadata client whose refresh ends when it may."""

    def __init__(self, metadata: MetadataClient | Unreachable) -> None:
        self._metadata = metadata
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def refresh(self) -> int:
        self.has_begun.set()
        await self.may_end.wait()
        return await self._metadata.refresh()


async def test_a_broker_without_a_session_refuses(tmp_path: Path) -> None:
    async with replicated(tmp_path) as topic:
        server(topic.cluster, REPLICA).partitions.suspend()
        assert (await topic.ask(topic.replica, 0)).error_code is NOT_LEADER


@pytest.mark.parametrize("seed", range(2))
async def test_a_replica_reports_aborted_transactions(tmp_path: Path, seed: int) -> None:
    async with run_cluster(tmp_path, bookies=2, rack="a", balance_interval_s=3600.0) as cluster:
        await cluster.start_tiering()
        topic_id = await create(cluster, TOPIC, segment_bytes=65_536, replication_factor=2)
        owner = await cluster.connect()
        history = TransactionalHistory(TOPIC, Random(seed))
        for _ in range(60):
            await history.step(cluster, owner)
        await history.end_all(owner)
        await make_cold(cluster, topic_id)
        await cluster.start_broker(REPLICA, rack="b")
        await until_seen(cluster, topic_id)
        topic = Replicated(
            cluster=cluster, topic_id=topic_id, owner=owner, replica=await connect(cluster, REPLICA), values=[]
        )  # fmt: skip
        read: list[tuple[int, bytes | None]] = []
        offset = 0
        while True:
            found = await topic.ask(topic.replica, offset, isolation_level=COMMITTED, max_bytes=600)
            if found.error_code is NOT_LEADER:
                break
            batches = bytes(found.records)
            aborted = [(one.producer_id, one.first_offset) for one in found.aborted_transactions]
            read += [(record.offset, record.value) for record in committed(batches, aborted, offset)]
            offset = [header for _, header in iterate_headers(batches)][-1].next_offset
        assert offset == server(cluster, OWNER).partitions.find_by_name(TOPIC.encode(), 0).core.high_watermark  # type: ignore[union-attr]
        assert read == history.committed


async def test_an_incremental_session_repeats_the_replica(tmp_path: Path) -> None:
    async with replicated(tmp_path) as topic:
        first = fetch_request(TOPIC, 0, rack="b", leader_epoch=topic.epoch, session=(0, 0), max_wait_ms=500)
        opened = await topic.owner.call(1, 11, first)
        assert opened.responses[0].partitions[0].preferred_read_replica == REPLICA
        again = fetch_request(TOPIC, -1, rack="b", session=(opened.session_id, 1), max_wait_ms=0)
        repeated = await topic.owner.call(1, 11, again)
        assert repeated.responses[0].partitions[0].preferred_read_replica == REPLICA, "it is sent whenever it holds"


async def test_a_replica_authorizes_as_the_owner_does(tmp_path: Path) -> None:
    rules = Denying()
    async with replicated(tmp_path, rules=AccessRules(authorizer=rules)) as topic:
        assert values_of(await topic.ask(topic.replica, 0, max_bytes=100)) == topic.values[:1]
        rules.denied = {(Resource.TOPIC, TOPIC)}
        assert (await topic.ask(topic.replica, 0)).error_code is ErrorCode.topic_authorization_failed


@pytest.mark.parametrize("end", ["history ends", "replica dies"])
async def test_librdkafka_reads_history_from_the_replica_and_keeps_its_position(tmp_path: Path, end: str) -> None:
    async with replicated(tmp_path) as topic:
        for number in range(5):
            await produce(topic.owner, TOPIC, batch(b"hot %d" % number))
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": topic.cluster.bootstrap,
                "group.id": "replays",
                "client.rack": "b",
                "auto.offset.reset": "error",
                "enable.auto.commit": False,
                # A few batches at a time.
                "fetch.message.max.bytes": 400,
                "queued.min.messages": 1,
                "log_level": 0,
            }
        )
        consumer.assign([confluent_kafka.TopicPartition(TOPIC, 0, 0)])
        replica = server(topic.cluster, REPLICA)._replica_reads.metrics
        try:
            values = await in_thread(lambda: taken(consumer, 5))
            assert replica.out_bytes > 0
            if end == "replica dies":
                await topic.cluster.brokers.pop(REPLICA).kill()
            values += await in_thread(lambda: taken(consumer, RECORDS))
            assert values == [*topic.values, *(b"hot %d" % number for number in range(5))]
        finally:
            await in_thread(consumer.close)


def taken(consumer: confluent_kafka.Consumer, count: int) -> list[bytes | None]:
    values: list[bytes | None] = []
    until = time.monotonic() + WAIT_S
    while len(values) < count and time.monotonic() < until:
        message = consumer.poll(0.5)
        if message is not None:
            assert message.error() is None, message.error()
            values.append(message.value())
    return values
