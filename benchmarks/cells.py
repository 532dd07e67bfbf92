"""Carries cells of the matrix out on a running system, with the loads of :mod:`stratalog.bench`. One function per kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from benchmarks.matrix import Cell, Profile
from benchmarks.systems import System
from stratalog.bench.loads import Payload
from stratalog.bench.results import Result, result
from stratalog.bench.runs import java
from stratalog.bench.runs.connections import measure_connections
from stratalog.bench.runs.consume import measure_catch_up, measure_tail
from stratalog.bench.runs.failover import measure_failover
from stratalog.bench.runs.latency import measure_latency
from stratalog.bench.runs.produce import measure_produce
from stratalog.bench.settings import Readers, Topics, Traffic, Window
from stratalog.bench.topics import prepared

_JAVA_WARMUP = 1.1


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """What every kind needs."""

    system: System
    settings: dict[str, Any]
    window: Window

    @property
    def bootstrap(self) -> str:
        return self.system.bootstrap

    @property
    def topics(self) -> Topics:
        """Three copies; two of them, or all in sync, acknowledge."""
        partitions = int(self.settings.get("partitions", 1))
        return Topics(partitions=partitions, replication_factor=3, configs={"min.insync.replicas": "2"})

    @property
    def traffic(self) -> Traffic:
        """``batch_bytes`` 1 is one record per batch."""
        settings = self.settings
        wanted: dict[str, Any] = {
            name: settings[name] for name in ("linger_ms", "compression", "producers", "processes") if name in settings
        }
        batch_bytes = settings.get("batch_bytes", 131_072)
        producers = int(settings.get("producers", 1))
        wanted["processes"] = min(producers, 4) if producers > 10 else wanted.get("processes", 1)
        if batch_bytes == 1:
            wanted |= {"batch_records": 1, "linger_ms": 0}
        else:
            wanted["batch_bytes"] = batch_bytes
        return Traffic(payload=Payload(record_bytes=settings["record_bytes"]), **wanted)

    @property
    def readers(self) -> Readers:
        settings = self.settings
        return Readers(
            groups=settings.get("groups", 1),
            consumers=settings.get("consumers", 1),
            processes=settings.get("consumer_processes", 0),
        )

    def rate(self) -> float:
        """As set, or the share of what this system takes at full speed, which is measured now."""
        share = self.settings.get("rate_share")
        if share is None:
            return float(self.settings.get("rate", 0))
        full = msgspec.structs.replace(self.traffic, linger_ms=5.0)
        most = measure_produce(self.bootstrap, self.topics, full, self.window).measured["records_per_s"]
        return float(share) * float(most)


def carry_out(cell: Cell, system: System, profile: Profile) -> Result | None:
    """Measure; ``None`` if the system has no such thing. Memory and CPU of its processes, by role, come with the result."""
    bench = Bench(
        system=system, settings=cell.settings, window=Window(warmup_s=profile.warmup_s, duration_s=profile.duration_s)
    )
    before = system.cpu_s()
    found = KINDS[cell.kind](bench)
    if found is None:
        return None
    return msgspec.structs.replace(found, measured=found.measured | _used(system, before, _sent_bytes(cell, found)))


def _used(system: System, before: Mapping[str, float], sent_bytes: float) -> dict[str, Any]:
    memory, cpu_s = system.memory_bytes(), system.cpu_s()
    used: dict[str, Any] = {"memory_bytes": sum(memory.values())}
    used |= {f"memory_bytes_{role}": amount for role, amount in memory.items()}
    if sent_bytes:
        per_gb = {role: (spent - before.get(role, 0.0)) / (sent_bytes / 1e9) for role, spent in cpu_s.items()}
        used |= {f"server_cpu_s_per_gb_{role}": amount for role, amount in per_gb.items()}
        used["server_cpu_s_per_gb"] = sum(per_gb.values())
    return used


def _sent_bytes(cell: Cell, found: Result) -> float:
    """Of cells that only produce: warm-up included, as it is in the CPU time."""
    if cell.kind == "produce_java":
        return float(found.measured["records"] * cell.settings["record_bytes"] * _JAVA_WARMUP)
    return float(found.measured["sent_in_all"] * cell.settings["record_bytes"]) if cell.kind == "produce" else 0.0


def _produce(bench: Bench) -> Result:
    return measure_produce(bench.bootstrap, bench.topics, bench.traffic, bench.window)


def _produce_java(bench: Bench) -> Result:
    return java.measure_produce(bench.bootstrap, bench.topics, bench.traffic, records=bench.settings["records"])


def _latency(bench: Bench) -> Result:
    return measure_latency(bench.bootstrap, bench.topics, bench.traffic, bench.window, records_per_s=bench.rate())


def _tail(bench: Bench) -> Result:
    return measure_tail(
        bench.bootstrap,
        bench.topics,
        bench.traffic,
        bench.readers,
        bench.window,
        records_per_s=bench.rate(),
        leave=bench.settings.get("leave", False),
    )


def _catch_up(bench: Bench) -> Result:
    history_bytes, rate = bench.settings["history_bytes"], bench.rate()
    return measure_catch_up(
        bench.bootstrap, bench.topics, bench.traffic, bench.readers, history_bytes=history_bytes, records_per_s=rate
    )


def _cold_replay(bench: Bench) -> Result | None:
    with prepared(bench.bootstrap, bench.topics) as place:
        written = Topics(name=place.names[0])
        measure_produce(bench.bootstrap, written, bench.traffic, bench.window, records=_history_records(bench))
        if not bench.system.make_cold(place.names[0]):
            return None
        return measure_catch_up(bench.bootstrap, written, bench.traffic, bench.readers, history_bytes=0)


def _failover(bench: Bench) -> Result:
    settings = bench.settings
    return measure_failover(
        bench.bootstrap,
        bench.topics,
        bench.traffic,
        kill=bench.system.kill_broker,
        before_s=settings["before_s"],
        after_s=settings["after_s"],
        records_per_partition_per_s=settings["rate_per_partition"],
    )


def _restart(bench: Bench) -> Result:
    """The gaps of an orderly stop, then how long the broker takes to serve again."""

    def stop() -> None:
        bench.system.stop_broker()

    stopped = measure_failover(bench.bootstrap, bench.topics, bench.traffic, kill=stop, before_s=5, after_s=15)
    began = time.monotonic()
    bench.system.start_broker()
    return msgspec.structs.replace(
        stopped, what="restart", measured=stopped.measured | {"serves_again_s": time.monotonic() - began}
    )


def _connections(bench: Bench) -> Result:
    before = sum(bench.system.memory_bytes().values())
    held: list[int] = []

    def look(_: int) -> None:
        held[:] = [sum(bench.system.memory_bytes().values())]

    found = measure_connections(
        bench.bootstrap,
        connections=bench.settings["connections"],
        duration_s=bench.settings["hold_s"],
        processes=2,
        on_progress=look,
    )
    per_connection = (held[0] - before) / max(1, found.measured["connections"])
    return msgspec.structs.replace(found, measured=found.measured | {"memory_bytes_per_connection": per_connection})


def _growth(bench: Bench) -> Result:
    """The same load twice on one topic, with ``times`` the history in between."""
    with prepared(bench.bootstrap, bench.topics) as place:
        same = Topics(name=place.names[0])
        measure_produce(bench.bootstrap, same, bench.traffic, bench.window, records=_history_records(bench))
        before = measure_produce(bench.bootstrap, same, bench.traffic, bench.window)
        more = _history_records(bench) * (bench.settings["times"] - 1)
        measure_produce(bench.bootstrap, same, bench.traffic, bench.window, records=more)
        after = measure_produce(bench.bootstrap, same, bench.traffic, bench.window)
    share = after.measured["records_per_s"] / before.measured["records_per_s"]
    measured = after.measured | {
        "records_per_s_before": before.measured["records_per_s"],
        "latency_p99_ms_before": before.measured["latency_p99_ms"],
        "share_of_before": share,
    }
    return result("growth", after.settings, measured)


def _history_records(bench: Bench) -> int:
    return max(1, int(bench.settings["history_bytes"]) // int(bench.settings["record_bytes"]))


KINDS: dict[str, Callable[[Bench], Result | None]] = {
    "produce": _produce,
    "produce_java": _produce_java,
    "latency": _latency,
    "tail": _tail,
    "catch_up": _catch_up,
    "cold_replay": _cold_replay,
    "failover": _failover,
    "restart": _restart,
    "connections": _connections,
    "growth": _growth,
}
