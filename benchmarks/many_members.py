"""10,000 connections whose clients are members of groups: ``python -m benchmarks.many_members``, or ``make bench-members``.

All join; one of each group leaves; a broker is killed; one of each group leaves again. Each time it is measured how long it
takes until every group is stable: all of its members in one generation, with all partitions between them, each on an open
connection. Both systems in turns, by the same clients (``clients/many_members.py`` of the load generator), in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.systems import System, started
from stratalog_loadgen.clients.many_members import ManyMembers
from stratalog_loadgen.results.report import figure

_TIMEOUT_S: Final = 240.0
_LEAVERS: Final = 1
_BROKER_ROLES: Final = ("broker", "kafka")
_LOOK_S: Final = 0.02


def _broker_bytes(system: System) -> int:
    return sum(size for role, size in system.memory_bytes().items() if role in _BROKER_ROLES)


def _broker_cpu_s(system: System) -> float:
    return sum(seconds for role, seconds in system.cpu_s().items() if role in _BROKER_ROLES)


async def _measure(system: System, groups: int, members: int) -> dict[str, float]:
    """The figures of one system, by name."""
    names = [f"group-{number}" for number in range(groups)]
    await _first_group(system)
    idle_bytes, idle_cpu_s = await asyncio.to_thread(lambda: (_broker_bytes(system), _broker_cpu_s(system)))
    clients = ManyMembers(system.bootstrap, names, members)
    found: dict[str, float] = {}
    try:
        began = time.monotonic()
        clients.start()
        await clients.stable([-1] * groups, _TIMEOUT_S)
        found["joined_s"] = time.monotonic() - began
        found["connections"] = clients.connected
        found["joins_per_member"] = clients.joins / (groups * members)
        held_bytes, joined_cpu_s = await asyncio.to_thread(lambda: (_broker_bytes(system), _broker_cpu_s(system)))
        found["bytes_per_member"] = (held_bytes - idle_bytes) / (groups * members)
        found["broker_cpu_s"] = joined_cpu_s - idle_cpu_s
        found["rebalance_s"] = await _one_leaves(clients)
        found |= await _broker_dies(system, clients)
        found["rebalance_after_s"] = await _one_leaves(clients)
    finally:
        await clients.close()
    return found


async def _first_group(system: System) -> None:
    """The first one of a cluster makes it create the internal topic."""
    clients = ManyMembers(system.bootstrap, ["first"], 1)
    try:
        clients.start()
        await clients.stable([-1], _TIMEOUT_S)
    finally:
        await clients.close()


async def _one_leaves(clients: ManyMembers) -> float:
    """Let one member of each group leave; return the seconds until all groups are stable again."""
    before, began = clients.generations, time.monotonic()
    await clients.leave(_LEAVERS)
    await clients.stable(before, _TIMEOUT_S)
    return time.monotonic() - began


async def _broker_dies(system: System, clients: ManyMembers) -> dict[str, float]:
    """Kill a broker. No group has to rebalance for it: a member whose coordinator is gone asks its successor."""
    connected, joins, generations = clients.connected, clients.joins, clients.generations
    killing = asyncio.ensure_future(asyncio.to_thread(system.kill_broker))
    while clients.connected == connected and not killing.done():  # noqa: ASYNC110 - connections are lost at any time
        await asyncio.sleep(_LOOK_S)
    began, lost = time.monotonic(), connected - clients.connected
    await killing
    lost = max(lost, connected - clients.connected)
    await clients.stable([generation - 1 for generation in generations], _TIMEOUT_S)
    return {"connections_lost": lost, "failover_s": time.monotonic() - began, "rejoined": clients.joins - joins}


def main() -> None:
    """Print one figure for a line: its name, and its value on each system."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_members", description=__doc__)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--members", type=int, default=100, help="Of each group.")
    parser.add_argument("--systems", nargs="+", default=["stratalog", "kafka"], choices=["stratalog", "kafka"])
    arguments = parser.parse_args()
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))  # of this process and of the cluster, which inherits it
    found: dict[str, dict[str, float]] = {}
    for kind in arguments.systems:
        with tempfile.TemporaryDirectory() as directory, started(kind, Path(directory)) as system:
            found[kind] = asyncio.run(_measure(system, arguments.groups, arguments.members))
    print(f"| figure | {' | '.join(found)} |\n| --- | {' | '.join('---' for _ in found)} |")
    for name in next(iter(found.values())):
        print(f"| {name} | {' | '.join(figure(each[name]) for each in found.values())} |")


if __name__ == "__main__":
    main()
