"""Unmodified producers that record every send: librdkafka with and without idempotence, and kafka-python.

A send that ends with an error is unknown unless the error proves that no attempt can have been appended: a client's error
describes only its last attempt.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from typing import Final

from confluent_kafka import KafkaError, Message, Producer
from kafka import KafkaProducer
from kafka.errors import KafkaError as PythonKafkaError

from chaos.client import Client
from chaos.history import Operation, Recorder, Type
from chaos.workload import KEYS, MESSAGE_BYTES_MAX, Values, encode, encode_oversized, place_of

_WINDOW: Final = 60
"""Concurrent sends of one producer."""
_STOP_S: Final = 60.0
_SURELY_FAILED: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE})
_OVERSIZED_EVERY: Final = 150
_STUCK_S: Final = 120.0
"""A producer is stuck if none of its sends completes for this long, whatever the faults."""


class Sends:
    """Process numbers for one client's concurrent sends: each process has one send in flight."""

    def __init__(self, name: str, recorder: Recorder, *, idempotent: bool) -> None:
        self._name = name
        self._recorder = recorder
        self._idempotent = idempotent
        self._free = [recorder.new_process() for _ in range(_WINDOW)]
        self._lock = threading.Lock()
        self._room = threading.Semaphore(_WINDOW)

    def begin(self, key: int, value: int, timeout_s: float) -> Operation | None:
        """Record the invocation; None if the window stayed full."""
        if not self._room.acquire(timeout=timeout_s):
            return None
        with self._lock:
            process = self._free.pop()
        return self._recorder.record(
            process, "invoke", "send", client=self._name, idempotent=self._idempotent, key=key, value=value
        )

    def end(self, send: Operation, type: Type, *, offset: int | None = None, error: str = "") -> None:
        """Record the outcome; a process with an unknown outcome is replaced by a new one."""
        self._recorder.record(
            send.process, type, "send",
            client=self._name, idempotent=self._idempotent, key=send.key, value=send.value, offset=offset, error=error,
        )  # fmt: skip
        process = self._recorder.new_process() if type == "info" else send.process
        with self._lock:
            self._free.append(process)
        self._room.release()

    def settle(self, timeout_s: float) -> None:
        """Wait until nothing is in flight, at most ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        for _ in range(_WINDOW):
            if not self._room.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return


class SteadyProducer(Client):
    """Base of all producers: a rate, random keys, unique values."""

    def __init__(
        self, name: str, recorder: Recorder, values: Values, bootstrap: str, *, per_s: float, seed: int, idempotent: bool
    ) -> None:
        super().__init__(name, recorder)
        self.bootstrap = bootstrap
        self.sends = Sends(name, recorder, idempotent=idempotent)
        self._values = values
        self._interval_s = 1 / per_s
        self._random = random.Random(seed)

    def next_send(self) -> tuple[int, int]:
        """Return key and value of the next send."""
        return self._random.choice(KEYS), self._values.next()

    def pause_s(self) -> float:
        """Return the time until the next send: random, so that batches of all sizes occur."""
        return self._random.expovariate(1) * self._interval_s

    def wants_oversized(self) -> bool:
        return self._random.randrange(_OVERSIZED_EVERY) == 0


DRAIN: Final = re.compile(r"Beginning partition drain (?:in state \w+ )?for .* with in-flight requests: (.*)")
"""librdkafka's log line (debug=eos) before it bumps its epoch or requests a new producer id; 2.16 names its state there."""


class _Epochs(logging.Handler):
    """Records when and why librdkafka starts an epoch: its log uses the same queue as its delivery reports, in order."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        super().__init__()
        self._name = name
        self._recorder = recorder
        self._process = recorder.new_process()

    def emit(self, record: logging.LogRecord) -> None:
        reason = DRAIN.search(record.getMessage())
        if reason:
            self._recorder.record(self._process, "info", "epoch", client=self._name, error=reason[1])


class LibrdkafkaProducer(SteadyProducer):
    """confluent-kafka. A fatal error, which ``poll`` raises, ends it, and the run reports that."""

    def __init__(
        self,
        name: str,
        recorder: Recorder,
        values: Values,
        bootstrap: str,
        *,
        per_s: float,
        seed: int,
        idempotent: bool,
        delivery_timeout_ms: int,
    ) -> None:
        super().__init__(name, recorder, values, bootstrap, per_s=per_s, seed=seed, idempotent=idempotent)
        self._idempotent = idempotent
        self._settled_at = 0.0
        logger = logging.getLogger(f"librdkafka.{name}")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(_Epochs(name, recorder))
        self._config = {
            "bootstrap.servers": bootstrap,
            "client.id": name,
            "enable.idempotence": idempotent,
            "acks": "all",
            "linger.ms": 5,
            "batch.size": MESSAGE_BYTES_MAX // 2,
            "delivery.timeout.ms": delivery_timeout_ms,
            "request.timeout.ms": min(10_000, delivery_timeout_ms),
            "socket.timeout.ms": 10_000,
            "reconnect.backoff.max.ms": 1000,
            # Only its log reports its epochs. It has also been seen to wait forever for sends in flight.
            **({"debug": "eos", "logger": logger} if idempotent else {"log_level": 0}),
        }

    def run_session(self) -> None:
        self._settled_at = time.monotonic()
        producer = Producer(self._config)
        while not self.stopping.is_set() and not self._is_stuck():
            self._send(producer)
            producer.poll(self.pause_s())
        deadline = time.monotonic() + _STOP_S
        while len(producer) and self.stopping.is_set() and time.monotonic() < deadline:
            producer.flush(1)
        if len(producer):
            self.sessions_given_up += 1
        producer.purge()
        producer.flush(1)

    def _is_stuck(self) -> bool:
        return time.monotonic() - self._settled_at > _STUCK_S

    def _send(self, producer: Producer) -> None:
        key, value = self.next_send()
        # A refused record would end an idempotent producer's session for an unrelated reason.
        oversized = not self._idempotent and self.wants_oversized()
        send = self.sends.begin(key, value, 0)
        if send is None:
            return
        topic, partition = place_of(key)
        content = encode_oversized(key, value) if oversized else encode(key, value)
        begun = send

        def delivered(failure: KafkaError | None, message: Message) -> None:
            self._delivered(begun, failure, message)

        producer.produce(topic, content, partition=partition, on_delivery=delivered)

    def _delivered(self, send: Operation, failure: KafkaError | None, message: Message) -> None:
        self._settled_at = time.monotonic()
        if failure is None:
            self.sends.end(send, "ok", offset=message.offset())
            return
        self.sends.end(send, "fail" if failure.code() in _SURELY_FAILED else "info", error=failure.name())


class PythonProducer(SteadyProducer):
    """kafka-python, without idempotence."""

    def run_session(self) -> None:
        try:
            producer = KafkaProducer(
                bootstrap_servers=self.bootstrap.split(","),
                client_id=self.name,
                acks="all",
                enable_idempotence=False,
                linger_ms=5,
                request_timeout_ms=10_000,
                delivery_timeout_ms=20_000,
                max_block_ms=10_000,
                reconnect_backoff_max_ms=1000,
            )
        except PythonKafkaError:
            self.stopping.wait(1)
            return
        try:
            while not self.stopping.is_set():
                self._send(producer)
                self.stopping.wait(self.pause_s())
        finally:
            self.sends.settle(_STOP_S)
            producer.close(timeout=5)

    def _send(self, producer: KafkaProducer) -> None:
        key, value = self.next_send()
        send = self.sends.begin(key, value, 1)
        if send is None:
            return
        topic, partition = place_of(key)
        try:
            future = producer.send(topic, encode(key, value), partition=partition)
        except PythonKafkaError as failure:
            # Nothing was sent: the topic's metadata did not arrive in time.
            self.sends.end(send, "fail", error=type(failure).__name__)
            return
        begun = send
        future.add_callback(lambda found: self.sends.end(begun, "ok", offset=found.offset))
        future.add_errback(lambda failure: self.sends.end(begun, "info", error=type(failure).__name__))
