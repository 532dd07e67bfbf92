"""How long writes stop when a broker is killed: a steady rate to every partition, and the gaps between acknowledgements."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from confluent_kafka import KafkaError, Message, Producer

from benchmarks.systems import System, create_topic

RECORDS_PER_PARTITION_PER_S = 2.0
_SECONDS_BEFORE, _SECONDS_AFTER = 5.0, 30.0
_FLUSH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverResult:
    """Longest time without an acknowledgement, per partition that the killed broker led."""

    partitions: int
    median_gap_s: float
    max_gap_s: float


def measure(system: System, topic: str, partitions: int) -> FailoverResult:
    """Produce to all ``partitions`` of a new topic, kill a broker on the way."""
    create_topic(system, topic, partitions)
    load = _Load(system, topic, partitions)
    load.run(_SECONDS_BEFORE)
    led_by = load.leaders()
    victim: list[int] = []
    killing = threading.Thread(target=lambda: victim.append(system.kill_broker()))
    killing.start()
    load.run(_SECONDS_AFTER)
    killing.join()
    load.finish()
    gaps = [load.longest_gap_s(partition) for partition, leader in led_by.items() if leader == victim[0]]
    return FailoverResult(partitions=len(gaps), median_gap_s=statistics.median(gaps), max_gap_s=max(gaps))


class _Load:
    def __init__(self, system: System, topic: str, partitions: int) -> None:
        self._topic = topic
        self._partitions = partitions
        self._acknowledged_at: dict[int, list[float]] = defaultdict(list)
        self._failure: KafkaError | None = None
        self._producer = Producer(
            {
                "bootstrap.servers": system.bootstrap,
                "enable.idempotence": True,
                "linger.ms": 0,
                "delivery.timeout.ms": int(_FLUSH_TIMEOUT_S * 1000),
                "log_level": 0,
            }
        )

    def leaders(self) -> dict[int, int]:
        metadata = self._producer.list_topics(self._topic, timeout=10).topics[self._topic]
        return {number: partition.leader for number, partition in metadata.partitions.items()}

    def run(self, duration_s: float) -> None:
        """Send evenly spaced records round robin."""
        began = time.monotonic()
        interval_s = 1 / (self._partitions * RECORDS_PER_PARTITION_PER_S)
        for number in range(int(duration_s / interval_s)):
            self._producer.produce(self._topic, b"x" * 100, partition=number % self._partitions, on_delivery=self._delivered)
            self._producer.poll(max(0.0, began + number * interval_s - time.monotonic()))

    def finish(self) -> None:
        left = self._producer.flush(_FLUSH_TIMEOUT_S)
        if left or self._failure is not None:
            raise RuntimeError(f"{left} records were not acknowledged; {self._failure}")

    def longest_gap_s(self, partition: int) -> float:
        times = self._acknowledged_at[partition]
        return max(later - earlier for earlier, later in pairwise(times))

    def _delivered(self, failure: KafkaError | None, message: Message) -> None:
        if failure is not None:
            self._failure = failure
            return
        self._acknowledged_at[message.partition() or 0].append(time.monotonic())
