"""Reads of a topic as a plain consumer of committed data does them."""

from __future__ import annotations

import time

from confluent_kafka import Consumer, KafkaError, TopicPartition

TIMEOUT_S = 120.0


def committed_values(bootstrap: str, topic: str, partition: int = 0) -> list[str]:
    """Return the values of a partition, in order, up to the end of what is decided."""
    options = {"bootstrap.servers": bootstrap, "group.id": "reader", "isolation.level": "read_committed", "log_level": 0}
    consumer = Consumer({**options, "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, partition, 0)])
    values: list[str] = []
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while time.monotonic() < deadline:
            for message in consumer.consume(1000, 0.2):
                error, value = message.error(), message.value()
                if error is not None:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    return values
                assert isinstance(value, bytes)
                values.append(value.decode())
    finally:
        consumer.close()
    raise AssertionError(f"{topic}-{partition} has no end after {TIMEOUT_S} s")
