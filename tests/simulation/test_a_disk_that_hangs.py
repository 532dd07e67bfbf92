"""A metadata node whose disk completes nothing, and reports no error, while the disks of the other nodes work."""

from __future__ import annotations

import asyncio

import pytest

from simulation.checkers.audit import Audit
from simulation.world.machine import Machine, Ports, World
from simulation.world.roles import connect_metadata, metadata_addresses, run_metadata_node
from stratalog_core.errors import OutcomeUnknown, Retriable
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.node.raft_node import RaftNode
from stratalog_metadata.raft.durability import WRITES_MAX
from stratalog_metadata.records import DynamicConfig
from stratalog_metadata.state.commands import Command, Put

KEY = DynamicConfig(resource="a", configs={}).key()
RUNNING_S = 3.0
HANGS_S = 60.0
NOTICED_S = 20.0
"""Generous: a disk that hangs is noticed after five seconds."""
QUEUED_MAX = WRITES_MAX + 114
"""More than the writes beside which heartbeats are answered, 64 appends in flight and the answers to fifty heartbeats.

Less than the answers to all heartbeats.
"""


@pytest.fixture
def raft_nodes(monkeypatch: pytest.MonkeyPatch) -> list[RaftNode]:
    """All Raft nodes that run."""
    running: list[RaftNode] = []
    start = RaftNode.start

    def started(node: RaftNode) -> None:
        running.append(node)
        start(node)

    monkeypatch.setattr(RaftNode, "start", started)
    return running


class Client:
    """Writes continuously, or only follows the view and sends nothing."""

    def __init__(self) -> None:
        self.written_at: list[float] = []
        self.client: QuorumClient | None = None

    async def write(self, machine: Machine, ports: Ports) -> None:
        client = self.client = await connect_metadata(ports)
        while True:
            try:
                await client.propose(Command(updates=(Put(record=DynamicConfig(resource="a", configs={})),)), timeout_s=3.0)
            except (Retriable, OutcomeUnknown):
                pass
            else:
                self.written_at.append(ports.now)
            await asyncio.sleep(0.1)

    async def watch(self, machine: Machine, ports: Ports) -> None:
        self.client = await connect_metadata(ports)
        await asyncio.Event().wait()


def version(client: QuorumClient | None) -> int:
    found = client.view.get(KEY) if client is not None else None
    return found.version if found is not None else 0


async def continues_beside(
    world: World, nodes: list[Machine], raft_nodes: list[RaftNode], writer: Client, watcher: Client, leads: bool
) -> None:
    """Hang the disk of the leader, or of a follower that the watcher follows; everything else goes on."""
    await asyncio.sleep(RUNNING_S)
    assert writer.client is not None
    assert watcher.client is not None
    leader = writer.client._proposer.leader.partition(":")[0]
    victim = next(node for node in nodes if (node.name == leader) is leads)
    watcher.client._watched.prefer(next(address for address in metadata_addresses() if address.startswith(victim.name)))
    await asyncio.sleep(RUNNING_S)
    assert watcher.client._watched.address.startswith(victim.name)
    victim.hang_disk(HANGS_S)
    began_at = world.loop.time()
    await asyncio.sleep(NOTICED_S)
    lately = [at for at in writer.written_at if at > began_at + NOTICED_S / 2]
    assert len(lately) > NOTICED_S / 2, "commands take effect without the disk that hangs"
    assert version(writer.client) - version(watcher.client) < 10, "a client that only watches sees them"
    await asyncio.sleep(NOTICED_S)
    assert max(len(node._queue) for node in raft_nodes) < QUEUED_MAX, "what waits for the disk is bounded"
    await asyncio.sleep(HANGS_S)
    assert version(writer.client) - version(watcher.client) < 10


def run(raft_nodes: list[RaftNode], *, leads: bool) -> None:
    world = World(1)
    world.audit = Audit(world.note)
    writer, watcher = Client(), Client()
    nodes = [Machine(world, address.partition(":")[0], run_metadata_node) for address in metadata_addresses()]
    clients = [Machine(world, "writer", writer.write), Machine(world, "watcher", watcher.watch)]
    for machine in (*nodes, *clients):
        world.loop.call_soon(machine.boot)
    try:
        world.loop.run_until_complete(continues_beside(world, nodes, raft_nodes, writer, watcher, leads))
    finally:
        world.loop.close()
    assert not world.audit.broken, world.audit.broken[0]
    assert not [machine.failure for machine in (*nodes, *clients) if machine.failure is not None]


def test_another_node_leads_when_the_leaders_disk_hangs(raft_nodes: list[RaftNode]) -> None:
    run(raft_nodes, leads=True)


def test_nobody_follows_a_node_whose_disk_hangs(raft_nodes: list[RaftNode]) -> None:
    run(raft_nodes, leads=False)
