"""Topics of a suite: created, filled and read with confluent-kafka, on either cluster."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

COPIES: Final = 2
"""Of each topic: as many as the control has brokers."""
_TIMEOUT_S: Final = 120.0


def create(
    bootstrap: str, topic: str, *, partitions: int, copies: int = COPIES, configs: Mapping[str, str] | None = None
) -> None:
    """Create a topic. Raises ``KafkaException``."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    new = NewTopic(topic, num_partitions=partitions, replication_factor=copies, config=dict(configs or {}))
    admin.create_topics([new])[topic].result(30)


def fill(bootstrap: str, topic: str, values: Iterable[str]) -> None:
    """Append records; return when all are acknowledged."""
    producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0})
    failures: list[object] = []
    for value in values:
        producer.produce(topic, value, on_delivery=lambda failure, _: failures.extend([failure] if failure else []))
    assert producer.flush(60) == 0
    assert failures == []


def read(bootstrap: str, topic: str, count: int, group: str | None = None) -> list[tuple[int, str]]:
    """Return the partition and value of ``count`` committed records, and of those that come within two seconds after them.

    The records are those after the position of ``group``, or all.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap, "group.id": group or f"check-{topic}", "auto.offset.reset": "earliest",
            "isolation.level": "read_committed", "enable.auto.commit": False, "log_level": 0,
        }
    )  # fmt: skip
    found: list[tuple[int, str]] = []
    try:
        consumer.subscribe([topic])
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            batch = consumer.consume(10_000, 2.0)
            found += [(int(each.partition() or 0), (each.value() or b"").decode()) for each in batch if each.error() is None]
            if len(found) >= count and not batch:
                break
    finally:
        consumer.close()
    return found
