"""Producer loads: as fast as the cluster takes it, or at a fixed rate whatever the cluster does.

At full speed the loop hands chunks to librdkafka and follows one record of each chunk to its acknowledgement; the rate is what
was acknowledged between the end of the warm-up and the end of the run. At a fixed rate every record has a moment at which it
should leave; its latency counts from that moment, even if the client could not take it then. A stall therefore shows in all the
records that should have been sent during it, and not only in one (no coordinated omission).
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from stratalog.bench.control import Control, cpu_s, resident_bytes
from stratalog.bench.gaps import Gaps
from stratalog.bench.histogram import Histogram
from stratalog.bench.loads import Counted, ProducerLoad
from stratalog.bench.payloads import payloads, stamped

_CHUNK_RECORDS_MAX = 100
_CHUNK_BYTES_MAX = 256 * 1024
_FLUSH_TIMEOUT_S = 120.0
_FULL_WAIT_S = 0.005
_CATCH_UP_RECORDS = 1000
_SWITCH_INTERVAL_S = 0.0005


def run_producers(load: ProducerLoad, control: Control) -> Counted:
    """Carry the load out; returns when everything that was sent is acknowledged or has failed."""
    work = (_Paced if load.records_per_s else _FullSpeed)(load, control)
    for producer in work.producers:
        producer.list_topics(load.topics[0], timeout=30)
    control.wait_for_go()
    return work.run()


class _Work:
    def __init__(self, load: ProducerLoad, control: Control) -> None:
        self.load = load
        self.control = control
        self.producers = [Producer(load.client) for _ in range(load.producers)]
        self.pool = payloads(load.payload, load.seed)
        self.latency = Histogram()
        self.behind = Histogram()
        self.gaps = Gaps()
        self.sent = 0
        self.failed = 0
        self.failure = ""
        self.measures_from_ns = 0

    def run(self) -> Counted:
        raise NotImplementedError

    def acknowledged(self) -> int:
        """Records that librdkafka is done with."""
        return self.sent - sum(map(len, self.producers))

    def delivered(self, intended_ns: int, failure: KafkaError | None, message: Message) -> None:
        if failure is not None:
            self.failed += 1
            self.failure = failure.str()
            return
        now = time.monotonic_ns()
        if self.load.each_partition:
            self.gaps.acknowledged(message.topic() or "", message.partition() or 0, now)
        if intended_ns >= self.measures_from_ns:
            self.latency.record((now - intended_ns) // 1000)

    def wait_until_delivered(self) -> None:
        for producer in self.producers:
            producer.flush(_FLUSH_TIMEOUT_S)
        left = sum(map(len, self.producers))
        if left:
            self.failed += left
            self.failure = f"{left} records were not acknowledged within {_FLUSH_TIMEOUT_S:.0f} s of the end"

    def counted(self, records: int, began_at: float, ended_at: float, cpu: float) -> Counted:
        return Counted(
            records=records,
            record_bytes=records * self.load.payload.record_bytes,
            began_at=began_at,
            ended_at=ended_at,
            sent=self.sent,
            failed=self.failed,
            failure=self.failure,
            latency=self.latency.buckets(),
            latency_max_us=self.latency.maximum_us,
            behind=self.behind.buckets(),
            behind_max_us=self.behind.maximum_us,
            gaps=self.gaps.longest(),
            cpu_s=cpu,
            resident_bytes=resident_bytes(),
        )

    def running(self) -> bool:
        within = self.control.elapsed_s() < self.load.warmup_s + self.load.duration_s
        more = not self.load.records or self.sent < self.load.records
        return self.control.running(self.sent) and more and (within or bool(self.load.records))


class _FullSpeed(_Work):
    """Keeps every producer's queue filled."""

    def run(self) -> Counted:
        chunks = self._chunks()
        topics = itertools.cycle(self.load.topics)
        while self.running() and self.control.elapsed_s() < self.load.warmup_s:
            self._round(topics, chunks)
        self.measures_from_ns = time.monotonic_ns()
        before, began, cpu = self.acknowledged(), time.monotonic(), cpu_s()
        while self.running():
            self._round(topics, chunks)
        records, ended = self.acknowledged() - before, time.monotonic()
        self.wait_until_delivered()
        if self.load.records:
            records, ended = self.sent - self.failed, time.monotonic()
        cpu = cpu_s() - cpu
        return self.counted(records, began, ended, cpu)

    def _round(self, topics: Iterator[str], chunks: Iterator[list[dict[str, Any]]]) -> None:
        taken = sum(self._hand_over(producer, next(topics), next(chunks)) for producer in self.producers)
        self.sent += taken
        if not taken:
            time.sleep(_FULL_WAIT_S)

    def _hand_over(self, producer: Producer, topic: str, chunk: list[dict[str, Any]]) -> int:
        """How many the client's queue took: the front of the chunk. Raises ``KafkaException`` if it refused one for good."""
        if self.load.records:
            chunk = chunk[: max(0, self.load.records - self.sent)]
        chunk[:1] = [{**message, "callback": partial(self.delivered, time.monotonic_ns())} for message in chunk[:1]]
        taken = int(producer.produce_batch(topic, chunk)) if chunk else 0
        producer.poll(0)
        if taken < len(chunk) and chunk[-1]["_error"].code() != KafkaError._QUEUE_FULL:
            raise KafkaException(chunk[-1]["_error"])
        return taken

    def _chunks(self) -> Iterator[list[dict[str, Any]]]:
        """Chunks made beforehand and used again and again, so that the loop makes nothing per record."""
        size = max(1, min(_CHUNK_RECORDS_MAX, _CHUNK_BYTES_MAX // max(1, self.load.payload.record_bytes)))
        values, keys = itertools.cycle(self.pool), _keys(self.load)
        made = max(1, -(-len(self.pool) // size))
        return itertools.cycle([[_message(next(values), next(keys)) for _ in range(size)] for _ in range(made)])


class _Paced(_Work):
    """One record at each of its moments; a thread per producer waits for acknowledgements."""

    def run(self) -> Counted:
        # The thread that learns of an acknowledgement must not wait for the sending thread's slice of the interpreter.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        ended = threading.Event()
        pollers = [threading.Thread(target=_poll_until, args=(producer, ended), daemon=True) for producer in self.producers]
        for poller in pollers:
            poller.start()
        cpu = cpu_s()
        self.measures_from_ns = round((self.control.began + self.load.warmup_s) * 1e9)
        self._send_all()
        ended_at = time.monotonic()
        self.wait_until_delivered()
        ended.set()
        for poller in pollers:
            poller.join()
        began_at = self.measures_from_ns / 1e9
        return self.counted(self.latency.count, began_at, max(began_at, ended_at), cpu_s() - cpu)

    def _send_all(self) -> None:
        began_ns = round(self.control.began * 1e9)
        interval_ns = 1e9 / self.load.records_per_s
        targets, values, keys = self._targets(), itertools.cycle(self.pool), _keys(self.load)
        producers = itertools.cycle(self.producers)
        while self.running():
            due = int((time.monotonic_ns() - began_ns) / interval_ns) + 1
            for number in range(self.sent, min(due, self.sent + _CATCH_UP_RECORDS)):
                intended_ns = began_ns + round(number * interval_ns)
                self._send(next(producers), next(targets), next(values), next(keys), intended_ns)
            _sleep_until(began_ns + round(self.sent * interval_ns))

    def _send(self, producer: Producer, target: tuple[str, int], value: bytes, key: bytes | None, intended_ns: int) -> None:
        payload = stamped(value, intended_ns) if self.load.stamps else value
        if intended_ns >= self.measures_from_ns:
            self.behind.record((time.monotonic_ns() - intended_ns) // 1000)
        on_delivery = partial(self.delivered, intended_ns)
        while True:
            try:
                producer.produce(target[0], payload, key, target[1], on_delivery=on_delivery)
                break
            except BufferError:
                # The moment stays as it was: the wait for room is part of the latency.
                time.sleep(_FULL_WAIT_S)
        self.sent += 1

    def _targets(self) -> Iterator[tuple[str, int]]:
        if not self.load.each_partition:
            return ((topic, -1) for topic in itertools.cycle(self.load.topics))
        every = [(topic, partition) for partition in range(self.load.partitions) for topic in self.load.topics]
        return itertools.cycle(every)


def _keys(load: ProducerLoad) -> Iterator[bytes | None]:
    if load.keys == "none":
        return itertools.repeat(None)
    if load.keys == "round-robin":
        return itertools.cycle([f"key-{number}".encode() for number in range(10_000)])
    # New at each call, as nanoseconds are; the seed keeps processes apart.
    return (f"{load.seed}-{time.monotonic_ns()}".encode() for _ in itertools.count())


def _message(value: bytes, key: bytes | None) -> dict[str, Any]:
    return {"value": value} if key is None else {"value": value, "key": key}


def _poll_until(producer: Producer, ended: threading.Event) -> None:
    while not ended.is_set():
        producer.poll(0.1)


def _sleep_until(moment_ns: int) -> None:
    left_ns = moment_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
