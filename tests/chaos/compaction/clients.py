"""Unmodified librdkafka clients of compacted topics: an idempotent producer, a transactional one, and readers of everything."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from chaos.client import Client
from chaos.compaction.readings import Readings
from chaos.compaction.sends import NUMBER, PLACES, Send, Sends
from chaos.consumers import librdkafka_config
from chaos.history import Recorder
from chaos.outcomes import State
from chaos.transactions import TransactionalClient

_STOP_S: Final = 60.0
_STUCK_S: Final = 120.0
_IN_FLIGHT_MAX: Final = 500
_RECORDS_PER_TRANSACTION: Final = 8


def produce(producer: Producer, send: Send, on_delivery: Callable[[KafkaError | None, Message], None]) -> None:
    topic, partition = send.place
    headers: list[tuple[str, str | bytes | None]] = [(NUMBER, b"%d" % send.number)]
    producer.produce(topic, send.value, send.key, partition, on_delivery=on_delivery, headers=headers)


class KeyedProducer(Client):
    """Idempotent. A fatal error, which ``poll`` raises, ends it, and the run reports that."""

    def __init__(self, name: str, recorder: Recorder, sends: Sends, bootstrap: str, *, per_s: float, seed: int) -> None:
        super().__init__(name, recorder)
        self._sends = sends
        self._interval_s = 1 / per_s
        self._random = random.Random(seed)
        self._settled_s = 0.0
        self._config: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "linger.ms": 20,
            "delivery.timeout.ms": 300_000,
            "request.timeout.ms": 10_000,
            "socket.timeout.ms": 10_000,
            "reconnect.backoff.max.ms": 1000,
            "log_level": 0,
        }

    def run_session(self) -> None:
        self._settled_s = time.monotonic()
        producer = Producer(self._config)
        while not (self.stopping.is_set() or self._is_stuck()):
            if len(producer) < _IN_FLIGHT_MAX:
                send = self._sends.begin(self.name, self._random)
                produce(producer, send, partial(self._delivered, send))
            producer.poll(self._random.expovariate(1) * self._interval_s)
        deadline = time.monotonic() + _STOP_S
        while len(producer) and self.stopping.is_set() and time.monotonic() < deadline:
            producer.flush(1)
        if len(producer):
            self.sessions_given_up += 1
        producer.purge()
        producer.flush(1)

    def _is_stuck(self) -> bool:
        return time.monotonic() - self._settled_s > _STUCK_S

    def _delivered(self, send: Send, failure: KafkaError | None, message: Message) -> None:
        self._settled_s = time.monotonic()
        if failure is None:
            send.offset, send.state = message.offset(), State.COMMITTED


class KeyedTransactionalProducer(TransactionalClient):
    """Writes some records of its own keys in each transaction."""

    def __init__(self, name: str, recorder: Recorder, sends: Sends, bootstrap: str, *, per_s: float, seed: int) -> None:
        super().__init__(name, recorder, bootstrap, per_s=per_s, seed=seed)
        self._sends = sends

    def write(self, producer: Producer) -> Callable[[State], None]:
        written: list[Send] = []
        for _ in range(self.random.randint(1, _RECORDS_PER_TRANSACTION)):
            send = self._sends.begin(self.name, self.random)
            send.state = State.ABORTED
            written.append(send)
            produce(producer, send, partial(self._note_offset, send))
        return partial(_note_state, written)

    def _note_offset(self, send: Send, failure: KafkaError | None, message: Message) -> None:
        self.note_delivery(failure, message)
        if failure is None:
            send.offset = message.offset()


def _note_state(written: list[Send], state: State) -> None:
    for send in written:
        send.state = state


class CompactedReader(Client):
    """Reads all committed records of all partitions from offset 0 on, again and again, while they are compacted."""

    def __init__(self, name: str, recorder: Recorder, readings: Readings, bootstrap: str, *, seed: int) -> None:
        super().__init__(name, recorder)
        self._bootstrap = bootstrap
        self._readings = readings
        self._random = random.Random(seed)

    def run_session(self) -> None:
        scan = self._readings.begin()
        consumer = Consumer({**librdkafka_config(self._bootstrap, self.name), "isolation.level": "read_committed"})
        consumer.assign([TopicPartition(*place, 0) for place in PLACES])
        until = time.monotonic() + self._random.uniform(4, 15)
        try:
            while time.monotonic() < until and not self.stopping.is_set():
                for message in consumer.consume(500, timeout=0.5):
                    if message.error() is None:
                        scan.add(message)
        finally:
            consumer.close()
