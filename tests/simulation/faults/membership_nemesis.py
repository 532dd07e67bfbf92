"""Changes the members of the metadata quorum during other faults: adds, removes, replaces a lost disk."""

from __future__ import annotations

import asyncio

import msgspec

from simulation.world.disk import Disk
from simulation.world.machine import Machine, Ports, World
from simulation.world.roles import metadata_addresses, metadata_settings, number_of, run_metadata_node
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.administration import QuorumAdministration
from stratalog_metadata.storage.identity import IDENTITY_FILE, Identity

PAUSE_MEAN_S = 1.0
CHANGE_TIMEOUT_S = 4.0
SPARE = 4


async def run_spare(machine: Machine, ports: Ports) -> None:
    """Run the spare node; its ``peers`` are the founders and itself."""
    settings = metadata_settings(machine)
    peers = (*settings.peers, f"{number_of(machine)}={settings.listen}")
    await run_metadata_node(machine, ports, metadata_settings(machine, peers=peers))


def _identity(node: Machine) -> str:
    """Return the node identity on its disk; empty if there is none yet."""
    content = node.disk.durable(IDENTITY_FILE)
    return msgspec.json.decode(content, type=Identity).identity if content else ""


class MembershipNemesis:
    """Changes the quorum's members. ``nodes`` are the founders; one spare is added and removed.

    At most one disk is lost at a time, and replaced before the next. The next operation retries one that did not succeed in
    time, as an operator would.
    """

    def __init__(self, world: World, nodes: list[Machine]) -> None:
        self.done = 0
        self.lost: Machine | None = None
        self._lost_identity = ""
        self.spare = Machine(world, f"metadata-{SPARE}", run_spare)
        self.stopped = False
        self._world = world
        self._nodes = nodes
        self._random = world.random("surgeon")

    async def run(self, machine: Machine, ports: Ports) -> None:
        addresses = [*metadata_addresses(), metadata_settings(self.spare).listen]
        administration = QuorumAdministration(addresses, ports.transport, ports.clock, ports.random)
        while not self.stopped or self.lost is not None:
            await asyncio.sleep(self._random.expovariate(1 / PAUSE_MEAN_S))
            try:
                await self._operate(administration)
            except StratalogError as refused:
                self._world.note(f"membership nemesis: {refused.code}: {refused.message}")

    async def _operate(self, administration: QuorumAdministration) -> None:
        if self.lost is None:
            await self._choose(administration)
        if self.lost is not None:
            await self._replace(administration, self.lost)

    async def _choose(self, administration: QuorumAdministration) -> None:
        status = await administration.status(2.0)
        members = {member.node_id for member in status.members}
        if self._random.random() < 0.5:
            await self._exchange_spare(administration, members)
        elif all(number_of(node) in members for node in self._nodes) and all(member.voter for member in status.members):
            self.lost = self._random.choice(self._nodes)
            number = number_of(self.lost)
            self._lost_identity = next(member.identity for member in status.members if member.node_id == number)
            self._world.note(f"{self.lost.name} loses its disk")
            self._empty(self.lost)

    async def _exchange_spare(self, administration: QuorumAdministration, members: set[int]) -> None:
        if SPARE in members:
            await administration.remove(SPARE, CHANGE_TIMEOUT_S)
            self.spare.crash()
        else:
            self._empty(self.spare)
            await administration.add(SPARE, metadata_settings(self.spare).listen, CHANGE_TIMEOUT_S)
        self._count("spare")

    async def _replace(self, administration: QuorumAdministration, node: Machine) -> None:
        number = number_of(node)
        node.is_excused = True
        status = await administration.status(2.0)
        known = next((member for member in status.members if member.node_id == number), None)
        if known is not None and known.voter and known.identity != self._lost_identity:
            self.lost = None
            # The nemesis may have restarted it meanwhile, which was correctly refused.
            node.is_excused, node.failure = False, None
            self._count(node.name)
            return
        if known is not None and known.identity == self._lost_identity:
            await administration.remove(number, CHANGE_TIMEOUT_S)
            # The node was refused while the leader knew it by the identity of its lost disk.
            node.crash()
            node.boot()
        try:
            await administration.add(number, metadata_settings(node).listen, CHANGE_TIMEOUT_S)
        except StratalogError as refused:
            if "has stopped" in refused.message:
                # It started with a configuration that was later overruled. Empty its disk again, as its error says.
                self._lost_identity = _identity(node) or self._lost_identity
                self._empty(node)
            raise

    def _count(self, what: str) -> None:
        self.done += 1
        self._world.note(f"membership nemesis: {what} done")

    def _empty(self, node: Machine) -> None:
        node.crash()
        node.is_excused = True
        node.disk = Disk(node.name, self._world.random(f"{node.name}/disk/{node.starts}"))
        node.boot()
