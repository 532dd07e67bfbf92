"""Every client reads every client's records, with every compression: same keys, values, headers, timestamps, order.

Unmodified confluent-kafka, kafka-python, aiokafka and kcat. Null and empty keys and values, headers, a megabyte.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, KafkaError, Producer
from integration.process_cluster import KEPT_FOR_EVER, ProcessCluster
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

pytestmark = pytest.mark.integration
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
TIMEOUT_S = 120.0
MEGABYTE = 1_000_000
REQUEST_BYTES_MAX = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp_ms: int = 0


def _sample(client: str) -> list[Record]:
    """Return small records with all special cases, then one of a megabyte that does not compress."""
    large = random.Random(client).randbytes(MEGABYTE)
    return [
        Record(key=f"{client}-key".encode(), value=b"plain", timestamp_ms=1_372_896_000_000),
        Record(key=None, value=b"no key", timestamp_ms=1_372_896_000_001),
        Record(key=b"no value", value=None, timestamp_ms=1_372_895_999_000),
        Record(key=b"", value=b"", timestamp_ms=1_372_896_000_002),
        Record(key=b"h", value=b"v", headers=(("a", b"1"), ("a", b"2"), ("empty", b"")), timestamp_ms=1_372_896_000_003),
        *(Record(key=b"k", value=f"{client} {number}".encode() * 20, timestamp_ms=number + 1) for number in range(200)),
        Record(key=b"large", value=large, timestamp_ms=1_372_896_000_004),
    ]


def _confluent_produce(bootstrap: str, topic: str, codec: str, records: Sequence[Record]) -> None:
    failures: list[KafkaError] = []
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "compression.type": codec,
            "enable.idempotence": True,
            "message.max.bytes": REQUEST_BYTES_MAX,
            "linger.ms": 5,
        }
    )
    for record in records:
        producer.produce(
            topic,
            value=record.value,
            key=record.key,
            headers=list(record.headers),
            timestamp=record.timestamp_ms,
            on_delivery=lambda failure, _: failures.append(failure) if failure else None,
        )
    assert producer.flush(TIMEOUT_S) == 0
    assert not failures


def _confluent_consume(bootstrap: str, topic: str, count: int) -> list[Record]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"confluent-{topic}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    consumer.subscribe([topic])
    records: list[Record] = []
    try:
        while len(records) < count:
            batch = consumer.consume(count - len(records), timeout=TIMEOUT_S)
            assert batch, f"{len(records)} of {count} records within {TIMEOUT_S} s"
            for message in batch:
                assert message.error() is None, message.error()
                headers = tuple(_pairs(message.headers()))
                found = Record(key=message.key(), value=message.value(), headers=headers, timestamp_ms=message.timestamp()[1])
                records.append(found)
    finally:
        consumer.close()
    return records


def _pairs(headers: Any) -> list[tuple[str, bytes]]:
    """Return the headers as a list: confluent-kafka returns a list of pairs or ``None``, but its types allow more."""
    return list(headers or [])


def _kafka_python_produce(bootstrap: str, topic: str, codec: str, records: Sequence[Record]) -> None:
    producer = KafkaProducer(
        bootstrap_servers=bootstrap.split(","),
        compression_type=None if codec == "none" else codec,
        enable_idempotence=True,
        max_request_size=REQUEST_BYTES_MAX,
        linger_ms=5,
    )
    try:
        futures = [
            producer.send(
                topic, value=record.value, key=record.key, headers=list(record.headers), timestamp_ms=record.timestamp_ms
            )
            for record in records
        ]
        for future in futures:
            future.get(TIMEOUT_S)
    finally:
        producer.close()


def _kafka_python_consume(bootstrap: str, topic: str, count: int) -> list[Record]:
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap.split(","),
        enable_auto_commit=False,
        consumer_timeout_ms=int(TIMEOUT_S * 1000),
        auto_offset_reset="earliest",
    )
    partition = TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    records: list[Record] = []
    try:
        for message in consumer:
            headers = tuple((name, value) for name, value in message.headers)
            records.append(Record(key=message.key, value=message.value, headers=headers, timestamp_ms=message.timestamp))
            if len(records) == count:
                break
    finally:
        consumer.close()
    return records


async def _aiokafka_produce(bootstrap: str, topic: str, codec: str, records: Sequence[Record]) -> None:
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        compression_type=None if codec == "none" else codec,
        enable_idempotence=True,
        max_request_size=REQUEST_BYTES_MAX,
        linger_ms=5,
    )
    await producer.start()
    try:
        acknowledged = [
            await producer.send(
                topic, value=record.value, key=record.key, headers=list(record.headers), timestamp_ms=record.timestamp_ms
            )
            for record in records
        ]
        for future in acknowledged:
            await future
    finally:
        await producer.stop()


async def _aiokafka_consume(bootstrap: str, topic: str, count: int) -> list[Record]:
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, group_id=f"aiokafka-{topic}", auto_offset_reset="earliest", enable_auto_commit=False
    )
    await consumer.start()
    records: list[Record] = []
    try:
        while len(records) < count:
            batches = await consumer.getmany(timeout_ms=int(TIMEOUT_S * 1000))
            assert batches, f"{len(records)} of {count} records within {TIMEOUT_S} s"
            for message in (message for batch in batches.values() for message in batch):
                headers = tuple(message.headers)
                records.append(Record(key=message.key, value=message.value, headers=headers, timestamp_ms=message.timestamp))
    finally:
        await consumer.stop()
    return records


def _kcat_produce(program: str, bootstrap: str, topic: str, codec: str, values: Sequence[str]) -> None:
    command = [program, "-P", "-b", bootstrap, "-t", topic, "-z", codec, "-p", "0", "-k", "kcat", "-H", "by=kcat", "-E"]
    command += ["-X", "enable.idempotence=true"]
    subprocess.run(command, input="\n".join(values) + "\n", text=True, check=True, timeout=TIMEOUT_S, capture_output=True)


def _kcat_consume(program: str, bootstrap: str, topic: str, count: int) -> list[dict[str, object]]:
    command = [program, "-C", "-b", bootstrap, "-t", topic, "-o", "beginning", "-c", str(count), "-e", "-q", "-J"]
    done = subprocess.run(command, check=True, timeout=TIMEOUT_S, capture_output=True)
    return [json.loads(line) for line in done.stdout.decode(errors="replace").splitlines()]


@pytest.mark.parametrize("codec", CODECS)
async def test_every_client_reads_what_every_client_wrote(cluster: ProcessCluster, codec: str) -> None:
    topic = cluster.new_topic(configs=KEPT_FOR_EVER)
    samples = {name: _sample(name) for name in ("confluent", "kafka-python", "aiokafka")}
    _confluent_produce(cluster.bootstrap, topic, codec, samples["confluent"])
    _kafka_python_produce(cluster.bootstrap, topic, codec, samples["kafka-python"])
    await _aiokafka_produce(cluster.bootstrap, topic, codec, samples["aiokafka"])
    expected = [record for sample in samples.values() for record in sample]

    readers: tuple[Callable[[str, str, int], list[Record]], ...] = (_confluent_consume, _kafka_python_consume)
    for read in readers:
        assert read(cluster.bootstrap, topic, len(expected)) == expected
    assert await _aiokafka_consume(cluster.bootstrap, topic, len(expected)) == expected


@pytest.mark.parametrize("codec", CODECS)
def test_kcat_writes_and_reads(cluster: ProcessCluster, kcat: str, codec: str) -> None:
    topic = cluster.new_topic()
    values = [f"line {number}" for number in range(500)]
    _kcat_produce(kcat, cluster.bootstrap, topic, codec, values)
    found = _kcat_consume(kcat, cluster.bootstrap, topic, len(values))
    assert [record["payload"] for record in found] == values
    assert [record["offset"] for record in found] == list(range(500))
    assert {record["key"] for record in found} == {"kcat"}
    assert all(record["headers"] == ["by", "kcat"] for record in found)
    assert _confluent_consume(cluster.bootstrap, topic, len(values))[-1].value == b"line 499"
