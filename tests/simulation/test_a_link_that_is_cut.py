"""A session holder uses a follower if it cannot reach the quorum's leader, or the leader cannot reach it."""

from __future__ import annotations

import asyncio

import pytest

from simulation.checkers.audit import Audit
from simulation.world.machine import Machine, Ports, World
from simulation.world.roles import connect_metadata, metadata_addresses, run_metadata_node
from stratalog_core.errors import OutcomeUnknown, Retriable
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import DynamicConfig, session_key
from stratalog_metadata.state.commands import Command, Put

LEASE_MS = 3_000
CUT_S = 12.0
HEALED_S = 5.0
HOLDER = "holder"


class Holder:
    """Keeps a session, and writes continuously."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.ended = 0
        self.session_id = 0
        self.written_at: list[float] = []
        self.client: QuorumClient | None = None

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = self.client = await connect_metadata(ports)
        self.session_id = await client.open_session(HOLDER, LEASE_MS, self._expired, grace_ms=300)
        while True:
            try:
                await client.propose(Command(updates=(Put(record=DynamicConfig(resource="a", configs={})),)), timeout_s=3.0)
            except (Retriable, OutcomeUnknown):
                pass
            else:
                self.written_at.append(ports.now)
                self.ready.set()
            await asyncio.sleep(0.1)

    def _expired(self) -> None:
        self.ended += 1

    @property
    def is_forwarded(self) -> bool:
        assert self.client is not None
        return self.client._sessions._router.forwards


def cut(world: World, leader: str, way: str) -> None:
    there, back = (HOLDER, leader), (leader, HOLDER)
    world.network.cut |= {"both ways": {there, back}, "there": {there}, "back": {back}}[way]


async def survives(world: World, holder: Holder, way: str) -> None:
    await holder.ready.wait()
    await asyncio.sleep(2.0)
    assert holder.client is not None
    leader = holder.client._sessions._leader.partition(":")[0]
    world.note(f"cut from {leader}: {way}")
    cut(world, leader, way)
    began_at = world.loop.time()
    await asyncio.sleep(CUT_S)
    assert holder.is_forwarded
    await stands(holder)
    lately = [at for at in holder.written_at if at > began_at + LEASE_MS / 1000]
    assert len(lately) > CUT_S, "it writes on"
    world.network.cut.clear()
    await asyncio.sleep(HEALED_S)
    assert not holder.is_forwarded, "back to the straight way"
    await stands(holder)


async def stands(holder: Holder) -> None:
    assert holder.client is not None
    assert holder.ended == 0, "the session outlives the cut"
    (session,) = await holder.client.read([session_key(holder.session_id)])
    assert session is not None


@pytest.mark.parametrize("way", ["both ways", "there", "back"])
def test_a_session_survives_a_cut_from_the_leader(way: str) -> None:
    world = World(1)
    world.audit = Audit(world.note)
    holder = Holder()
    machines = [Machine(world, address.partition(":")[0], run_metadata_node) for address in metadata_addresses()]
    machines.append(Machine(world, HOLDER, holder.run))
    for machine in machines:
        world.loop.call_soon(machine.boot)
    try:
        world.loop.run_until_complete(survives(world, holder, way))
    finally:
        world.loop.close()
    assert not world.audit.broken, world.audit.broken[0]
    assert not [machine.failure for machine in machines if machine.failure is not None]
