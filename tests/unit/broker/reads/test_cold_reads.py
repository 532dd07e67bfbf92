"""Histories that have left the bookies: read, searched, and taken over from the object store."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster, until_served
from unit.broker.raw_client import RawClient, batch, fetch, list_offset, produce, request
from unit.metadata.watching import until

from stratalog_broker.admin.errors import InvalidConfig
from stratalog_broker.admin.topics import NewTopic
from stratalog_core.batches.batch import iterate_headers
from stratalog_core.batches.records import iterate_records
from stratalog_core.errors import Corrupt
from stratalog_metadata.records import (
    Ledger,
    Log,
    ManifestPointer,
    TierRequest,
    log_key,
    manifest_pointer_key,
    tier_request_key,
)
from stratalog_metadata.state.commands import Command, Put


async def create(
    cluster: MiniCluster,
    name: str,
    partitions: int = 1,
    segment_bytes: int = 1_000_000,
    replication_factor: int = 1,
    keeps_hot: bool = False,
) -> UUID:
    hot_ms = {"local.retention.ms": "-1"} if keeps_hot else {}
    topic = await cluster.broker.topic_commands.create(
        NewTopic(
            name=name,
            partition_count=partitions,
            replication_factor=replication_factor,
            configs={"segment.bytes": str(segment_bytes), "retention.ms": "-1", **hot_ms},
        ),
        WAIT_S,
    )
    for index in range(partitions):
        await until_served(cluster.broker, topic.topic_id, index)
    await cluster.refresh()
    return topic.topic_id


async def make_cold(cluster: MiniCluster, topic_id: UUID, partitions: int = 1) -> None:
    """Have everything sealed, offloaded, verified, and its hot copies dropped."""
    requests = [Put(record=TierRequest(topic_id=topic_id, index=index, delete_hot=True)) for index in range(partitions)]
    await cluster.metadata.propose(Command(updates=tuple(requests)))

    def is_cold() -> bool:
        view = cluster.metadata.view
        logs = [view.find(Log, log_key(topic_id, index)) for index in range(partitions)]
        asked = [view.get(tier_request_key(topic_id, index)) for index in range(partitions)]
        return not any(asked) and all(log is not None and not log.ledgers for log in logs)

    await until(cluster.metadata, is_cold, WAIT_S)
    await cluster.refresh()
    for log in cluster.broker.partitions.all():
        log.tail.clear()


async def read_all(client: RawClient, topic: str, end_offset: int) -> list[bytes | None]:
    values: list[bytes | None] = []
    offset = 0
    async with asyncio.timeout(60):
        while offset < end_offset:
            found = await fetch(client, topic, offset, max_wait_ms=500, max_bytes=20_000)
            assert found.error_code is ErrorCode.none
            assert found.high_watermark == end_offset
            for position, header in iterate_headers(found.records or b""):
                assert header.base_offset == offset
                records = found.records[position : position + header.size_bytes]
                values += [record.value for record in iterate_records(records)]
                offset = header.next_offset
    return values


async def offset_at(client: RawClient, topic: str, timestamp: int) -> tuple[int, int]:
    answer = await list_offset(client, topic, timestamp)
    assert answer.error_code is ErrorCode.none
    return answer.offset, answer.timestamp


async def test_cold_history_reads_as_it_was_written_and_goes_on_hot(tmp_path: Path) -> None:
    async with run_cluster(tmp_path) as cluster:
        await cluster.start_tiering()
        topic_id = await create(cluster, "flights", segment_bytes=65_536)
        client = await cluster.connect()
        values = [str(number).encode() * 300 for number in range(200)]
        for number, value in enumerate(values):
            await produce(client, "flights", batch(value, timestamp_ms=1_000 + (number * 37) % 1000))
        await make_cold(cluster, topic_id)
        assert not list(cluster.metadata.view.all(Ledger))
        assert await read_all(client, "flights", 200) == values
        for value in (b"hot again", b"and again"):
            values.append(value)
            await produce(client, "flights", batch(value, timestamp_ms=5_000))
        assert await read_all(client, "flights", 202) == values
        times = [1_000 + (number * 37) % 1000 for number in range(200)] + [5_000, 5_000]
        for timestamp in (0, 1_500, 1_998, 3_000):
            first = next(number for number, time in enumerate(times) if time >= timestamp)
            assert await offset_at(client, "flights", timestamp) == (first, times[first])
        names = {name: (await offset_at(client, "flights", name))[0] for name in (-1, -2, -3, -4, -5, -6)}
        assert names == {-1: 202, -2: 0, -3: 200, -4: 200, -5: 199, -6: 200}


async def test_a_topic_with_cold_records_cannot_become_hot_only(tmp_path: Path) -> None:
    async with run_cluster(tmp_path) as cluster:
        await cluster.start_tiering()
        cold, hot = await create(cluster, "cold"), await create(cluster, "hot")
        client = await cluster.connect()
        for name in ("cold", "hot"):
            await produce(client, name, batch(b"record"))
        await make_cold(cluster, cold)

        async def configure(name: str, config: str, value: str) -> None:
            await cluster.broker.topic_commands.configure(name, lambda configs: {**configs, config: value}, WAIT_S)

        with pytest.raises(InvalidConfig, match=r"'cold' has records in the object store.*set remote.log.copy.disable=true"):
            await configure("cold", "remote.storage.enable", "false")
        await configure("cold", "remote.log.copy.disable", "true")
        await configure("hot", "remote.storage.enable", "false")
        await configure("hot", "retention.ms", "60000")
        assert await read_all(client, "cold", 1) == await read_all(client, "hot", 1) == [b"record"]
        assert cluster.metadata.view.get(manifest_pointer_key(hot, 0)) is None


async def test_an_owner_starts_from_cold_history_alone(tmp_path: Path) -> None:
    async with run_cluster(tmp_path) as cluster:
        await cluster.start_tiering()
        topic_id = await create(cluster, "flights")
        client = await cluster.connect()
        first = batch(b"a", b"b", producer_id=5, producer_epoch=0, base_sequence=0)
        assert (await produce(client, "flights", first)).base_offset == 0
        await make_cold(cluster, topic_id)
        await cluster.brokers.pop(1).stop()
        await cluster.start_broker(2)
        await until_served(cluster.broker, topic_id)
        client = await cluster.connect()
        assert (await produce(client, "flights", first)).base_offset == 0, "the retry is recognised"
        following = batch(b"c", producer_id=5, producer_epoch=0, base_sequence=2)
        assert (await produce(client, "flights", following)).base_offset == 2
        assert await read_all(client, "flights", 3) == [b"a", b"b", b"c"]
        log = cluster.broker.partitions.find_by_name(b"flights", 0)
        assert log is not None
        assert log.core.end_of_epoch(log.core.leader_epoch - 1)[1] == 2


async def have_offloaded(cluster: MiniCluster, topic_id: UUID, end_offset: int) -> None:
    """Have everything sealed and offloaded, hot copies kept, and nothing in the tail cache."""
    await cluster.metadata.propose(Command(updates=(Put(record=TierRequest(topic_id=topic_id, index=0, delete_hot=False)),)))

    def is_offloaded() -> bool:
        pointer = cluster.metadata.view.find(ManifestPointer, manifest_pointer_key(topic_id, 0))
        return pointer is not None and pointer.end_offset == end_offset

    await until(cluster.metadata, is_offloaded, WAIT_S)
    log = cluster.broker.partitions.find_by_id(topic_id.bytes, 0)
    assert log is not None
    async with asyncio.timeout(WAIT_S):
        # The broker has a view of its own, which may lag behind this one.
        while (found := cluster.broker.reader.manifest_pointer(log)) is None or found.end_offset < end_offset:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)
    assert list(cluster.metadata.view.all(Ledger)), "hot copies are kept"
    forget_what_is_read(cluster)


def forget_what_is_read(cluster: MiniCluster) -> None:
    cluster.broker.pending_reads.runs.clear()
    for log in cluster.broker.partitions.all():
        log.tail.clear()


async def test_an_offloaded_ledger_whose_bookies_are_lost_is_read_from_the_store(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, bookies=2) as cluster:
        await cluster.start_tiering()
        topic_id = await create(cluster, "flights", replication_factor=2, keeps_hot=True)
        client = await cluster.connect()
        values = [str(number).encode() * 300 for number in range(50)]
        for number, value in enumerate(values):
            await produce(client, "flights", batch(value, timestamp_ms=1_000 + (number * 37) % 1000))
        await have_offloaded(cluster, topic_id, 50)
        log = cluster.broker.partitions.find_by_name(b"flights", 0)
        reader = cluster.broker.reader
        assert log is not None
        assert not reader.is_cold(log, 0)
        assert await read_all(client, "flights", 50) == values
        for bookie in cluster.bookies.values():
            await bookie.close()
        forget_what_is_read(cluster)
        assert await read_all(client, "flights", 50) == values
        assert reader.is_cold(log, 0), "the bookies are not asked again for a while"
        times = [1_000 + (number * 37) % 1000 for number in range(50)]
        for timestamp in (0, 1_500, 1_998):
            first = next(number for number, time in enumerate(times) if time >= timestamp)
            assert await offset_at(client, "flights", timestamp) == (first, times[first])
        assert (await offset_at(client, "flights", -3))[1] == max(times)


async def test_a_partition_that_is_all_cold_is_taken_over_without_its_bookies(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, bookies=2) as cluster:
        await cluster.start_tiering()
        topic_id = await create(cluster, "flights", replication_factor=2, keeps_hot=True)
        client = await cluster.connect()
        first = batch(b"a", b"b", producer_id=5, producer_epoch=0, base_sequence=0)
        assert (await produce(client, "flights", first)).base_offset == 0
        await have_offloaded(cluster, topic_id, 2)
        await cluster.brokers.pop(1).kill()
        for bookie in cluster.bookies.values():
            await bookie.close()
        await cluster.start_broker(2)
        await until_served(cluster.broker, topic_id)
        client = await cluster.connect()
        assert await read_all(client, "flights", 2) == [b"a", b"b"]
        for name in cluster.bookies:
            await cluster.start_bookie(name)
        async with asyncio.timeout(WAIT_S):
            while (found := await produce(client, "flights", first)).error_code is not ErrorCode.none:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert found.base_offset == 0, "the retry is recognised"


async def test_where_both_copies_are_unreadable_the_bookies_are_asked_again(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, bookies=1) as cluster:
        await cluster.start_tiering()
        topic_id = await create(cluster, "flights", keeps_hot=True)
        client = await cluster.connect()
        await produce(client, "flights", batch(b"value"))
        await have_offloaded(cluster, topic_id, 1)
        broker = cluster.broker
        log = broker.partitions.find_by_name(b"flights", 0)
        assert log is not None
        await cluster.bookies["bookie-1"].close()
        for segment in (tmp_path / "store" / "segments").rglob("*.segment"):
            segment.rename(segment.with_suffix(".away"))
        with pytest.raises(Corrupt):
            await broker.reader.read(log, 0, 1, 1000, WAIT_S)
        assert not broker.reader.is_cold(log, 0)
        await cluster.start_bookie("bookie-1")
        forget_what_is_read(cluster)
        assert await read_all(client, "flights", 1) == [b"value"]


async def test_many_cold_partitions_come_in_one_fetch(tmp_path: Path) -> None:
    partitions = 20
    async with run_cluster(tmp_path) as cluster:
        await cluster.start_tiering()
        topic_id = await create(cluster, "flights", partitions)
        client = await cluster.connect()
        for index in range(partitions):
            await produce(client, "flights", batch(b"x" * 5000), partition=index)
        await make_cold(cluster, topic_id, partitions)

        def wanted(index: int) -> Any:
            return request(
                1, 11, "FetchPartition", partition=index, fetch_offset=0, partition_max_bytes=100_000, current_leader_epoch=-1
            )

        topics = (request(1, 11, "FetchTopic", topic="flights", partitions=tuple(map(wanted, range(partitions)))),)
        call = request(
            1, 11, "FetchRequest", topics=topics, forgotten_topics_data=(), min_bytes=partitions * 5000, max_bytes=10_000_000,
            isolation_level=0, session_id=0, session_epoch=-1, max_wait=datetime.timedelta(seconds=60),
        )  # fmt: skip
        answer = await client.call(1, 11, call)
        assert [len(one.records or b"") > 5000 for one in answer.responses[0].partitions] == [True] * partitions
