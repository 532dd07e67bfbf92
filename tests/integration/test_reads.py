"""Reads at any offset: many partitions, long polls, seeks by offset and by time."""

from __future__ import annotations

import threading
import time

import pytest
from confluent_kafka import OFFSET_END, Consumer, Producer, TopicPartition
from integration.process_cluster import KEPT_FOR_EVER, ProcessCluster

pytestmark = pytest.mark.integration
TIMEOUT_S = 120.0


def _producer(cluster: ProcessCluster) -> Producer:
    return Producer({"bootstrap.servers": cluster.bootstrap, "linger.ms": 5, "enable.idempotence": True})


def _consumer(cluster: ProcessCluster, **options: str | int) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": cluster.new_group(),
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            **options,
        }
    )


def _take(consumer: Consumer, count: int) -> list[tuple[int, int, bytes | None]]:
    """Return partition, offset and value of the next ``count`` records."""
    taken: list[tuple[int, int, bytes | None]] = []
    while len(taken) < count:
        batch = consumer.consume(count - len(taken), timeout=TIMEOUT_S)
        assert batch, f"{len(taken)} of {count} records within {TIMEOUT_S} s"
        for message in batch:
            assert message.error() is None, message.error()
            taken.append((message.partition() or 0, message.offset() or 0, message.value()))
    return taken


def test_a_hundred_partitions(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic(partitions=100)
    producer = _producer(cluster)
    for number in range(5000):
        producer.produce(topic, str(number).encode(), partition=number % 100)
    assert producer.flush(TIMEOUT_S) == 0
    consumer = _consumer(cluster)
    consumer.subscribe([topic])
    taken = _take(consumer, 5000)
    consumer.close()
    assert sorted(int(value or b"-1") for _, _, value in taken) == list(range(5000))
    for partition in range(100):
        assert [offset for found, offset, _ in taken if found == partition] == list(range(50))


def test_a_long_poll_is_answered_when_a_record_comes(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic()
    # ``_take`` gives up long before an empty answer comes.
    options = {"fetch.wait.max.ms": 240_000, "socket.timeout.ms": 300_000, "fetch.error.backoff.ms": 100}
    consumer = _consumer(cluster, **options)
    consumer.assign([TopicPartition(topic, 0, 0)])
    producer = _producer(cluster)
    producer.produce(topic, b"first")
    assert producer.flush(TIMEOUT_S) == 0
    _take(consumer, 1)

    def send_later() -> None:
        time.sleep(1)  # The consumer's next fetch waits at the broker by then.
        producer.produce(topic, b"second")
        producer.flush(TIMEOUT_S)

    sender = threading.Thread(target=send_later)
    sender.start()
    ((_, offset, value),) = _take(consumer, 1)
    sender.join()
    consumer.close()
    assert (offset, value) == (1, b"second")


def test_seeks_by_offset(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic()
    producer = _producer(cluster)
    for number in range(1000):
        producer.produce(topic, str(number).encode())
    assert producer.flush(TIMEOUT_S) == 0
    consumer = _consumer(cluster)
    for offset in (999, 0, 500, 1):
        consumer.assign([TopicPartition(topic, 0, offset)])
        assert _take(consumer, 1) == [(0, offset, str(offset).encode())]
    consumer.assign([TopicPartition(topic, 0, OFFSET_END)])
    assert consumer.consume(1, timeout=0.5) == []
    assert consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=TIMEOUT_S) == (0, 1000)
    consumer.close()


def test_seeks_by_time_although_times_are_not_monotonic(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic(configs=KEPT_FOR_EVER)
    times_ms = [1000, 5000, 3000, 9000, 2000, 7000]
    producer = _producer(cluster)
    for time_ms in times_ms:
        producer.produce(topic, str(time_ms).encode(), timestamp=time_ms)
        assert producer.flush(TIMEOUT_S) == 0
    consumer = _consumer(cluster)
    for wanted_ms in (0, 1000, 1001, 4000, 6000, 9000):
        (place,) = consumer.offsets_for_times([TopicPartition(topic, 0, wanted_ms)], timeout=TIMEOUT_S)
        expected = next(offset for offset, time_ms in enumerate(times_ms) if time_ms >= wanted_ms)
        assert place.offset == expected, wanted_ms
    (place,) = consumer.offsets_for_times([TopicPartition(topic, 0, 9001)], timeout=TIMEOUT_S)
    assert place.offset == OFFSET_END
    consumer.close()
