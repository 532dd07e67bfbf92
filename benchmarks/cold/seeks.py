"""Seeks into cold history over a store that is far away: the time until the first record is there."""

from __future__ import annotations

import random
import time
from typing import Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from benchmarks.cold import store_work
from benchmarks.cold.figures import Figure, percentile
from benchmarks.cold.replays import Replays
from benchmarks.cold.stage import Stage, say
from benchmarks.cold.store_work import Plan
from stratalog_core.errors import Unavailable

_PARTITIONS: Final = 8
_RECORD_S: Final = 30.0
_QUIET_S: Final = 0.15
"""Between two seeks: what the client and the broker fetch ahead for the earlier one is over by then."""


def cold_seek_p99_ms(stage: Stage, replays: Replays) -> list[Figure]:
    """Seeks of one consumer to random offsets with ``get_ms`` added to each GET; the control is one GET of a random block."""
    topic = stage.cold_topic(_PARTITIONS)
    seeks, gets = [], []
    for _ in range(stage.options.rounds):
        stage.restart_broker(through_proxy=True)
        control = Plan(store=stage.store(through_proxy=True), kind="sample", topic=topic, count=stage.options.seeks)
        with store_work.working(control, stage.credentials) as work:
            stage.set_store("late")
            seeks.append(_seek(stage, topic))
            work.begin()
            gets.append(work.finish().seconds_each)
        say(f"seeks: p50 {percentile(seeks[-1], 50) * 1000:.0f} ms, p99 {percentile(seeks[-1], 99) * 1000:.0f} ms")
    stage.set_store("pass")

    def milliseconds(rounds: list[list[float]], percent: float) -> tuple[float, ...]:
        return tuple(percentile(seconds, percent) * 1000 for seconds in rounds)

    return [
        Figure(name="cold_seek_p99_ms", values=milliseconds(seeks, 99), target=150, wanted="below"),
        Figure(name="cold_seek_p50_ms", values=milliseconds(seeks, 50)),
        Figure(name="raw_get_p99_ms", values=milliseconds(gets, 99)),
        Figure(name="raw_get_p50_ms", values=milliseconds(gets, 50)),
    ]


def _seek(stage: Stage, topic: str) -> list[float]:
    """Seconds from each seek to its first record, which must be the one at the wanted offset."""
    consumer = Consumer(
        {"bootstrap.servers": stage.bootstrap, "group.id": "seeks", "enable.auto.commit": False, "log_level": 0}
    )
    ends = {n: consumer.get_watermark_offsets(TopicPartition(topic, n), timeout=_RECORD_S)[1] for n in range(_PARTITIONS)}
    # The first fetch of a client connects to the broker and is no seek.
    _first_record_s(consumer, topic, 0, 0)
    seconds = []
    for _ in range(stage.options.seeks):
        partition = random.randrange(_PARTITIONS)
        seconds.append(_first_record_s(consumer, topic, partition, random.randrange(ends[partition])))
    consumer.close()
    return seconds


def _first_record_s(consumer: Consumer, topic: str, partition: int, offset: int) -> float:
    began = time.perf_counter()
    consumer.assign([TopicPartition(topic, partition, offset)])
    message = consumer.poll(_RECORD_S)
    elapsed = time.perf_counter() - began
    if message is None:
        raise Unavailable(f"offset {offset} of {topic}-{partition} did not arrive within {_RECORD_S:.0f} s")
    failure = message.error()
    if failure is not None:
        raise KafkaException(failure)
    assert message.offset() == offset, f"{message.offset()} arrived after a seek to {offset}"
    consumer.unassign()
    time.sleep(_QUIET_S)
    return elapsed
