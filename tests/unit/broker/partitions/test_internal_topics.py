"""Internal topics: commits survive owners that fail between two checkpoints, and no client changes what they are read from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster
from unit.broker.raw_client import RawClient, batch, produce, produce_request, request
from unit.metadata.watching import until

from stratalog_bookies.client import LedgerWriter
from stratalog_broker.cluster.load_meter import LoadMeter
from stratalog_broker.coordination.groups.application import KEY_TYPE, GroupApplication
from stratalog_broker.coordination.groups.core.offset_rows import Commit
from stratalog_broker.coordination.groups.core.records import encode_group_key
from stratalog_broker.coordination.routing import partition_of
from stratalog_broker.partitions.internal_topics import CONSUMER_OFFSETS, INTERNAL_TOPICS
from stratalog_broker.partitions.takeover import Takeover
from stratalog_broker.protocol.entities import encode_response as encode_entity
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core.batches.checkpoint import Checkpoint, encode_checkpoint
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt, OutcomeUnknown, StratalogError
from stratalog_metadata.records import (
    Ledger,
    LedgerState,
    Log,
    Partition,
    Topic,
    TopicPartition,
    log_key,
    partition_key,
    topic_key,
)
from stratalog_metadata.state.commands import Command, Delete, Put

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
                        await broker.server.locator.created_partition(KEY_TYPE, GROUP)
                        return broker.server.groups.coordinator_of(GROUP)
                    except (KafkaError, StratalogError):
                        await asyncio.sleep(0.01)

    async def commit(self, partition: int, offset: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                coordinator = await self.coordinator()
                (error,) = await coordinator.commit(GROUP, "", None, -1, [Commit("flights", partition, offset)])
                if error is ErrorCode.none:
                    await self._cluster.refresh()
                    return

    async def committed(self) -> dict[int, int]:
        store = (await self.coordinator()).coordinator.table.store
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


async def restart(cluster: MiniCluster, **settings: Any) -> None:
    """The broker dies, and another one with ``settings`` takes everything over."""
    ((broker_id, broker),) = cluster.brokers.items()
    del cluster.brokers[broker_id]
    await broker.kill()
    await cluster.start_broker(broker_id + 1, **settings)


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
        log = cluster.broker.partitions.find(offsets.identity)
        assert log is not None
        async with asyncio.timeout(WAIT_S):
            while log.core.log_start_offset != 40:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)
        await restart(cluster)
        assert await offsets.committed() == {number: number for number in range(41)}


async def test_a_log_that_begins_above_0_without_a_checkpoint_is_corrupt(tmp_path: Path) -> None:
    async with offsets_of_one_broker(tmp_path, shutdown_ms=60_000) as (cluster, offsets):
        await offsets.commit(0, 41)
        await cluster.brokers.pop(1).stop()
        (ref,) = offsets.log.ledgers
        ledger = next(each for each in cluster.metadata.view.all(Ledger) if each.ledger_id == ref.ledger_id)
        assert ledger.state is LedgerState.CLOSED
        gone = msgspec.structs.replace(offsets.log, ledgers=(), log_start_offset=ledger.end_offset)
        await cluster.metadata.propose(Command(updates=(Put(record=gone), Delete(key=ledger.key()))))
        running = await cluster.start_broker(2)
        broker, indexes = running.server, running.server.partitions.memory.indexes
        takeover = Takeover(
            running.metadata.view, running.ledgers, broker.partitions.cold, indexes, producers_max=10, replayed_bytes=100
        )
        topic = next(each for each in running.metadata.view.all(Topic) if each.topic_id == offsets.identity.topic_id)
        with pytest.raises(Corrupt, match="begins at offset 1 and has no complete checkpoint"):
            await takeover.rebuild(offsets.partition, topic, {}, wants_batches=True)
        assert not broker.partitions.is_serving(offsets.identity)


def create_request(name: str) -> Any:
    wish = request(19, 5, "CreatableTopic", name=name, num_partitions=1, replication_factor=1, assignments=(), configs=())
    return request(19, 5, "CreateTopicsRequest", topics=(wish,), timeout=timedelta(seconds=10), validate_only=False)


def grow_request(name: str, count: int) -> Any:
    wish = request(37, 3, "CreatePartitionsTopic", name=name, count=count, assignments=None)
    return request(37, 3, "CreatePartitionsRequest", topics=(wish,), timeout=timedelta(seconds=10), validate_only=False)


def delete_request(name: str) -> Any:
    return request(20, 5, "DeleteTopicsRequest", topic_names=(name,), timeout=timedelta(seconds=10))


def delete_records_request(name: str, partition: int) -> Any:
    row = request(21, 2, "DeleteRecordsPartition", partition_index=partition, offset=-1)
    topic = request(21, 2, "DeleteRecordsTopic", name=name, partitions=(row,))
    return request(21, 2, "DeleteRecordsRequest", topics=(topic,), timeout=timedelta(seconds=10))


def set_request(config: str, value: str | None) -> Any:
    row = request(44, 1, "AlterableConfig", name=config, config_operation=0 if value is not None else 1, value=value)
    resource = request(44, 1, "AlterConfigsResource", resource_type=2, resource_name=CONSUMER_OFFSETS, configs=(row,))
    return request(44, 1, "IncrementalAlterConfigsRequest", resources=(resource,), validate_only=False)


def replace_request(**configs: str) -> Any:
    rows = tuple(request(33, 2, "AlterableConfig", name=name.replace("_", "."), value=value) for name, value in configs.items())
    resource = request(33, 2, "AlterConfigsResource", resource_type=2, resource_name=CONSUMER_OFFSETS, configs=rows)
    return request(33, 2, "AlterConfigsRequest", resources=(resource,), validate_only=False)


async def test_no_client_writes_grows_or_deletes_an_internal_topic(tmp_path: Path) -> None:
    """Kafka 4.3 refuses Produce and DeleteRecords in the same way; the rest is left to its tools, or to its users' care."""
    refused = ErrorCode.invalid_topic_exception
    async with offsets_of_one_broker(tmp_path) as (cluster, offsets):
        await offsets.commit(0, 41)
        await cluster.start_broker(2)
        index = offsets.identity.partition
        malformed = bytes(build_batch([Record(offset=0, timestamp_ms=0, key=b"\x00\x01\x7f", value=b"")]))
        for running in cluster.brokers.values():
            client = await RawClient.connect(running.server.kafka_address)
            for records in (malformed, batch(b"no key at all")):
                assert (await produce(client, CONSUMER_OFFSETS, records, partition=index)).error_code is refused
            for name in INTERNAL_TOPICS:
                assert (await client.call(19, 5, create_request(name))).topics[0].error_code is refused
            count = cluster.broker.settings.offsets_topic_partitions + 1
            assert (await client.call(37, 3, grow_request(CONSUMER_OFFSETS, count))).results[0].error_code is refused
            assert (await client.call(20, 5, delete_request(CONSUMER_OFFSETS))).responses[0].error_code is refused
            answer = await client.call(21, 2, delete_records_request(CONSUMER_OFFSETS, index))
            assert answer.topics[0].partitions[0].error_code is refused
            client.send(0, 9, encode_entity(produce_request(CONSUMER_OFFSETS, index, malformed, acks=0)))
            assert await client.closed()
            await client.close()
        assert await offsets.committed() == {0: 41}


@pytest.mark.parametrize(
    "wanted",
    [
        set_request("min.insync.replicas", "1"),
        set_request("cleanup.policy", "delete"),
        set_request("cleanup.policy", None),
        set_request("retention.ms", "1"),
        set_request("max.message.bytes", "100"),
        replace_request(segment_ms="60000"),
        replace_request(cleanup_policy="compact", retention_bytes="1"),
    ],
)
async def test_no_client_makes_an_internal_topic_less_durable(tmp_path: Path, wanted: Any) -> None:
    async with offsets_of_one_broker(tmp_path) as (cluster, offsets):
        await offsets.commit(0, 41)
        client = await cluster.connect()
        key, version = (44, 1) if "Incremental" in type(wanted).__name__ else (33, 2)
        (answer,) = (await client.call(key, version, wanted)).responses
        assert answer.error_code is ErrorCode.invalid_config
        assert "internal topic" in answer.error_message
        (answer,) = (await client.call(44, 1, set_request("min.insync.replicas", "3"))).responses
        assert answer.error_code is ErrorCode.none
        (answer,) = (await client.call(44, 1, set_request("segment.ms", "60000"))).responses
        assert answer.error_code is ErrorCode.none


async def test_replay_skips_counts_and_reports_records_that_it_cannot_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with offsets_of_one_broker(tmp_path) as (cluster, offsets):
        await offsets.commit(0, 41)
        keys = (b"\x00\x01\x7f", b"\x00", encode_group_key("other"), encode_group_key(GROUP))
        records = [Record(offset=at, timestamp_ms=0, key=key, value=b"\x00\x07") for at, key in enumerate(keys)]
        await cluster.broker.partitions.append_internal(offsets.identity, build_batch(records))
        await offsets.commit(1, 42)
        assert await offsets.committed() == {0: 41, 1: 42}
        await restart(cluster)
        assert await offsets.committed() == {0: 41, 1: 42}
        reported = [line for line in caplog.messages if "skipped" in line]
        index = offsets.identity.partition
        assert reported == [
            f"replay of {CONSUMER_OFFSETS}-{index} skipped 4 records that it cannot read; offset 1: field of 2 bytes at"
            " byte 2 exceeds its 3 bytes"
        ]
        broker = cluster.broker
        groups = broker.groups
        load = LoadMeter(1, broker.clock, broker.partitions.all, lambda: groups.unreadable_records).report()
        assert load is not None
        assert load.unreadable_records == groups.unreadable_records == 4
