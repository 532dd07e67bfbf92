"""Metadata is restored from an old copy under real processes: producers continue, and bookies delete nothing because of it."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from integration.process_cluster import ProcessCluster
from kio.schema.errors import ErrorCode
from unit.broker.raw_client import RawClient, request

from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import LedgerPage, ListLedgers
from stratalog_broker.cluster.producer_ids import BLOCK
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.partitions.internal_topics import CONSUMER_OFFSETS
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_tiering.format.coordinator_state import decode_state
from stratalog_tiering.format.object_keys import parse_state_key, states_prefix

pytestmark = pytest.mark.integration
RECORDS = 20
PARTITIONS = 4
DELIVERY_MS = 20_000
"""Less than the retry delay of a failed takeover."""
TIMEOUT_S = 120.0
METADATA = "metadata-1"
INIT_PRODUCER_ID = 22
LEASE_MS = 30_000
"""A broker keeps its session, and its ledgers open, while the metadata node is copied."""


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProcessCluster]:
    """``param``: the number of tiering workers."""
    running = ProcessCluster(tmp_path / "data")
    running.run(
        "cluster",
        "start",
        "--metadata",
        "1",
        "--bookies",
        "3",
        "--brokers",
        "1",
        "--tiering",
        str(getattr(request, "param", 0)),
    )
    try:
        for bookie in running.processes("bookie"):
            config = running.data / "config" / f"{bookie['name']}.toml"
            config.write_text(config.read_text().replace("[bookie]", "[bookie]\ncollect_interval_s = 0.5", 1))
        for broker in running.processes("broker"):
            config = running.data / "config" / f"{broker['name']}.toml"
            config.write_text(
                config.read_text().replace("[broker]", f"[broker]\nlease_ms = {LEASE_MS}\nstate_upload_interval_ms = 500", 1)
            )
        yield running
    finally:
        running.run("cluster", "stop")


def produce(cluster: ProcessCluster, topic: str, partitions: int, text: str) -> list[str]:
    """Produce to all partitions with acks=all; returns the values that were acknowledged."""
    acknowledged: list[str] = []
    failures: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failures.append(error)
        else:
            acknowledged.append((message.value() or b"").decode())

    producer = Producer({"bootstrap.servers": cluster.bootstrap, "delivery.timeout.ms": DELIVERY_MS, "log_level": 0})
    for number in range(RECORDS):
        producer.produce(topic, f"{text}-{number}", partition=number % partitions, on_delivery=delivered)
    producer.flush(TIMEOUT_S)
    assert not failures, f"{len(failures)} of {RECORDS} records of {text!r} were not acknowledged: {failures[0]}"
    return sorted(acknowledged)


def consume(cluster: ProcessCluster, topic: str, partitions: int, count: int) -> list[str]:
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "reader", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    found: list[str] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < count and time.monotonic() < deadline:
        message = consumer.poll(1.0)
        if message is not None and message.error() is None:
            found.append((message.value() or b"").decode())
    consumer.close()
    return sorted(found)


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def remarks(cluster: ProcessCluster) -> list[str]:
    """Return each bookie's remark."""
    return [bookie["remark"] for bookie in cluster.json("bookie", "list")["bookies"]]


def held(cluster: ProcessCluster) -> set[int]:
    """Return the ids of the ledgers that the bookies hold; each ledger is on all three."""

    async def ask() -> set[int]:
        transport = TcpTransport()
        channels = [transport.channel(bookie["address"]) for bookie in cluster.json("bookie", "list")["bookies"]]
        request = messages.encode(ListLedgers())
        pages = [messages.decode(LedgerPage, await channel.call(messages.LIST, (request,), 60.0)) for channel in channels]
        await transport.close()
        return set.intersection(*({ledger.ledger_id for ledger in page.ledgers} for page in pages))

    return asyncio.run(ask())


def test_producers_go_on_and_nothing_acknowledged_is_deleted(cluster: ProcessCluster, tmp_path: Path) -> None:
    topic = cluster.new_topic(PARTITIONS)
    acknowledged = produce(cluster, topic, PARTITIONS, "before the copy")
    cluster.run("cluster", "stop")
    shutil.copytree(cluster.data / METADATA, tmp_path / "copy")
    cluster.run("cluster", "start")
    forgotten, deleted = cluster.new_topic(PARTITIONS), cluster.new_topic(PARTITIONS)
    produce(cluster, forgotten, PARTITIONS, "forgotten")
    produce(cluster, deleted, PARTITIONS, "deleted")
    cluster.run("topic", "delete", deleted, "--now", "--yes")
    until(lambda: len(held(cluster)) == PARTITIONS * 2, "bookies have deleted the ledgers of a deleted topic")
    ledgers = held(cluster)
    cluster.run("cluster", "stop")
    shutil.rmtree(cluster.data / METADATA)
    shutil.copytree(tmp_path / "copy", cluster.data / METADATA)

    cluster.run("cluster", "start")
    acknowledged += produce(cluster, topic, PARTITIONS, "after the restore")

    assert consume(cluster, topic, PARTITIONS, len(acknowledged)) == sorted(acknowledged)
    until(lambda: all("have no record and are kept" in remark for remark in remarks(cluster)), "bookies say what they keep")
    assert ledgers <= held(cluster), "ledgers that metadata has forgotten are kept"
    assert len(held(cluster) - ledgers) >= PARTITIONS, "what was produced after the restore is in new ledgers"


def use_up_producer_ids(cluster: ProcessCluster) -> None:
    """Have the broker give away a whole block of producer ids, so that the next ones are from a block allocated from now on."""

    async def ask() -> None:
        client = await RawClient.connect(cluster.bootstrap)
        values = {"transaction_timeout": timedelta(0), "producer_id": -1, "producer_epoch": -1}
        asked = request(INIT_PRODUCER_ID, 4, "InitProducerIdRequest", transactional_id=None, **values)
        for _ in range(BLOCK):
            assert (await client.call(INIT_PRODUCER_ID, 4, asked)).error_code is ErrorCode.none
        await client.close()

    asyncio.run(ask())


def test_new_producers_do_not_get_ids_of_producers_that_metadata_has_lost(cluster: ProcessCluster, tmp_path: Path) -> None:
    """The partition's ledger is open at the copy, so its takeover finds the state of producers whose ids came later."""
    cluster.run("cluster", "stop")
    cluster.run("cluster", "start")
    topic = cluster.new_topic()
    before, lost, restored = ([f"{when}-{number}" for number in range(RECORDS)] for when in ("before", "lost", "restored"))
    cluster.fill(topic, *before)
    cluster.run("cluster", "stop", METADATA)
    shutil.copytree(cluster.data / METADATA, tmp_path / "copy")
    cluster.run("cluster", "restart", METADATA)
    use_up_producer_ids(cluster)
    for value in lost:
        cluster.fill(topic, value)
    cluster.run("cluster", "stop")
    shutil.rmtree(cluster.data / METADATA)
    shutil.copytree(tmp_path / "copy", cluster.data / METADATA)

    cluster.run("cluster", "start")
    for value in restored:
        cluster.fill(topic, value)

    assert consume(cluster, topic, 1, 3 * RECORDS) == sorted([*before, *lost, *restored])


def commit(cluster: ProcessCluster, group: str, topic: str, offset: int) -> None:
    """Commit an offset for the first partition. Retries while the coordinator is being loaded."""
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": group, "log_level": 0})

    def is_committed() -> bool:
        try:
            consumer.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
        except KafkaException:
            return False
        return committed(consumer, topic) == offset

    until(is_committed, f"the coordinator takes a commit of {group}")
    consumer.close()


def committed(consumer: Consumer, topic: str) -> int:
    (found,) = consumer.committed([TopicPartition(topic, 0)], TIMEOUT_S)
    return int(found.offset)


def group_states_in(bucket: Path) -> Iterator[bytes]:
    """Yield what the bucket has of the states of groups."""
    for file in (bucket / states_prefix(CONSUMER_OFFSETS, 0)).parent.rglob("*"):
        place = parse_state_key(str(file.relative_to(bucket)))
        if place is not None and file.exists():
            yield decode_state(file.read_bytes(), place).checkpoint.application_state or b""


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_groups_continue_from_the_bucket_when_the_copy_knows_only_ledgers_that_are_deleted(
    cluster: ProcessCluster, tmp_path: Path
) -> None:
    topic, group = cluster.new_topic(PARTITIONS), cluster.new_group()
    produce(cluster, topic, PARTITIONS, "before the copy")
    commit(cluster, group, topic, 1)
    cluster.run("cluster", "stop")
    shutil.copytree(cluster.data / METADATA, tmp_path / "copy")
    cluster.run("cluster", "start")
    known = {row["ledger"] for row in cluster.json("ledger", "list", CONSUMER_OFFSETS)["ledgers"]}
    assert known
    commit(cluster, group, topic, 3)

    def is_in_the_bucket() -> bool:
        stored = [GroupStore.from_snapshot(state) for state in group_states_in(cluster.data / "store")]
        return any(each.offset == 3 for store in stored for each in store.offsets_of(group).values())

    until(lambda: not known & held(cluster), "the ledgers that the copy knows are deleted")
    until(is_in_the_bucket, "the broker stores the group's state")
    cluster.run("cluster", "stop")
    shutil.rmtree(cluster.data / METADATA)
    shutil.copytree(tmp_path / "copy", cluster.data / METADATA)
    cluster.run("cluster", "start")

    doctor = json.loads(cluster.run("doctor", "--json", expect=1))
    (finding,) = [each for each in doctor["findings"] if each["check"] == "coordinators"]
    assert "stratalog tier restore-coordinators" in finding["remedy"]
    restored = cluster.json("tier", "restore-coordinators", "--yes")

    assert [row["state"] for row in restored["partitions"]] == ["restored"]
    assert restored["groups"]["groups"] == [group]
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": group, "log_level": 0})
    assert committed(consumer, topic) == 3
    consumer.close()
    commit(cluster, group, topic, 4)
