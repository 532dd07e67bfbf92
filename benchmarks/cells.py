"""Measures cells of the matrix on a running system, with the loads of :mod:`stratalog_loadgen`. One function per kind."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.matrix import Cell, Profile, WarmUp
from benchmarks.progress import warmup_s
from benchmarks.systems import System
from benchmarks.usage import CLIENT, Roles, Usage, Used
from stratalog_core.errors import Unavailable
from stratalog_loadgen.processes.loads import Payload
from stratalog_loadgen.results.result import Result, result
from stratalog_loadgen.runs import java
from stratalog_loadgen.runs.connections import measure_connections
from stratalog_loadgen.runs.consume import measure_catch_up, measure_tail
from stratalog_loadgen.runs.copy import measure_copy
from stratalog_loadgen.runs.failover import measure_failover
from stratalog_loadgen.runs.latency import measure_latency
from stratalog_loadgen.runs.produce import measure_produce
from stratalog_loadgen.runs.workload import measure_workload
from stratalog_loadgen.settings import Readers, Topics, Traffic, Window
from stratalog_loadgen.topics import prepared
from stratalog_loadgen.workload_file import plan_of, read_driver, read_workload

WORKLOADS = Path(__file__).with_name("workloads")
"""Workload and driver files in OpenMessaging Benchmark's format."""

# For many producers; more would only add interpreters on the machine's cores.
_CLIENT_PROCESSES = 2
# Apache Kafka makes no topic with more at once.
_PARTITIONS_PER_TOPIC = 5000


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of every kind of cell."""

    system: System
    settings: dict[str, Any]
    window: Window

    @property
    def bootstrap(self) -> str:
        return self.system.bootstrap

    @property
    def topics(self) -> Topics:
        """Three copies, of which two, or all that are in sync, must acknowledge."""
        partitions = int(self.settings.get("partitions", 1))
        count = -(-partitions // _PARTITIONS_PER_TOPIC)
        return Topics(count=count, partitions=partitions // count, replication_factor=3, configs={"min.insync.replicas": "2"})

    @property
    def traffic(self) -> Traffic:
        """``batch_bytes`` 1 is one record per batch."""
        settings = self.settings
        wanted: dict[str, Any] = {
            name: settings[name] for name in ("linger_ms", "compression", "producers", "processes") if name in settings
        }
        batch_bytes = settings.get("batch_bytes", 131_072)
        producers = int(settings.get("producers", 1))
        wanted["processes"] = min(producers, _CLIENT_PROCESSES) if producers > 10 else wanted.get("processes", 1)
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
            light=settings.get("light", False),
            protocol=settings.get("protocol", "classic"),
        )

    def rate(self, *, beside_a_consumer: bool = False) -> float:
        """Return the configured rate, or its share of this system's maximum, measured now with the cell's settings."""
        share = self.settings.get("rate_share")
        if share is None:
            return float(self.settings.get("rate", 0))
        full = msgspec.structs.replace(self.traffic, linger_ms=5.0)
        if beside_a_consumer:
            most = measure_tail(self.bootstrap, self.topics, full, self.readers, self.window).measured["produced_records_per_s"]
        else:
            most = measure_produce(self.bootstrap, self.topics, full, self.window).measured["records_per_s"]
        return float(share) * float(most)


def carry_out(cell: Cell, system: System, profile: Profile) -> Result | None:
    """Measure a cell, with memory and CPU of the processes by role; ``None`` if the system does not support it."""
    window = Window(warmup_s=warmup_s(cell.settings, profile), duration_s=cell.duration_s(profile))
    bench = Bench(system=system, settings=cell.settings, window=window)
    with Usage(Roles(system).cpu_s) as usage:
        found = KINDS[cell.kind](bench)
        used = usage.within(found.window) if found is not None and found.window else None
    if found is None:
        return None
    memory = system.memory_bytes()
    measured = found.measured | {"memory_bytes": sum(memory.values())}
    measured |= {f"memory_bytes_{role}": amount for role, amount in memory.items()}
    return msgspec.structs.replace(found, measured=measured | (cpu_figures(found.measured, used) if used else {}))


def warm_up(system: System, loads: Sequence[WarmUp], whole_s: float) -> None:
    """Write and read for a while, the same on every system, so that Java's just-in-time compiler has compiled the hot paths."""
    if whole_s <= 0 or not loads:
        return
    window = Window(warmup_s=0.0, duration_s=whole_s / len(loads))
    for load in loads:
        bench = Bench(system=system, settings=msgspec.to_builtins(load), window=window)
        try:
            measure_tail(bench.bootstrap, bench.topics, bench.traffic, bench.readers, window)
        except Unavailable as failure:
            # A short time on a busy machine: nothing was acknowledged yet. Only the measured window counts.
            print(f"warm-up of {system.name}: {failure}", flush=True)


def cpu_figures(measured: Mapping[str, Any], used: Used) -> dict[str, float]:
    """Resources that each role used within the window, and per GB that passed through in it.

    Loads say exactly what they used themselves; Java's tools are sampled as the servers are.
    """
    sampled_s = used.by_role.get(CLIENT, 0.0)
    said = [measured[name] for name in ("client_cpu_s", "produced_client_cpu_s") if name in measured]
    clients_s = float(sum(said)) if said else sampled_s
    servers = {role: spent for role, spent in used.by_role.items() if role != CLIENT}
    other_s = used.machine_s - used.idle_s - clients_s - sum(servers.values())
    shares = {**servers, "clients": clients_s, "other": max(0.0, other_s), "idle": used.idle_s}
    figures = {f"machine_share_{name}": spent / used.machine_s for name, spent in shares.items()} if used.machine_s else {}
    size_gb = measured.get("record_bytes_in_all", 0) / 1e9
    if size_gb:
        figures |= {f"server_cpu_s_per_gb_{role}": spent / size_gb for role, spent in servers.items()}
        figures |= {
            "server_cpu_s_per_gb": sum(servers.values()) / size_gb,
            "clients_cpu_s_per_gb": clients_s / size_gb,
            "other_cpu_s_per_gb": max(0.0, other_s) / size_gb,
        }
    return figures


def _produce(bench: Bench) -> Result:
    return measure_produce(bench.bootstrap, bench.topics, bench.traffic, bench.window)


def _produce_java(bench: Bench) -> Result:
    return java.measure_produce(
        bench.bootstrap,
        bench.topics,
        bench.traffic,
        records=bench.settings["records"],
        transaction_ms=bench.settings.get("transaction_ms", 0),
    )


def _latency(bench: Bench) -> Result:
    rate = bench.rate(beside_a_consumer=True)
    return measure_latency(bench.bootstrap, bench.topics, bench.traffic, bench.window, records_per_s=rate)


def _copy(bench: Bench) -> Result:
    return measure_copy(
        bench.bootstrap,
        bench.topics,
        bench.traffic,
        bench.window,
        records_per_s=bench.rate(),
        commit_ms=bench.settings["commit_ms"],
    )


def _tail(bench: Bench) -> Result:
    return measure_tail(
        bench.bootstrap,
        bench.topics,
        bench.traffic,
        bench.readers,
        bench.window,
        records_per_s=bench.rate(),
        leave=bench.settings.get("leave", 0),
    )


def _workload_file(bench: Bench) -> Result:
    """Run a workload file for the profile's duration; a profile with ``records_max`` lowers its rate."""
    workload = read_workload(WORKLOADS / bench.settings["file"])
    plan = plan_of(workload, read_driver(WORKLOADS / bench.settings["driver"]), payload_directory=WORKLOADS)
    plan = msgspec.structs.replace(plan, window=bench.window, records_per_s=min(plan.records_per_s, bench.settings["records"]))
    return measure_workload(bench.bootstrap, workload, plan)


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
        partition_step=partition_step(settings),
    )


def partition_step(settings: Mapping[str, Any]) -> int:
    """Return the step between produced partitions; coprime to two and three brokers, which lead partitions in turn."""
    step = max(1, int(settings["partitions"]) // int(settings["produced_partitions"]))
    while step > 1 and math.gcd(step, 6) > 1:
        step -= 1
    return step


def _restart(bench: Bench) -> Result:
    """Measure the gaps of a controlled shutdown, then the time until the broker serves again."""

    def stop() -> None:
        bench.system.stop_broker()

    stopped = measure_failover(
        bench.bootstrap,
        bench.topics,
        bench.traffic,
        kill=stop,
        before_s=5,
        after_s=15,
        records_per_partition_per_s=bench.settings["rate_per_partition"],
        partition_step=partition_step(bench.settings),
    )
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
    """Run the same load twice on one topic; between the runs its history grows ``times`` as large."""
    with prepared(bench.bootstrap, bench.topics) as place:
        same = Topics(name=place.names[0])
        measure_produce(bench.bootstrap, same, bench.traffic, bench.window, records=_history_records(bench))
        before = measure_produce(bench.bootstrap, same, bench.traffic, bench.window)
        more = _history_records(bench) * (bench.settings["times"] - 1)
        measure_produce(bench.bootstrap, same, bench.traffic, bench.window, records=more)
        after = measure_produce(bench.bootstrap, same, bench.traffic, bench.window)
    return _compared(before, after)


def _growth_partitions(bench: Bench) -> Result:
    """Run the same load on ``times`` as many partitions."""
    before = measure_produce(bench.bootstrap, bench.topics, bench.traffic, bench.window)
    many = {**bench.settings, "partitions": bench.settings["partitions"] * bench.settings["times"]}
    after = _produce(msgspec.structs.replace(bench, settings=many))
    return _compared(before, after)


def _compared(before: Result, after: Result) -> Result:
    measured = after.measured | {
        "records_per_s_before": before.measured["records_per_s"],
        "latency_p99_ms_before": before.measured["latency_p99_ms"],
        "share_of_before": after.measured["records_per_s"] / before.measured["records_per_s"],
    }
    return result("growth", after.settings, measured, window=after.window)


def _history_records(bench: Bench) -> int:
    return max(1, int(bench.settings["history_bytes"]) // int(bench.settings["record_bytes"]))


KINDS: dict[str, Callable[[Bench], Result | None]] = {
    "produce": _produce,
    "produce_java": _produce_java,
    "latency": _latency,
    "copy": _copy,
    "tail": _tail,
    "workload_file": _workload_file,
    "catch_up": _catch_up,
    "cold_replay": _cold_replay,
    "failover": _failover,
    "restart": _restart,
    "connections": _connections,
    "growth": _growth,
    "growth_partitions": _growth_partitions,
}
