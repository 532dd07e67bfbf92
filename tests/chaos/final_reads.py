"""Reads everything again from offset 0 after all faults: an acknowledged record that is not found now is lost."""

from __future__ import annotations

import time
from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaError, TopicPartition

from chaos.consumers import Reader, add_message, librdkafka_config
from chaos.history import Recorder
from chaos.workload import KEYS, key_of, place_of

_BATCH_MAX = 2000


def read_everything(name: str, recorder: Recorder, bootstrap: str, timeout_s: float) -> Mapping[int, int]:
    """Poll all keys from the beginning; return their ends by key. A key whose end was not reached is missing."""
    config = {**librdkafka_config(bootstrap, name), "enable.partition.eof": True, "auto.offset.reset": "error"}
    consumer, reader = Consumer(config), Reader(name, recorder)
    reader.assigned(KEYS, from_beginning=True)
    consumer.assign([TopicPartition(*place_of(key), 0) for key in KEYS])
    ends: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(ends) < len(KEYS) and time.monotonic() < deadline:
            reader.begin()
            for message in consumer.consume(_BATCH_MAX, timeout=1):
                failure = message.error()
                if failure is None:
                    add_message(reader, message)
                elif failure.code() == KafkaError._PARTITION_EOF:
                    ends[key_of(message.topic() or "", message.partition() or 0)] = message.offset() or 0
            reader.end()
    finally:
        consumer.close()
    return ends
