"""Takeovers of partitions whose state is not in a ledger: retention removed it, or it is in the store or was handed over."""

from __future__ import annotations

import logging
from pathlib import Path
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from msgspec.structs import replace
from unit.broker.mini_cluster import WAIT_S, MiniCluster, in_thread, run_cluster, until_served
from unit.broker.partitions.test_failover import create_topic
from unit.broker.raw_client import RawClient, batch, produce
from unit.metadata.watching import until

from stratalog_broker.network.server import BrokerServer
from stratalog_broker.partitions.internal_topics import CONSUMER_OFFSETS
from stratalog_broker.partitions.takeover import TakenOver, Takeover, failure_text
from stratalog_core.batches.checkpoint import Checkpoint, EpochStart, ProducerEntry, SequencedBatch, encode_checkpoint
from stratalog_core.errors import Corrupt, StaleEpoch, StratalogError, Unavailable
from stratalog_metadata.records import (
    LEDGER_IDS,
    Counter,
    Fragment,
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    ManifestPointer,
    Partition,
    Topic,
    TopicPartition,
    counter_key,
    log_key,
    manifest_pointer_key,
    partition_key,
)
from stratalog_metadata.state.commands import Command, Delete, Put, Update

TOPIC = "flights"
EMPTY = 90
"""The id of a ledger that no bookie knows: its owner has died before it wrote an entry."""


async def cold_topic(cluster: MiniCluster) -> TopicPartition:
    """A partition whose records at offsets 0 and 1, of producer 7, are in the store only; no broker owns it."""
    await cluster.start_tiering()
    await in_thread(lambda: create_topic(cluster, TOPIC, 1, **{"local.retention.ms": "0"}))
    topic = next(topic for topic in cluster.metadata.view.all(Topic) if topic.name == TOPIC)
    await until_served(cluster.broker, topic.topic_id)
    client = await RawClient.connect(cluster.broker.kafka_address)
    for sequence in range(2):
        sent = batch(b"cold", producer_id=7, producer_epoch=0, base_sequence=sequence)
        assert (await produce(client, TOPIC, sent)).error_code == 0
    await client.close()
    await cluster.brokers.pop(1).stop()
    view = cluster.metadata.view

    def is_cold() -> bool:
        log, pointer = view.find(Log, log_key(topic.topic_id, 0)), view.get(manifest_pointer_key(topic.topic_id, 0))
        return log is not None and pointer is not None and not log.ledgers

    await until(cluster.metadata, is_cold, WAIT_S)
    return TopicPartition(topic.topic_id, 0)


async def lose_records(cluster: MiniCluster, identity: TopicPartition, *, start: int, leave_empty: bool) -> None:
    """Let hot records below ``start`` have expired, and with them the state of their producers, as an earlier release did."""
    log = cluster.metadata.view.find(Log, log_key(identity.topic_id, 0))
    assert log is not None
    updates: list[Update] = []
    refs = (LedgerRef(ledger_id=EMPTY, base_offset=start, leader_epoch=1),) if leave_empty else ()
    if leave_empty:
        empty = Ledger(
            ledger_id=EMPTY, topic_id=identity.topic_id, partition=0, base_offset=start, leader_epoch=1, write_quorum=1,
            ack_quorum=1, fragments=(Fragment(first_entry=0, bookies=("bookie-1",)),), state=LedgerState.CLOSED, last_entry=-1,
            end_offset=start,
        )  # fmt: skip
        updates.append(Put(record=empty))
    updates.append(Put(record=replace(log, ledgers=refs, log_start_offset=start)))
    await cluster.metadata.propose(Command(updates=tuple(updates)))


def settle(broker: BrokerServer, identity: TopicPartition) -> None:
    """End the time in which batches whose predecessors may still be resent are refused without a verdict."""
    log = broker.partitions.find(identity)
    assert log is not None
    log.admission._settled_at_s = 0.0


@pytest.mark.parametrize("leave_empty", [True, False])
async def test_producers_are_forgotten_if_their_latest_state_is_gone(
    tmp_path: Path, leave_empty: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown producer may go on; one of which an earlier state is known would be refused for good."""
    async with run_cluster(tmp_path) as cluster:
        identity = await cold_topic(cluster)
        await lose_records(cluster, identity, start=5, leave_empty=leave_empty)
        with caplog.at_level(logging.WARNING):
            successor = (await cluster.start_broker(2)).server
            await until_served(successor, identity.topic_id)
        assert f"{partition_key(identity.topic_id, 0)}: the state after offsets 2..4 is lost" in caplog.text
        settle(successor, identity)
        client = await RawClient.connect(successor.kafka_address)
        answer = await produce(client, TOPIC, batch(b"next", producer_id=7, producer_epoch=0, base_sequence=5))
        assert (answer.error_code, answer.base_offset) == (0, 5)
        await client.close()


@pytest.mark.parametrize("is_forked", [False, True])
async def test_a_deleted_ledger_ends_the_log_unless_the_bucket_has_more(
    tmp_path: Path, is_forked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Metadata was restored from a copy in which a ledger is open that was deleted since; no recovery of it could end."""
    async with run_cluster(tmp_path) as cluster:
        identity = await cold_topic(cluster)
        log = cluster.metadata.view.find(Log, log_key(identity.topic_id, 0))
        assert log is not None
        base_offset = 0 if is_forked else 2
        deleted = Ledger(
            ledger_id=EMPTY, topic_id=identity.topic_id, partition=0, base_offset=base_offset, leader_epoch=1, write_quorum=1,
            ack_quorum=1, fragments=(Fragment(first_entry=0, bookies=("bookie-1",)),), state=LedgerState.OPEN,
        )  # fmt: skip
        refs = (LedgerRef(ledger_id=EMPTY, base_offset=base_offset, leader_epoch=1),)
        updates: list[Update] = [Put(record=deleted), Put(record=replace(log, ledgers=refs))]
        if is_forked:
            updates.append(Delete(key=manifest_pointer_key(identity.topic_id, 0)))
        for bookie in cluster.bookies.values():
            await bookie._disks[0].delete([EMPTY])
        await cluster.metadata.propose(Command(updates=tuple(updates)))
        with caplog.at_level(logging.WARNING):
            successor = (await cluster.start_broker(2)).server
            if is_forked:
                await until(cluster.metadata, lambda: "history of flights-0 has forked" in caplog.text, WAIT_S)
                assert successor.partitions.find(identity) is None
                return
            await until_served(successor, identity.topic_id)
        assert "ends before a deleted ledger" in caplog.text
        client = await RawClient.connect(successor.kafka_address)
        answer = await produce(client, TOPIC, batch(b"next"))
        assert (answer.error_code, answer.base_offset) == (0, 2)
        await client.close()


@pytest.mark.parametrize("is_restored", [True, False])
async def test_a_log_goes_on_after_sealed_ledgers_that_were_deleted_since_a_copy(
    tmp_path: Path, is_restored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of it is in the bucket. In metadata that is not a copy, the same is a loss: nobody owns the partition then."""
    async with run_cluster(tmp_path) as cluster:
        await in_thread(lambda: create_topic(cluster, TOPIC, 1))
        topic = next(topic for topic in cluster.metadata.view.all(Topic) if topic.name == TOPIC)
        await until_served(cluster.broker, topic.topic_id)
        client = await RawClient.connect(cluster.broker.kafka_address)
        await produce(client, TOPIC, batch(b"expired"))
        await client.close()
        await cluster.brokers.pop(1).stop()
        await cluster.refresh()
        log = cluster.metadata.view.find(Log, log_key(topic.topic_id, 0))
        assert log is not None
        (ref,) = log.ledgers
        for bookie in cluster.bookies.values():
            await bookie._disks[0].delete([ref.ledger_id])
        if is_restored:
            counter = cluster.metadata.view.find(Counter, counter_key(LEDGER_IDS))
            assert counter is not None
            await cluster.metadata.propose(Command(updates=(Put(record=replace(counter, lost_below=counter.next_value)),)))
        with caplog.at_level(logging.WARNING):
            successor = (await cluster.start_broker(2)).server
            if not is_restored:
                await until(cluster.metadata, lambda: "has no entry 0, according to all its bookies" in caplog.text, WAIT_S)
                assert not successor.partitions.is_serving(TopicPartition(topic.topic_id, 0))
                return
            await until_served(successor, topic.topic_id)
        assert "is taken over without its hot ledgers" in caplog.text
        client = await RawClient.connect(successor.kafka_address)
        answer = await produce(client, TOPIC, batch(b"next"))
        assert (answer.error_code, answer.base_offset) == (0, 1)
        await client.close()


async def test_the_state_of_cold_history_is_used_where_records_continue_it(tmp_path: Path) -> None:
    async with run_cluster(tmp_path) as cluster:
        identity = await cold_topic(cluster)
        successor = (await cluster.start_broker(2)).server
        await until_served(successor, identity.topic_id)
        settle(successor, identity)
        client = await RawClient.connect(successor.kafka_address)
        repeated = await produce(client, TOPIC, batch(b"cold", producer_id=7, producer_epoch=0, base_sequence=1))
        assert (repeated.error_code, repeated.base_offset) == (0, 1)
        ahead = await produce(client, TOPIC, batch(b"gap", producer_id=7, producer_epoch=0, base_sequence=5))
        assert ahead.error_code is ErrorCode.out_of_order_sequence_number
        await client.close()


async def test_a_state_that_was_handed_over_outlives_the_records(tmp_path: Path) -> None:
    """No ledger is left, and retention may have removed the cold history whose end had the same state."""
    async with run_cluster(tmp_path) as cluster:
        identity = await cold_topic(cluster)
        running = await cluster.start_broker(2)
        await until_served(running.server, identity.topic_id)
        view = running.metadata.view
        pointer = view.find(ManifestPointer, manifest_pointer_key(identity.topic_id, 0))
        topic = next(each for each in view.all(Topic) if each.topic_id == identity.topic_id)
        log = view.find(Log, log_key(identity.topic_id, 0))
        partition = view.find(Partition, partition_key(identity.topic_id, 0))
        assert pointer is not None
        assert log is not None
        assert partition is not None
        expired = (replace(pointer, start_offset=2), replace(log, log_start_offset=2))
        await running.metadata.propose(Command(updates=tuple(Put(record=each) for each in expired)))
        indexes = running.server.partitions.memory.indexes
        takeover = Takeover(
            view, running.ledgers, running.server.partitions.cold, indexes, producers_max=10, replayed_bytes=100
        )

        async def taken_over(offset: int) -> TakenOver:
            producer = ProducerEntry(7, 3, (SequencedBatch(0, 0, 1, 0),))
            handed = Checkpoint(offset=offset, leader_epochs=(EpochStart(1, 0),), producers=(producer,))
            given = replace(partition, handed=encode_checkpoint(handed)[0])
            return await takeover.rebuild(given, topic, {}, wants_batches=False)

        taken = await taken_over(2)
        assert (taken.state.next_offset, taken.state.producers.epoch_of(7)) == (2, 3)
        earlier = await taken_over(1)
        assert (earlier.state.next_offset, earlier.state.producers.epoch_of(7)) == (2, -1)


@pytest.mark.parametrize(
    ("topic", "failure", "names_it"),
    [
        (CONSUMER_OFFSETS, Unavailable("no bookie answers"), True),
        (CONSUMER_OFFSETS, Corrupt("no complete checkpoint"), True),
        (CONSUMER_OFFSETS, StaleEpoch("another owner"), False),
        ("flights", Unavailable("no bookie answers"), False),
    ],
)
def test_a_failure_that_may_last_names_the_command_that_ends_it(topic: str, failure: StratalogError, names_it: bool) -> None:
    record = Topic(
        name=topic, topic_id=UUID(int=7), partition_count=1, replication_factor=1, internal=topic == CONSUMER_OFFSETS
    )  # fmt: skip
    text = failure_text(failure, record)
    assert text.startswith(failure.message)
    assert ("`stratalog tier restore-coordinators`" in text) is names_it
