"""Plans a local cluster: names, addresses and one configuration per process. Starts nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stratalog.local.minio import NAME as MINIO
from stratalog.local.minio import store_url
from stratalog.local.ports import free_ports
from stratalog.local.state import ClusterState, ProcessState

Value = str | int | bool | list[str]
Tables = Mapping[str, Mapping[str, Value]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The number of processes of each role."""

    metadata: int = 3
    bookies: int = 3
    brokers: int = 2
    tiering: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A cluster before its first start: its state without pids, and each process's configuration by name."""

    state: ClusterState
    configurations: Mapping[str, Tables]


def plan_cluster(
    data: Path,
    sizes: Sizes,
    *,
    cluster_id: str,
    store: str | None,
    minio: bool,
    object_lock: bool = False,
    second_store: str | None = None,
) -> Plan:
    """Choose all addresses. The store is ``store``, or a MinIO of the cluster's own, or a directory below ``data``.

    ``second_store`` is that of a second copy, None without one.
    """
    listening = sizes.metadata + sizes.bookies + sizes.brokers
    addresses = iter([f"127.0.0.1:{port}" for port in free_ports(2 * listening + sizes.tiering + int(minio))])
    metadata = _processes("metadata", sizes.metadata, addresses)
    bookies = _processes("bookie", sizes.bookies, addresses)
    brokers = _processes("broker", sizes.brokers, addresses)
    tiering = tuple(
        ProcessState(name=f"tiering-{i}", role="tiering", address="", http=next(addresses)) for i in range(1, sizes.tiering + 1)
    )
    stores = (ProcessState(name=MINIO, role="store", address=next(addresses)),) if minio else ()
    state = ClusterState(
        bootstrap=",".join(broker.address for broker in brokers),
        metadata=",".join(node.address for node in metadata),
        store=store_url(stores[0].address) if stores else store or (data / "store").as_uri(),
        processes=(*stores, *metadata, *bookies, *brokers, *tiering),
        object_lock=object_lock,
        second_store=second_store or "",
    )
    return Plan(state=state, configurations=_configurations(data, state, cluster_id))


def _processes(role: str, count: int, addresses: Iterator[str]) -> tuple[ProcessState, ...]:
    return tuple(
        ProcessState(name=f"{role}-{i}", role=role, address=next(addresses), http=next(addresses)) for i in range(1, count + 1)
    )


def _configurations(data: Path, state: ClusterState, cluster_id: str) -> dict[str, Tables]:
    metadata = state.of_role("metadata")
    peers = [f"{number}={node.address}" for number, node in enumerate(metadata, 1)]
    node: dict[str, Value] = {"metadata": [process.address for process in metadata], "store": state.store}
    if state.second_store:
        node["second_store"] = state.second_store
    copies = min(3, len(state.of_role("bookie")))
    configurations: dict[str, Tables] = {}
    for number, process in enumerate(metadata, 1):
        table: dict[str, Value] = {
            "node_id": number,
            "listen": process.address,
            "data_dir": str(data / process.name),
            "peers": peers,
            "cluster_id": cluster_id,
        }
        configurations[process.name] = {"node": {}, "metadata": table}
    for process in state.of_role("bookie"):
        table = {"bookie_id": process.name, "listen": process.address, "data_dirs": [str(data / process.name)]}
        configurations[process.name] = {"node": node, "bookie": table}
    for number, process in enumerate(state.of_role("broker"), 1):
        table = {
            "broker_id": number,
            "listen": process.address,
            "default_replication_factor": copies,
            "offsets_topic_replication_factor": copies,
            "transaction_state_log_replication_factor": copies,
        }
        cache: dict[str, Value] = {"cache_dir": str(data / process.name / "cache")}
        configurations[process.name] = {"node": {**node, **cache}, "broker": table}
    for process in state.of_role("tiering"):
        configurations[process.name] = {"node": node, "tiering": {"worker_id": process.name}}
    http = {process.name: process.http for process in state.processes}
    return {name: {**tables, "http": {"listen": http[name]}} for name, tables in configurations.items()}


def to_toml(tables: Tables) -> str:
    """Return flat tables as TOML. JSON's strings, numbers, booleans and lists are valid TOML."""
    sections = []
    for name, table in tables.items():
        lines = [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"
