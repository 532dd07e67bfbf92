"""Cold and hot work side by side: what a replay or a frozen store does to producers and to consumers of hot data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from benchmarks.cold import store_work
from benchmarks.cold.figures import Figure, ratios
from benchmarks.cold.replays import Replays, gets_at_once
from benchmarks.cold.stage import Stage, say
from benchmarks.cold.store_work import Plan
from stratalog_core.errors import Unavailable
from stratalog_loadgen.processes.loads import ConsumerLoad, ProducerLoad
from stratalog_loadgen.processes.workers import Workers
from stratalog_loadgen.results.result import throughput
from stratalog_loadgen.runs.consume import measure_catch_up
from stratalog_loadgen.runs.latency import measure_latency
from stratalog_loadgen.runs.produce import producer_loads
from stratalog_loadgen.runs.readers import consumer_loads
from stratalog_loadgen.settings import Readers, Topics, Window
from stratalog_loadgen.topics import Prepared
from stratalog_tiering.cold.reader import ColdReaderSettings

_PARTITIONS: Final = 8
_PROCESSES: Final = 2
_BEGIN_S: Final = 120.0
_PARK_S: Final = 2.0
_WARM_UP_S: Final = 2.0
_CATCH_UP_S: Final = 1800.0
_DRAIN_S: Final = 0.6
"""Longer than the interval in which load processes report their progress."""


class ColdReaders:
    """Groups of one librdkafka consumer each, which read cold history again and again."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def records(self) -> int:
        """Records read so far, by all."""
        self._workers.follow_for(_DRAIN_S)
        return self._workers.records(ConsumerLoad)

    def wait_until_reading(self) -> None:
        self._workers.follow_until(lambda: self._workers.records(ConsumerLoad) > 0, _BEGIN_S, "read their first record")


@contextmanager
def cold_readers(stage: Stage, topic: str) -> Iterator[ColdReaders]:
    count = stage.options.cold_readers
    readers = Readers(groups=count, processes=min(count, _PROCESSES))
    loads = [
        ConsumerLoad(client=load.client, topics=load.topics, groups=load.groups, consumers=load.consumers, repeat=True)
        for load in consumer_loads(Prepared(stage.bootstrap, [topic], _PARTITIONS), readers)
    ]
    with Workers(loads) as workers:
        workers.begin(ConsumerLoad)
        yield ColdReaders(workers)


def hot_p99_ratio_under_replay(stage: Stage, replays: Replays) -> list[Figure]:
    """99th percentile of acknowledgements at a rate beside cold readers, over that without them.

    The control runs raw GETs instead of readers: what the machine's lack of cores does to producers without any of our code.
    """
    topic = stage.cold_topic(_PARTITIONS)
    alone, beside, beside_raw, read = [], [], [], []
    stage.read_directly()
    for _ in range(stage.options.rounds):
        alone.append(_produce_p99_ms(stage))
        with cold_readers(stage, topic) as readers:
            readers.wait_until_reading()
            before, began = readers.records(), time.monotonic()
            beside.append(_produce_p99_ms(stage))
            records = readers.records() - before
            read.append(records * stage.options.record_bytes / 1e6 / (time.monotonic() - began))
        if not records:
            raise Unavailable("the cold readers read nothing beside the producer: raise the window")
        at_once = gets_at_once(stage.options.cold_readers, ColdReaderSettings())
        plan = Plan(store=stage.store(), kind="repeat", topic=topic, at_once=at_once)
        with store_work.working(plan, stage.credentials) as work:
            work.begin()
            beside_raw.append(_produce_p99_ms(stage))
            work.stop()
        say(f"produce p99: {alone[-1]:.1f} ms alone, {beside[-1]:.1f} beside readers of {read[-1]:.0f} MB/s")
    return [
        Figure(name="hot_p99_ratio_under_replay", values=ratios(beside, alone), target=1.2, wanted="below"),
        Figure(name="hot_p99_ratio_under_raw_gets", values=ratios(beside_raw, alone)),
        Figure(name="hot_p99_ms_alone", values=tuple(alone)),
        Figure(name="hot_p99_ms_under_replay", values=tuple(beside)),
        Figure(name="replay_beside_producers_mb_per_s", values=tuple(read)),
    ]


def _produce_p99_ms(stage: Stage) -> float:
    window = Window(warmup_s=min(2.0, stage.options.window_s / 2), duration_s=stage.options.window_s)
    topics = Topics(partitions=4, configs={"remote.storage.enable": "false"})
    rate = float(stage.options.records_per_s)
    found = measure_latency(stage.bootstrap, topics, stage.traffic, window, records_per_s=rate, end_to_end=False)
    return float(found.measured["latency_p99_ms"])


def hot_catchup_under_frozen_store(stage: Stage, replays: Replays) -> list[Figure]:
    """Rate of a consumer that catches up from bookies while the store answers nothing and cold readers wait for it.

    The broker is started again before each pair, so that its tail cache holds nothing of what is read.
    """
    topic, hot = stage.cold_topic(_PARTITIONS), stage.hot_topic()
    working, frozen = [], []
    for _ in range(stage.options.rounds):
        stage.restart_broker(through_proxy=True)
        working.append(_catch_up_mb_s(stage, hot))
        stage.set_store("cut")
        with cold_readers(stage, topic) as readers:
            time.sleep(_PARK_S)
            frozen.append(_catch_up_mb_s(stage, hot))
            records = readers.records()
        stage.set_store("pass")
        assert records == 0, f"cold readers read {records} records of a store that is frozen"
        say(f"hot catch-up: {working[-1]:.0f} MB/s, {frozen[-1]:.0f} with a frozen store")
    return [
        Figure(name="hot_catchup_under_frozen_store", values=ratios(frozen, working), target=0.9),
        Figure(name="hot_catchup_mb_per_s", values=tuple(working)),
    ]


def _catch_up_mb_s(stage: Stage, topic: str) -> float:
    found = measure_catch_up(stage.bootstrap, Topics(name=topic), stage.traffic, Readers(), history_bytes=0)
    return float(found.measured["megabytes_per_s"])


def producers_under_catchup(stage: Stage, replays: Replays) -> list[Figure]:
    """Rate of producers while cold history is caught up, over the rate that the same producers have alone."""
    options = stage.options
    topic, hot = stage.cold_topic(_PARTITIONS), stage.new_topic(4, hot_only=True)
    groups = max(1, -(-options.catch_up_mb // options.history_mb))
    alone, beside, read = [], [], []
    stage.read_directly()
    for _ in range(options.rounds):
        alone.append(_produced_alone(stage, hot)["records_per_s"])
        sent, received = _produced_beside_catch_up(stage, hot, topic, groups)
        beside.append(sent["records_per_s"])
        read.append(received["megabytes_per_s"])
        say(f"producers: {alone[-1]:.0f} records/s alone, {beside[-1]:.0f} beside a catch-up of {read[-1]:.0f} MB/s")
    return [
        Figure(name="producers_under_catchup", values=ratios(beside, alone), target=0.95),
        Figure(name="producers_alone_records_per_s", values=tuple(alone)),
        Figure(name="catchup_beside_producers_mb_per_s", values=tuple(read)),
    ]


def _writing(stage: Stage, topic: str) -> list[ProducerLoad]:
    place = Prepared(stage.bootstrap, [topic], 4)
    endless = Window(warmup_s=_WARM_UP_S, duration_s=_CATCH_UP_S)
    rate = float(stage.options.catch_up_records_per_s)
    return producer_loads(place, stage.traffic, endless, records_per_s=rate, whole_batches=True)


def _produced_alone(stage: Stage, hot: str) -> dict[str, Any]:
    with Workers(_writing(stage, hot)) as workers:
        workers.begin(ProducerLoad)
        workers.follow_for(_WARM_UP_S + stage.options.window_s)
        workers.stop(ProducerLoad)
        return throughput(workers.finish(ProducerLoad, 0))


def _produced_beside_catch_up(stage: Stage, hot: str, topic: str, groups: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The producers count when they are warm, just before the consumers begin, until all groups have read everything."""
    place = Prepared(stage.bootstrap, [topic], _PARTITIONS)
    wanted = place.records() * groups
    with Workers([*_writing(stage, hot), *consumer_loads(place, Readers(groups=groups, processes=min(groups, 2)))]) as workers:
        workers.begin(ProducerLoad)
        workers.follow_for(_WARM_UP_S)
        workers.begin(ConsumerLoad)
        workers.follow_until(lambda: workers.records(ConsumerLoad) >= wanted, _CATCH_UP_S, f"read {wanted} records")
        workers.stop(ProducerLoad)
        sent = workers.finish(ProducerLoad, 0)
        workers.stop(ConsumerLoad)
        return throughput(sent), throughput(workers.finish(ConsumerLoad, 0))
