"""Brokers that die or stop: what was acknowledged stays, once, and idempotent producers notice nothing."""

from __future__ import annotations

import asyncio
import itertools
import struct
import threading
import time
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from kio.schema.errors import ErrorCode
from msgspec.structs import replace
from unit.broker.handlers.test_round_trip import consume, produce
from unit.broker.mini_cluster import WAIT_S, MiniCluster, in_thread, run_cluster, until_all_served, until_served
from unit.broker.raw_client import batch
from unit.broker.raw_client import produce as produce_raw

from stratalog_bookies.client import EntryHead, LedgerClient
from stratalog_broker.partitions import failed_takeovers, index_cache, takeover
from stratalog_broker.partitions.ownership import Partitions
from stratalog_core.batches.batch import CONTROL_BIT, TRANSACTIONAL_BIT
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt
from stratalog_core.partition_state.transactions import ABORT, COMMIT, AbortedTransaction
from stratalog_metadata.records import Ledger, Log, Partition, Topic, TopicPartition, log_key
from stratalog_metadata.state.commands import Command, Put

PARTITIONS = 4


def create_topic(cluster: MiniCluster, topic: str, replicas: int, **configs: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    (created,) = admin.create_topics([NewTopic(topic, PARTITIONS, replicas, config=configs)]).values()
    created.result(60)


def produce_slowly(bootstrap: str, topic: str, count: int, half_way: threading.Event) -> dict[bytes, tuple[int, int | None]]:
    """Delivered values, their partitions, and their offsets, where librdkafka knows them.

    It does not if only the answer to a later batch came: that acknowledges the batches before it, too.
    """
    delivered: dict[bytes, tuple[int, int | None]] = {}
    failures: list[Any] = []

    def done(error: Any, message: Any) -> None:
        if error is not None:
            failures.append(error)
        else:
            assert message.value() not in delivered
            delivered[message.value()] = (message.partition(), message.offset())

    producer = confluent_kafka.Producer(
        {"bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": True, "linger.ms": 1}
    )
    for number in range(count):
        producer.produce(topic, str(number).encode(), on_delivery=done)
        producer.poll(0.001)
        if number == count // 2:
            half_way.set()
            time.sleep(0.05)
    assert producer.flush(60) == 0
    assert failures == []
    return delivered


async def test_an_idempotent_producer_survives_the_death_of_its_broker(tmp_path: Path) -> None:
    count = 2000
    async with run_cluster(tmp_path, bookies=3, brokers=2) as cluster:
        await in_thread(lambda: create_topic(cluster, "flights", 3))
        half_way = threading.Event()
        bootstrap = cluster.bootstrap
        producing = asyncio.ensure_future(in_thread(lambda: produce_slowly(bootstrap, "flights", count, half_way)))
        await in_thread(half_way.wait)
        await cluster.brokers.pop(1).kill()
        delivered = await producing
        assert len(delivered) == count
        survivor = cluster.bootstrap
        found = await in_thread(lambda: consume(survivor, "flights", count))
        places = [(message.value(), message.partition(), message.offset()) for message in found]
        assert len(places) == len(set(places)) == count
        unknown = {value for value, (_, offset) in delivered.items() if offset is None}
        assert {value: (partition, None if value in unknown else offset) for value, partition, offset in places} == delivered


async def test_a_stopped_broker_hands_over_and_comes_back(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, bookies=1, brokers=1) as cluster:
        await in_thread(lambda: create_topic(cluster, "flights", 1))
        values = [str(number).encode() for number in range(500)]
        first = cluster.bootstrap
        await in_thread(lambda: produce(first, "flights", values[:250]))
        await cluster.brokers.pop(1).stop()
        await cluster.start_broker(1)
        second = cluster.bootstrap
        await in_thread(lambda: produce(second, "flights", values[250:]))
        found = await in_thread(lambda: consume(second, "flights", 500))
        assert sorted(message.value() or b"" for message in found) == sorted(values)


async def test_ledgers_roll_while_a_producer_goes_on(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, bookies=1, brokers=1) as cluster:
        await in_thread(lambda: create_topic(cluster, "flights", 1, **{"segment.bytes": "65536"}))
        values = [str(number).encode() * 200 for number in range(2000)]
        bootstrap = cluster.bootstrap
        await in_thread(lambda: produce(bootstrap, "flights", values, **{"batch.size": 16384}))
        logs = cluster.broker.partitions.all()
        hot = [len(cluster.broker.reader.hot_ledgers(log)) for log in logs if log.topic.name == "flights"]
        assert max(hot) > 3
        await cluster.brokers.pop(1).kill()
        await cluster.start_broker(2)
        survivor = cluster.bootstrap
        found = await in_thread(lambda: consume(survivor, "flights", 2000))
        assert sorted(message.value() or b"" for message in found) == sorted(values)


async def test_a_long_ledger_is_taken_over_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its headers are read a few at a time: a thousand takeovers at once must stay within the broker's memory."""
    monkeypatch.setattr(takeover, "FIRST_HEADS", 3)
    monkeypatch.setattr(index_cache, "RUN_HEADS", 50)
    asked: list[int] = []
    read = LedgerClient.read_headers

    async def read_headers(client: LedgerClient, ledger: Ledger, first: int, last: int) -> list[EntryHead]:
        asked.append(last - first + 1)
        return await read(client, ledger, first, last)

    async with run_cluster(tmp_path, bookies=1, brokers=1) as cluster:
        await in_thread(lambda: create_topic(cluster, "flights", 1))
        await until_all_served(cluster)
        values = [str(number).encode() for number in range(200)]
        client = await cluster.connect()
        for value in values:
            assert (await produce_raw(client, "flights", batch(value))).error_code == 0
        await cluster.brokers.pop(1).kill()
        monkeypatch.setattr(LedgerClient, "read_headers", read_headers)
        await cluster.start_broker(2)
        survivor = cluster.bootstrap
        found = await in_thread(lambda: consume(survivor, "flights", 200))
        assert [message.value() for message in found] == values
        assert {3, 50} <= set(asked)
        assert max(asked) == 50


async def test_acks_1_is_answered_with_the_first_copy_also_in_a_ledger_that_began_without(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, bookies=3) as cluster:
        await in_thread(lambda: create_topic(cluster, "flights", 3))
        await until_all_served(cluster)
        client = await cluster.connect()
        assert (await produce_raw(client, "flights", batch(b"by all"))).error_code == 0
        for name in ("bookie-2", "bookie-3"):
            await cluster.bookies[name].close()
        answer = await produce_raw(client, "flights", batch(b"by one"), acks=1)
        assert (answer.error_code, answer.base_offset) == (0, 1)
        # Nothing can be sealed any more.
        await cluster.brokers.pop(1).kill()


async def test_a_takeover_knows_the_transactions_that_the_last_owner_left(tmp_path: Path) -> None:
    """The type of a marker is in its record, beyond the headers that a takeover reads."""

    def sent(producer_id: int, marker: int | None = None) -> bytearray:
        key = None if marker is None else struct.pack(">hh", 0, marker)
        attributes = TRANSACTIONAL_BIT | (0 if marker is None else CONTROL_BIT)
        record = Record(offset=0, timestamp_ms=1, key=key, value=b"")
        sequence = 0 if marker is None else -1
        identity = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": sequence}
        return build_batch([record], attributes=attributes, **identity)

    async with run_cluster(tmp_path, bookies=1, brokers=1) as cluster:
        await in_thread(lambda: create_topic(cluster, "flights", 1))
        topic = next(topic for topic in cluster.metadata.view.all(Topic) if topic.name == "flights")
        identity = TopicPartition(topic.topic_id, 0)
        await until_served(cluster.broker, topic.topic_id)
        for batch_sent in (sent(1), sent(2), sent(1, ABORT), sent(3), sent(2, COMMIT)):
            await cluster.broker.partitions.append_internal(identity, batch_sent)
        await cluster.brokers.pop(1).kill()
        successor = (await cluster.start_broker(2)).server
        await until_served(successor, topic.topic_id)
        log = successor.partitions.find(identity)
        assert log is not None
        assert (log.core.high_watermark, log.core.last_stable_offset) == (5, 3)
        assert log.core.aborted_between(0, 5) == [AbortedTransaction(1, 0, 2, 1)]


async def test_a_start_that_moves_during_a_takeover_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_cluster(tmp_path, bookies=1, brokers=1) as cluster:
        await in_thread(lambda: create_topic(cluster, "flights", 1))
        topic = next(topic for topic in cluster.metadata.view.all(Topic) if topic.name == "flights")
        identity = TopicPartition(topic.topic_id, 0)
        await until_served(cluster.broker, topic.topic_id)
        for number in range(5):
            await cluster.broker.partitions.append_internal(identity, bytearray(batch(b"%d" % number)))
        await cluster.brokers.pop(1).kill()
        rebuild = takeover.Takeover.rebuild

        async def while_retention_works(self: takeover.Takeover, partition: Partition, *given: Any, **named: Any) -> Any:
            taken = await rebuild(self, partition, *given, **named)
            if partition.topic_id == topic.topic_id and partition.index == 0:
                record = cluster.metadata.view.find(Log, log_key(topic.topic_id, 0))
                assert record is not None
                assert record.log_start_offset == taken.log_start_offset == 0
                await cluster.metadata.propose(Command(updates=(Put(record=replace(record, log_start_offset=4)),)))
                async with asyncio.timeout(WAIT_S):
                    while self._view.find(Log, record.key()) == record:  # noqa: ASYNC110 - no event tells
                        await asyncio.sleep(0.005)
            return taken

        monkeypatch.setattr(takeover.Takeover, "rebuild", while_retention_works)
        successor = (await cluster.start_broker(2)).server
        await until_served(successor, topic.topic_id)
        log = successor.partitions.find(identity)
        assert log is not None
        assert (log.core.log_start_offset, log.core.high_watermark) == (4, 5)


async def test_an_owner_whose_state_is_inconsistent_acknowledges_nothing_and_takes_over_anew(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, bookies=1) as cluster:
        await in_thread(lambda: create_topic(cluster, "flights", 1))
        topic = next(topic for topic in cluster.metadata.view.all(Topic) if topic.name == "flights")
        client = await cluster.connect()
        await until_served(cluster.broker, topic.topic_id)
        assert (await produce_raw(client, "flights", batch(b"first"))).error_code == 0
        broken = cluster.broker.partitions.find_by_id(topic.topic_id.bytes, 0)
        assert broken is not None
        broken.core.log_start_offset = 1000
        answer = await produce_raw(client, "flights", batch(b"second"))
        assert answer.error_code is ErrorCode.not_leader_or_follower
        assert not broken.is_serving
        await until_served(cluster.broker, topic.topic_id)
        assert cluster.broker.partitions.find_by_id(topic.topic_id.bytes, 0) is not broken
        answer = await produce_raw(client, "flights", batch(b"third"))
        assert (answer.error_code, answer.base_offset) == (0, 2)


async def test_a_takeover_that_fails_at_any_step_is_repeated(
    mini_cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_takeovers, "UNEXPECTED_RETRY_S", 0.1)
    partitions = mini_cluster.broker.partitions
    steps: list[tuple[type[object], str]] = [(takeover.Takeover, "rebuild"), (Partitions, "_serve")]
    failures = [Corrupt("a state that cannot be read"), RuntimeError("a defect")]
    for number, ((part, step), failure) in enumerate(itertools.product(steps, failures), 1):
        with monkeypatch.context() as patched:
            failed = fail_once(patched, part, step, failure)
            await in_thread(lambda name=f"flights-{number}": create_topic(mini_cluster, name, 1))  # type: ignore[misc]
            topic = next(topic for topic in mini_cluster.metadata.view.all(Topic) if topic.name == f"flights-{number}")
            for index in range(PARTITIONS):
                await until_served(mini_cluster.broker, topic.topic_id, index)
            assert failed == [failure]
        assert partitions.takeover_metrics.takeover_failures == number
        assert not partitions.takeovers_waiting


def fail_once(patched: pytest.MonkeyPatch, part: type[object], step: str, failure: Exception) -> list[Exception]:
    """Let the next call of ``step`` raise ``failure``; returns the failures raised so far."""
    done, failed = getattr(part, step), list[Exception]()

    def first_fails(*given: Any, **named: Any) -> Any:
        if not failed:
            failed.append(failure)
            raise failure
        return done(*given, **named)

    patched.setattr(part, step, first_fails)
    return failed
