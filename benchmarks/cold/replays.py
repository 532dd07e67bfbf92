"""Replays of cold history: through the broker by librdkafka, and as raw ranged GETs of the same blocks by a control."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import msgspec
import psutil

from benchmarks.cold import store_work
from benchmarks.cold.figures import Figure, worst_ratio
from benchmarks.cold.stage import MIB, Stage, say
from benchmarks.cold.store_work import Done, Plan
from benchmarks.usage import CLIENT, Roles, Usage, Used
from stratalog_loadgen.processes.loads import ConsumerLoad
from stratalog_loadgen.processes.workers import Workers
from stratalog_loadgen.results.result import window_of
from stratalog_loadgen.settings import Readers, consumer_options
from stratalog_loadgen.topics import Prepared
from stratalog_tiering.cold.reader import ColdReaderSettings

CONSUMERS: Final = (1, 8)
_CLIENT_PROCESSES_MAX: Final = 2
_REPLAY_S: Final = 1800.0
_SAMPLE_S: Final = 0.05
_OURS: Final = ("broker", "bookie", "metadata", "tiering")
_GB: Final = 1e9


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """One pair. ``size`` are the bytes of the blocks, which both read once; CPU is that within each one's own window."""

    size: int
    consumer_s: float
    raw_s: float
    used: Used
    raw_used: Used
    raw_cpu_s: float
    base_bytes: int
    peak_bytes: int

    @property
    def ratio(self) -> float:
        """Rate of the consumers divided by that of the control."""
        return self.raw_s / self.consumer_s

    @property
    def servers_s_per_gb(self) -> float:
        """CPU of our processes, idle share included; the store's is apart."""
        return sum(self.used.by_role.get(role, 0.0) for role in _OURS) / (self.size / _GB)


def gets_at_once(consumers: int, settings: ColdReaderSettings) -> int:
    """GETs that the broker may have in flight for that many sequential readers of one partition each."""
    return min(consumers, settings.fetch_reads) + min(consumers * settings.read_ahead_blocks, settings.read_ahead_reads)


def assigned_loads(bootstrap: str, topic: str, consumers: int) -> list[ConsumerLoad]:
    """Loads of ``consumers`` with one partition each, spread over few processes."""
    processes = min(consumers, _CLIENT_PROCESSES_MAX)
    client = consumer_options(bootstrap, Readers(consumers=consumers), earliest=True) | {"enable.auto.commit": False}
    shares = [[[partition] for partition in range(number, consumers, processes)] for number in range(processes)]
    return [
        ConsumerLoad(client=client, topics=[topic], groups=["replay"], consumers=len(share), assigned=share) for share in shares
    ]


class Peak:
    """The highest resident memory of a process within a context."""

    def __init__(self, process: psutil.Process) -> None:
        self._read: Callable[[], int] = lambda: int(process.memory_info().rss)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.base_bytes = self.peak_bytes = self._read()

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, self._read())


class Replays:
    """Pairs by number of consumers, measured once: several figures come from the same pairs."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._pairs: dict[int, list[Replay]] = {}

    def pairs(self, consumers: int) -> list[Replay]:
        if consumers not in self._pairs:
            rounds = range(self._stage.options.rounds)
            self._pairs[consumers] = [self._pair(consumers, raw_first=bool(number % 2)) for number in rounds]
        return self._pairs[consumers]

    def _pair(self, consumers: int, *, raw_first: bool) -> Replay:
        """The broker is started again, so that it has nothing in its caches; who is first alternates."""
        stage = self._stage
        topic = stage.cold_topic(consumers)
        stage.restart_broker()
        stage.wait_until_idle()
        with Usage(Roles(stage.system).cpu_s) as usage:
            raw = self._raw(topic, consumers) if raw_first else None
            with Peak(stage.broker_process()) as peak:
                elapsed_s, window = self.consume(topic, consumers)
            raw = raw or self._raw(topic, consumers)
            used, raw_used = usage.within(window), usage.within(raw.window)
        assert used is not None, f"{window} is within the samples"
        assert raw_used is not None, f"{raw.window} is within the samples"
        found = Replay(
            size=raw.size,
            consumer_s=elapsed_s,
            raw_s=raw.elapsed_s,
            used=used,
            raw_used=raw_used,
            raw_cpu_s=raw.cpu_s,
            base_bytes=peak.base_bytes,
            peak_bytes=peak.peak_bytes,
        )
        mb_s = raw.size / 1e6 / elapsed_s
        say(f"replay, consumers {consumers}: {mb_s:.0f} MB/s, {found.ratio:.2f} of raw GETs, {found.servers_s_per_gb:.2f} s/GB")
        return found

    def consume(self, topic: str, consumers: int) -> tuple[float, tuple[float, float]]:
        """Read each partition by one consumer, without a group. Returns the seconds from the first record to the last.

        What librdkafka needs to connect and to learn of leaders and offsets is left out.
        """
        with Workers(assigned_loads(self._stage.bootstrap, topic, consumers)) as workers:
            wanted = Prepared(self._stage.bootstrap, [topic], consumers).records()
            workers.begin(ConsumerLoad)
            workers.follow_until(lambda: workers.records(ConsumerLoad) >= wanted, _REPLAY_S, f"read {wanted} records")
            workers.stop(ConsumerLoad)
            began, ended = window_of(workers.finish(ConsumerLoad, 0))
        return ended - began, (began, ended)

    def _raw(self, topic: str, consumers: int) -> Done:
        stage = self._stage
        at_once = gets_at_once(consumers, ColdReaderSettings())
        return store_work.run(Plan(store=stage.store(), kind="read", topic=topic, at_once=at_once), stage.credentials)


def cold_replay_ratio(stage: Stage, replays: Replays) -> list[Figure]:
    """Rate of consumers through the broker over raw GETs of the same blocks, as many in flight as the broker may have."""
    figures, others = [], []
    for consumers in CONSUMERS:
        pairs = replays.pairs(consumers)
        name = f"{consumers}_consumer{'s' if consumers > 1 else ''}"
        figures.append(Figure(name=f"cold_replay_ratio_{name}", values=tuple(pair.ratio for pair in pairs), target=0.8))
        rates = tuple(pair.size / 1e6 / pair.consumer_s for pair in pairs)
        raw = tuple(pair.size / 1e6 / pair.raw_s for pair in pairs)
        others += [
            Figure(name=f"cold_replay_mb_per_s_{name}", values=rates),
            Figure(name=f"raw_get_mb_per_s_{name}", values=raw),
        ]
    return [worst_ratio("cold_replay_ratio", figures, 0.8), *figures, *others]


def server_cpu_s_per_gb(stage: Stage, replays: Replays) -> list[Figure]:
    """CPU of our servers for each GB replayed, and of everything else that takes part."""
    pairs = [pair for consumers in CONSUMERS for pair in replays.pairs(consumers)]
    figures = [
        Figure(name="server_cpu_s_per_gb", values=tuple(pair.servers_s_per_gb for pair in pairs), target=0.6, wanted="at most")
    ]
    for consumers in CONSUMERS:
        values = tuple(pair.servers_s_per_gb for pair in replays.pairs(consumers))
        figures.append(Figure(name=f"server_cpu_s_per_gb_{consumers}", values=values, target=0.6, wanted="at most"))

    def per_gb(name: str, seconds: Callable[[Replay], float]) -> None:
        figures.append(Figure(name=name, values=tuple(seconds(pair) / (pair.size / _GB) for pair in pairs)))

    per_gb("broker_cpu_s_per_gb", lambda pair: pair.used.by_role.get("broker", 0.0))
    per_gb("store_cpu_s_per_gb", lambda pair: pair.used.by_role.get("store", 0.0))
    per_gb("consumer_cpu_s_per_gb", lambda pair: pair.used.by_role.get(CLIENT, 0.0))
    per_gb("raw_get_store_cpu_s_per_gb", lambda pair: pair.raw_used.by_role.get("store", 0.0))
    per_gb("raw_get_client_cpu_s_per_gb", lambda pair: pair.raw_cpu_s)
    per_gb("other_cpu_s_per_gb", lambda pair: pair.used.other_s)
    return figures


def replay_resident(stage: Stage, replays: Replays) -> list[Figure]:
    """Resident memory that the broker takes during a replay, above what it had after its start, as a share of its budget."""
    pairs = [pair for consumers in CONSUMERS for pair in replays.pairs(consumers)]
    budget = stage.options.broker_memory_mb * MIB
    shares = tuple((pair.peak_bytes - pair.base_bytes) / budget for pair in pairs)
    return [
        Figure(name="replay_resident_share_of_budget", values=shares, target=1.25, wanted="at most"),
        Figure(name="replay_resident_peak_mib", values=tuple(pair.peak_bytes / MIB for pair in pairs)),
        Figure(name="broker_start_resident_mib", values=tuple(pair.base_bytes / MIB for pair in pairs)),
    ]


def cold_amplification(stage: Stage, replays: Replays) -> list[Figure]:
    """Bytes that the store sent to the broker, protocol included, over the bytes of the batches that consumers read once."""
    figures = []
    for consumers in CONSUMERS:
        topic = stage.cold_topic(consumers)
        found, raw = [], []
        for _ in range(stage.options.rounds):
            stage.restart_broker(through_proxy=True)
            before = stage.bytes_from_store()
            replays.consume(topic, consumers)
            control = store_work.run(
                Plan(store=stage.store(through_proxy=True), kind="read", topic=topic, at_once=consumers), stage.credentials
            )
            after = stage.bytes_from_store()
            found.append((after.broker - before.broker) / control.size)
            raw.append((after.control - before.control) / control.size)
        name = "cold_amplification" if consumers == 1 else f"cold_amplification_{consumers}_consumers"
        figures.append(Figure(name=name, values=tuple(found), target=1.05, wanted="at most"))
        figures.append(Figure(name=f"raw_get_amplification_{consumers}", values=tuple(raw)))
    return figures
