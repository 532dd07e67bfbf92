"""Idle connections: how fast they open, how long one request takes while all of them are open, and what they cost."""

from __future__ import annotations

from stratalog import kafka
from stratalog_core.kafka_clients import translated
from stratalog_loadgen.processes.loads import ConnectionLoad
from stratalog_loadgen.processes.workers import OnProgress, Workers
from stratalog_loadgen.results.result import Result, behind, failures, latencies, result
from stratalog_loadgen.runs.produce import split


def measure_connections(
    bootstrap: str, *, connections: int, duration_s: float, processes: int = 1, on_progress: OnProgress = lambda _: None
) -> Result:
    """Open ``connections`` to all brokers in turn, hold them for ``duration_s``."""
    addresses = broker_addresses(bootstrap)
    loads = [
        ConnectionLoad(addresses=addresses, connections=share, duration_s=duration_s) for share in split(connections, processes)
    ]
    with Workers(loads, on_progress) as workers:
        workers.begin(ConnectionLoad)
        counts = workers.finish(ConnectionLoad, duration_s + connections / 20)
    measured = {
        "connections": sum(count.records for count in counts),
        "opened_in_s": max(count.elapsed_s for count in counts),
        **behind(counts, "opening"),
        **latencies(counts, "request"),
        **failures(counts),
    }
    settings = {"wanted_connections": connections, "brokers": len(addresses), "duration_s": duration_s, "processes": processes}
    return result("connections", settings, measured, client="asyncio sockets")


def broker_addresses(bootstrap: str) -> list[str]:
    """Return the addresses that the brokers advertise."""
    client = kafka.admin(bootstrap)
    with translated():
        brokers = client.list_topics(timeout=kafka.TIMEOUT_S).brokers.values()
    return sorted(f"{broker.host}:{broker.port}" for broker in brokers)
