"""Acknowledged records survive kill -9: of a broker, of a bookie, of everything at once. Retries never duplicate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from integration.process_cluster import ProcessCluster

pytestmark = pytest.mark.integration
TIMEOUT_S = 90.0
PARTITIONS = 6


@dataclass
class Sender:
    """An idempotent producer that remembers where and when its records were acknowledged."""

    bootstrap: str
    topic: str
    acknowledged: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    """Partition and offset. librdkafka does not know the offset of a batch of which only a later one's answer came."""
    acknowledged_at: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    sent: int = 0

    def __post_init__(self) -> None:
        self.producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 2,
                "delivery.timeout.ms": int(TIMEOUT_S * 1000),
                "log_level": 0,
            }
        )

    def send(self, count: int, *, per_s: float) -> None:
        """Send ``count`` records round robin over the partitions, evenly spaced in time."""
        began = time.monotonic()
        for number in range(count):
            value = str(self.sent).encode()
            self.producer.produce(self.topic, value, partition=self.sent % PARTITIONS, on_delivery=self._delivered)
            self.sent += 1
            self.producer.poll(max(0.0, began + number / per_s - time.monotonic()))

    def flush(self) -> None:
        assert self.producer.flush(TIMEOUT_S) == 0
        assert not self.failures, self.failures[:3]

    def longest_gap_s(self) -> float:
        """Return the longest time without an acknowledgement."""
        return max(later - earlier for earlier, later in zip(self.acknowledged_at, self.acknowledged_at[1:], strict=False))

    def _delivered(self, failure: KafkaError | None, message: Message) -> None:
        if failure is not None:
            self.failures.append(failure.str())
            return
        self.acknowledged_at.append(time.monotonic())
        self.acknowledged[int(message.value() or b"-1")] = (message.partition() or 0, message.offset())


def _read_all(cluster: ProcessCluster, topic: str, count: int) -> list[tuple[int, int, int]]:
    """Return value, partition and offset of every record in ``topic``; fail unless there are exactly ``count``."""
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": cluster.new_group(),
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    found: list[tuple[int, int, int]] = []
    ended: set[int] = set()
    deadline = time.monotonic() + TIMEOUT_S
    while len(ended) < PARTITIONS:
        assert time.monotonic() < deadline, f"{len(found)} of {count} records"
        for message in consumer.consume(1000, timeout=1):
            failure = message.error()
            if failure is None:
                found.append((int(message.value() or b"-1"), message.partition() or 0, message.offset() or 0))
            elif failure.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition() or 0)
            else:
                assert failure.retriable(), failure
    consumer.close()
    assert len(found) == count
    return found


def check(cluster: ProcessCluster, sender: Sender) -> None:
    """Check that every record is there once, where its acknowledgement said, in the order of sending per partition."""
    assert len(sender.acknowledged) == sender.sent
    found = _read_all(cluster, sender.topic, sender.sent)
    unknown = {value for value, (_, offset) in sender.acknowledged.items() if offset is None}
    places = {value: (partition, None if value in unknown else offset) for value, partition, offset in found}
    assert places == sender.acknowledged
    for partition in range(PARTITIONS):
        values = [value for value, where, _ in found if where == partition]
        assert values == sorted(values)


def _send_through_a_kill(cluster: ProcessCluster, sender: Sender, victim: str) -> None:
    """Continue sending while the victim is killed, and for some seconds more."""
    sender.send(1000, per_s=1000)
    killing = threading.Thread(target=cluster.kill, args=(victim,))
    killing.start()
    sender.send(4000, per_s=500)
    killing.join()
    sender.flush()


@pytest.fixture
def sender(cluster: ProcessCluster) -> Iterator[Sender]:
    topic = cluster.new_topic(partitions=PARTITIONS)
    yield Sender(cluster.bootstrap, topic)
    cluster.run("cluster", "start")


@pytest.mark.parametrize("victim", ["broker-2", "bookie-2"])
def test_retries_over_a_killed_role_lose_and_duplicate_nothing(
    cluster: ProcessCluster, sender: Sender, victim: str, record_property: Callable[[str, object], None]
) -> None:
    _send_through_a_kill(cluster, sender, victim)
    record_property("longest_gap_s", sender.longest_gap_s())
    print(f"longest gap at the death of {victim}: {sender.longest_gap_s():.2f} s")
    cluster.restart(victim)
    sender.send(500, per_s=500)
    sender.flush()
    check(cluster, sender)


def test_the_whole_cluster_killed_at_once(cluster: ProcessCluster, sender: Sender) -> None:
    sender.send(3000, per_s=1500)
    sender.flush()
    everything = [process["name"] for process in cluster.json("cluster", "status")["processes"]]
    cluster.kill(*everything)
    cluster.run("cluster", "start")
    check(cluster, sender)
    sender.send(500, per_s=1000)
    sender.flush()
    check(cluster, sender)
