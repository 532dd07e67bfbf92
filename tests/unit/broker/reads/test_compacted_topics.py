"""Unmodified clients produce to a compacted topic, it is compacted, and they read it across its gaps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import confluent_kafka
import pytest
import pytest_asyncio
from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from unit.broker.handlers.test_round_trip import create_topic
from unit.broker.mini_cluster import WAIT_S, MiniCluster, in_thread, run_cluster
from unit.broker.raw_client import produce as produce_raw

from stratalog.tier.offload import Waiting, request_compaction, wait_for_offload
from stratalog.tier.report import tier_report
from stratalog_core.batches.batch import DELETE_HORIZON_BIT
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.system import ThreadBackground
from stratalog_metadata.records import Topic, topic_key
from stratalog_tiering.cold.bucket_scrub import BucketScrub

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEYS, ROUNDS = 50, 6
CONFIGS: dict[str, Any] = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1", "delete.retention.ms": "0"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mini_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MiniCluster]:
    async with run_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        await cluster.start_tiering()
        yield cluster


def produce(bootstrap: str, topic: str, rows: list[tuple[str, str | None]], **settings: Any) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "acks": "all", **settings})
    failures: list[Any] = []
    for key, value in rows:
        producer.produce(topic, value, key=key, on_delivery=lambda error, _: failures.append(error) if error else None)
        producer.poll(0)
    assert producer.flush(60) == 0
    assert failures == []


def read(bootstrap: str, topic: str, offset: int, isolation: str = "read_committed") -> list[confluent_kafka.Message]:
    """Everything from ``offset`` to the end, as the client says that it has reached it."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "readers", "enable.partition.eof": True, "fetch.max.bytes": 10_000,
         "max.partition.fetch.bytes": 2_000, "message.max.bytes": 2_000, "auto.offset.reset": "error",
         "isolation.level": isolation}
    )  # fmt: skip
    consumer.assign([TopicPartition(topic, 0, offset)])
    found: list[confluent_kafka.Message] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        message = consumer.poll(0.2)
        if message is None:
            continue
        error = message.error()
        if error is None:
            found.append(message)
        else:
            assert error.code() == KafkaError._PARTITION_EOF, error
            break
    else:
        pytest.fail("the end was not reached")
    consumer.close()
    return found


def offset_of(bootstrap: str, topic: str, spec: OffsetSpec) -> int:
    admin, partition = AdminClient({"bootstrap.servers": bootstrap}), TopicPartition(topic, 0)
    return int(admin.list_offsets({partition: spec})[partition].result(60).offset)


async def until_decided(cluster: MiniCluster, name: str) -> None:
    """Wait until no transaction is open: clients are answered before the markers are written."""
    log = cluster.broker.partitions.find_by_name(name.encode(), 0)
    assert log is not None
    async with asyncio.timeout(WAIT_S):
        while log.core.last_stable_offset < log.core.high_watermark:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)


async def compact(cluster: MiniCluster, name: str) -> None:
    topic = cluster.metadata.view.find(Topic, topic_key(name))
    assert topic is not None
    await request_compaction(cluster.metadata, topic, range(topic.partition_count))
    await wait_for_offload(cluster.metadata, topic, Waiting(timeout_s=120, on_progress=lambda done: None))
    # The broker has a view of its own, which may be behind.
    await cluster.brokers[1].metadata.refresh()
    (row,) = tier_report(cluster.metadata.view, [topic])
    assert (row.compacted_at_ms > 0, row.compacting, row.hot_bytes) == (True, "", 0)


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
async def test_consumers_read_the_newest_record_of_each_key(mini_cluster: MiniCluster, codec: str) -> None:
    bootstrap, name = mini_cluster.bootstrap, f"compacted-{codec}"
    await in_thread(lambda: create_topic(bootstrap, name, **CONFIGS))
    settings = {"compression.type": codec, "enable.idempotence": codec == "zstd", "batch.num.messages": 7}
    for version in range(ROUNDS):
        rows: list[tuple[str, str | None]] = [(f"key-{key}", f"{version}" * 20) for key in range(KEYS)]
        await in_thread(lambda rows=rows: produce(bootstrap, name, rows, **settings))  # type: ignore[misc]
    await in_thread(lambda: produce(bootstrap, name, [(f"key-{key}", None) for key in range(5)], **settings))
    end = KEYS * ROUNDS + 5
    await compact(mini_cluster, name)
    last = KEYS * (ROUNDS - 1)
    expected = [(f"key-{key}", last + key, str(ROUNDS - 1) * 20) for key in range(5, KEYS)]
    tombstones = [(f"key-{key}", end - 5 + key, None) for key in range(5)]
    for offset in (0, 3, last, last + 7, end - 1, end):
        found = await in_thread(lambda offset=offset: read(bootstrap, name, offset))  # type: ignore[misc]
        assert rows_of(found) == [row for row in expected + tombstones if row[1] >= offset]
    # The next compaction deletes the tombstones: their delete.retention.ms is over.
    await in_thread(lambda: produce(bootstrap, name, [("more", "records")], **settings))
    await compact(mini_cluster, name)
    found = await in_thread(lambda: read(bootstrap, name, 0))
    assert rows_of(found) == [*expected, ("more", end, "records")]
    assert await in_thread(lambda: offset_of(bootstrap, name, OffsetSpec.earliest())) == 0
    assert await in_thread(lambda: offset_of(bootstrap, name, OffsetSpec.latest())) == end + 1
    first_ms = found[0].timestamp()[1]
    assert await in_thread(lambda: offset_of(bootstrap, name, OffsetSpec.for_timestamp(first_ms))) == last + 5
    await assert_sound(mini_cluster)


def rows_of(found: list[confluent_kafka.Message]) -> list[tuple[str, int | None, str | None]]:
    rows = []
    for message in found:
        key, value = message.key(), message.value()
        assert isinstance(key, bytes)
        rows.append((key.decode(), message.offset(), None if value is None else bytes(value).decode()))
    return rows


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
async def test_only_committed_records_survive_and_later_ones_are_seen(mini_cluster: MiniCluster, isolation: str) -> None:
    """Markers go after their transaction's records, and no reader takes a later transaction for an aborted one."""
    bootstrap, name = mini_cluster.bootstrap, f"transactions-{isolation}"
    await in_thread(lambda: create_topic(bootstrap, name, **CONFIGS))
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": name})

    def send(*rounds: tuple[str, bool]) -> None:
        for value, is_committed in rounds:
            producer.begin_transaction()
            for key in ("a", "b", value):
                producer.produce(name, value, key=key)
            producer.flush(60)
            (producer.commit_transaction if is_committed else producer.abort_transaction)(60)

    await in_thread(lambda: producer.init_transactions(60))
    await in_thread(lambda: send(("1", True), ("2", False), ("3", True), ("4", False)))
    await until_decided(mini_cluster, name)
    settled = [("1", 2, "1"), ("a", 8, "3"), ("b", 9, "3"), ("3", 10, "3")]
    for _ in range(3):
        await compact(mini_cluster, name)
        assert rows_of(await in_thread(lambda: read(bootstrap, name, 0, isolation))) == settled
    await in_thread(lambda: send(("5", False), ("6", True)))
    await until_decided(mini_cluster, name)
    await compact(mini_cluster, name)
    newest = [("1", 2, "1"), ("3", 10, "3"), ("a", 20, "6"), ("b", 21, "6"), ("6", 22, "6")]
    assert rows_of(await in_thread(lambda: read(bootstrap, name, 0, isolation))) == newest
    # The compactions that follow remove the marker of 5, which the owner still has in memory.
    for value, first in (("7", 24), ("8", 28)):
        await in_thread(lambda value=value: send((value, True)))  # type: ignore[misc]
        await until_decided(mini_cluster, name)
        await compact(mini_cluster, name)
        kept = [row for row in newest if row[0] not in "ab"]
        newest = [*kept, ("a", first, value), ("b", first + 1, value), (value, first + 2, value)]
        assert rows_of(await in_thread(lambda: read(bootstrap, name, 0, isolation))) == newest
    await assert_sound(mini_cluster)


async def assert_sound(cluster: MiniCluster) -> None:
    background = ThreadBackground(2, "scrub")
    scrub = BucketScrub(cluster.store, background, before_ms=0)
    topics = (await scrub.inventory()).topics
    assert topics
    for topic in topics:
        assert (await scrub.partition(topic, 0)).findings == ()
    background.close()


async def test_a_producer_without_keys_is_told(mini_cluster: MiniCluster) -> None:
    bootstrap = mini_cluster.bootstrap
    await in_thread(lambda: create_topic(bootstrap, "needs-keys", **CONFIGS))

    def send() -> list[Any]:
        errors: list[Any] = []
        producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
        producer.produce("needs-keys", b"value", on_delivery=lambda error, _: errors.append(error))
        producer.flush(60)
        return errors

    (error,) = await in_thread(send)
    assert error.code() == KafkaError.INVALID_RECORD


async def test_a_delete_horizon_of_a_client_deletes_no_young_tombstone(mini_cluster: MiniCluster) -> None:
    bootstrap, name = mini_cluster.bootstrap, "horizon"
    await in_thread(lambda: create_topic(bootstrap, name, **{**CONFIGS, "delete.retention.ms": "86400000"}))
    await in_thread(lambda: produce(bootstrap, name, [("a", "1"), ("b", "1")]))
    tombstone = Record(offset=0, timestamp_ms=1_000, key=b"a", value=None)
    client = await mini_cluster.connect()
    answer = await produce_raw(client, name, bytes(build_batch([tombstone], attributes=DELETE_HORIZON_BIT)))
    assert answer.error_code == 0
    await compact(mini_cluster, name)
    found = await in_thread(lambda: read(bootstrap, name, 0))
    assert rows_of(found) == [("b", 1, "1"), ("a", 2, None)]
    assert found[1].timestamp()[1] == 1_000, "the records' times do not depend on the bit"
    await in_thread(lambda: produce(bootstrap, name, [("c", "1")]))
    await compact(mini_cluster, name)
    found = await in_thread(lambda: read(bootstrap, name, 0))
    assert rows_of(found) == [("b", 1, "1"), ("a", 2, None), ("c", 3, "1")]
