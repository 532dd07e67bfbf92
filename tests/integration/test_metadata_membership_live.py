"""The metadata quorum of a running cluster of processes changes its members under load: nothing acknowledged is lost.

A fourth node is added, the leader is removed, a follower is killed and its disk emptied: it is refused, then replaced.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from pathlib import Path

import pytest
from integration.process_cluster import ProcessCluster

from stratalog_core.errors import Conflict, OutcomeUnknown, Retriable
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import DynamicConfig
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs

REFUSED_WITHIN_S = 90.0


class Load:
    """Writes one record after another, each only once, and remembers the acknowledged ones."""

    def __init__(self, addresses: list[str], transport: TcpTransport) -> None:
        self.acknowledged: list[str] = []
        self.client = QuorumClient(addresses, transport, SystemClock(), random.Random(1))
        self.stopped = False

    async def run(self) -> None:
        number = 0
        while not self.stopped:
            number += 1
            name = f"load {number}"
            record = DynamicConfig(resource=name, configs={})
            absent = VersionIs(key=record.key(), version=ABSENT)
            try:
                await self.client.propose(Command(updates=(Put(record=record),), requirements=(absent,)), timeout_s=5)
            except (Retriable, OutcomeUnknown, Conflict):
                continue
            self.acknowledged.append(name)
            await asyncio.sleep(0.005)

    async def until_more(self, count: int) -> None:
        """Wait until ``count`` more have been acknowledged, which shows that the quorum serves."""
        wanted = len(self.acknowledged) + count
        async with asyncio.timeout(120):
            while len(self.acknowledged) < wanted:  # noqa: ASYNC110 - counted by another task, which needs no event
                await asyncio.sleep(0.02)


class Operator:
    """Runs commands during the load."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self.cluster = cluster

    async def run(self, *words: str) -> str:
        return await asyncio.to_thread(self.cluster.run, *words)

    async def status(self) -> dict[str, object]:
        found = json.loads(await self.run("metadata", "status", "--json"))
        assert isinstance(found, dict)
        return found

    async def leader(self) -> int:
        async with asyncio.timeout(120):
            while True:  # There is none while one is elected.
                leader = (await self.status())["leader"]
                if isinstance(leader, int):
                    return leader

    def names(self) -> list[str]:
        return [process["name"] for process in self.cluster.processes("metadata")]


@pytest.fixture
def quorum(tmp_path: Path) -> ProcessCluster:
    return ProcessCluster(tmp_path / "cluster")


async def test_members_change_under_load(quorum: ProcessCluster) -> None:
    operator = Operator(quorum)
    sizes = ("--metadata", "3", "--bookies", "1", "--brokers", "1", "--tiering", "0")
    await operator.run("cluster", "start", *sizes)
    transport = TcpTransport()
    load = Load([process["address"] for process in quorum.processes("metadata")], transport)
    await load.client.start()
    proposing = asyncio.create_task(load.run())
    try:
        await load.until_more(50)
        await operator.run("cluster", "add", "metadata")
        await load.until_more(50)
        await operator.run("cluster", "remove", f"metadata-{await operator.leader()}", "--yes")
        await load.until_more(50)
        await lose_a_disk(operator, quorum)
        await load.until_more(50)
        load.stopped = True
        await proposing
        found = {stored.record.key() for stored in await load.client.scan("dynamic_config/")}
        missing = [name for name in load.acknowledged if f"dynamic_config/{name}" not in found]
        assert not missing
    finally:
        load.stopped = True
        await proposing
        await load.client.close()
        await transport.close()
        await operator.run("cluster", "stop")


async def lose_a_disk(operator: Operator, quorum: ProcessCluster) -> None:
    """Restart a follower with an empty disk: refused, removed, added under a new identity with its old number."""
    leader = await operator.leader()
    name = next(name for name in operator.names() if name != f"metadata-{leader}")
    number = int(name.rpartition("-")[2])
    address = next(process["address"] for process in quorum.processes("metadata") if process["name"] == name)
    await operator.run("cluster", "kill", name)
    shutil.rmtree(quorum.data / name)
    await asyncio.to_thread(quorum.run, "cluster", "restart", name)
    await asyncio.to_thread(wait_until_refused, quorum.data / "logs" / f"{name}.log")
    await operator.run("metadata", "remove", str(number), "--yes")
    await operator.run("cluster", "restart", name)
    await operator.run("metadata", "add", f"{number}={address}")
    members = (await operator.status())["members"]
    assert isinstance(members, list)
    assert [member["node"] for member in members if member["role"] in ("leader", "voter")] == sorted(
        int(other.rpartition("-")[2]) for other in operator.names()
    )


def wait_until_refused(log: Path) -> None:
    deadline = time.monotonic() + REFUSED_WITHIN_S
    while "so a new one must not vote in its place" not in log.read_text():
        assert time.monotonic() < deadline, "a node with an emptied disk was not refused"
        time.sleep(0.1)
