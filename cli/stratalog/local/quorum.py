"""Adds and removes metadata nodes of a running local cluster, and updates the configuration files."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stratalog.hot.quorum import administration_session
from stratalog.local.launcher import LocalCluster
from stratalog.local.plan import to_toml
from stratalog.local.ports import free_ports
from stratalog.local.state import ClusterState, ProcessState, changing, replace_file, save_state
from stratalog_core.errors import Invalid, NotFound

ROLE = "metadata"


def add_metadata(local: LocalCluster, *, timeout_s: float) -> str:
    """Start another node, make it a voter and return its name. Its number was never used in this directory."""
    before, process = enter_node(local)
    local.start([process.name], timeout_s=timeout_s)
    asyncio.run(_add(before, _number(process), process.address, timeout_s))
    return process.name


def enter_node(local: LocalCluster) -> tuple[list[str], ProcessState]:
    """Enter another node in ``cluster.json`` and the configuration files. Returns the addresses of the others, and the node."""
    with changing(local.data):
        state = local.state
        if not state.of_role(ROLE):
            raise Invalid(f"{local.data} belongs to `stratalog up`, whose quorum has one node")
        config = local.data / "config"
        number = max(int(path.stem.rpartition("-")[2]) for path in config.glob(f"{ROLE}-*.toml")) + 1
        address, http = (f"127.0.0.1:{port}" for port in free_ports(2))
        process = ProcessState(name=f"{ROLE}-{number}", role=ROLE, address=address, http=http)
        table = dict(_read(config / f"{state.of_role(ROLE)[0].name}.toml")[ROLE])
        table |= {"node_id": number, "listen": process.address, "data_dir": str(local.data / process.name)}
        (config / f"{process.name}.toml").write_text(to_toml({"node": {}, ROLE: table, "http": {"listen": http}}))
        _save(local, msgspec.structs.replace(state, processes=_inserted(state, process)))
    return _addresses(state), process


def remove_metadata(local: LocalCluster, name: str, *, timeout_s: float) -> None:
    """Remove the node from the quorum and from ``cluster.json``, and stop it. Its directory stays.

    The quorum may not have it: because its addition failed, or because it was removed by `stratalog metadata remove`.
    """
    state = local.state
    process = state.process(name)
    if process.role != ROLE:
        raise Invalid(f"{name} is not a metadata node: stop it with `stratalog cluster stop {name}`")
    with suppress(NotFound):
        asyncio.run(_remove(_addresses(state), _number(process), timeout_s))
    local.stop([name])
    with changing(local.data):
        state = local.state
        remaining = tuple(other for other in state.processes if other.name != name)
        _save(local, msgspec.structs.replace(state, processes=remaining))


async def _add(addresses: Sequence[str], number: int, address: str, timeout_s: float) -> None:
    async with administration_session(addresses) as administration:
        await administration.add(number, address, timeout_s)


async def _remove(addresses: Sequence[str], number: int, timeout_s: float) -> None:
    async with administration_session(addresses) as administration:
        await administration.remove(number, timeout_s)


def _number(process: ProcessState) -> int:
    return int(process.name.rpartition("-")[2])


def _addresses(state: ClusterState) -> list[str]:
    return [process.address for process in state.of_role(ROLE)]


def _inserted(state: ClusterState, process: ProcessState) -> tuple[ProcessState, ...]:
    """Return the processes with ``process`` after the other metadata nodes. Processes are started in this order."""
    after = max(position for position, other in enumerate(state.processes) if other.role == ROLE) + 1
    return (*state.processes[:after], process, *state.processes[after:])


def _save(local: LocalCluster, state: ClusterState) -> None:
    """Save the members to ``cluster.json`` and to every configuration file, so that the next start finds the current nodes."""
    addresses = _addresses(state)
    peers = [f"{_number(process)}={process.address}" for process in state.of_role(ROLE)]
    for process in state.processes:
        path = local.data / "config" / f"{process.name}.toml"
        if not path.exists():
            continue
        tables = _read(path)
        if ROLE in tables:
            tables[ROLE]["peers"] = peers
        elif "metadata" in tables.get("node", {}):
            tables["node"]["metadata"] = addresses
        replace_file(path, to_toml(tables).encode())
    save_state(local.data, msgspec.structs.replace(state, metadata=",".join(addresses)))


def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())
