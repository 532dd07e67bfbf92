"""Scenario: short-lived leaders of the metadata quorum. Figure 8 of the Raft paper is one of its runs.

A leader sends only its first few messages with entries, as many as the seed says; then it becomes silent or loses power, and
returns later. Messages carry one entry each. So logs differ as much as possible: entries that a quorum has without being
committed, and entries of earlier terms that return with their leader. Everything else, checkers included, is the scenario
``quorum``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from simulation.checkers.audit import Audit
from simulation.scenarios import quorum
from simulation.world.machine import Machine, World
from simulation.world.roles import metadata_addresses, metadata_settings, run_metadata_node
from stratalog_metadata.node.config import MetadataSettings
from stratalog_metadata.raft import Message, RaftSettings
from stratalog_metadata.raft.messages import Append

if TYPE_CHECKING:
    from simulation.world.disk import Disk
    from stratalog_metadata.node.serving import ServingNode

FAULTS_S: Final = 25.0
APPENDS: Final = (0, 0, 1, 1, 2, 2, 3, 4, 6, 10, 40)
"""How many messages with entries a leader sends; drawn again for each term."""
ENTRY_BYTES: Final = 1


class OneEntryAtATime(MetadataSettings):
    """A message carries one entry; elections are quick, so that a run has many."""

    def raft(self, identity: str = "") -> RaftSettings:
        return dataclasses.replace(super().raft(identity), append_bytes_max=ENTRY_BYTES)


class ShortLeaderships(Audit):
    """Passes few appends of each term. ``fall`` is called with a leader's machine name after its last one."""

    def __init__(self, note: Callable[[str], None], randomness: random.Random) -> None:
        super().__init__(note)
        self.fall: Callable[[str], None] = lambda name: None
        self.silent: set[str] = set()
        self.over = False
        self._unheard: dict[str, tuple[ServingNode, set[int]]] = {}
        self._random = randomness
        self._left: dict[tuple[str, int], int] = {}

    def watch_votes(self, serving: ServingNode, disk: Disk) -> None:
        super().watch_votes(serving, disk)
        send, unheard = serving.send, set[int]()
        self._unheard[disk.name] = serving, unheard

        def sending(messages: Sequence[Message]) -> None:
            passing = []
            for message in messages:
                if self._passes(disk.name, message):
                    passing.append(message)
                else:
                    unheard.add(message.receiver)
            send(passing)

        serving.send = sending  # type: ignore[method-assign, assignment]

    def end(self, running: Sequence[str]) -> None:
        """Pass all messages again, and report the withheld ones as lost, like every message without a reply."""
        self.over = True
        self.silent.clear()
        for serving, receivers in (self._unheard[name] for name in running if name in self._unheard):
            for receiver in sorted(receivers):
                serving.peer_lost(receiver)

    def _passes(self, name: str, message: Message) -> bool:
        if self.over:
            return True
        if name in self.silent:
            return False
        if not isinstance(message, Append) or not message.entries:
            return True
        leadership = name, message.term
        if leadership not in self._left:
            self._left[leadership] = self._random.choice(APPENDS)
        self._left[leadership] -= 1
        if self._left[leadership] == -1:
            self._note(f"{name}, leader of term {message.term}, is heard no more")
            self.fall(name)
        return self._left[leadership] >= 0


class _Fates:
    """Draws what happens to leaders that became silent."""

    def __init__(self, nodes: Sequence[Machine], leaderships: ShortLeaderships, randomness: random.Random) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._leaderships = leaderships
        self._random = randomness
        leaderships.fall = lambda name: nodes[0].world.loop.run_as(None, self._fall, name)

    def _fall(self, name: str) -> None:
        end = self._crash if self._random.random() < 0.5 else self._silence
        asyncio.get_running_loop().call_later(self._random.uniform(0.0, 0.15), end, name)

    def _crash(self, name: str) -> None:
        self._nodes[name].crash()
        self._return_later(name)

    def _silence(self, name: str) -> None:
        self._leaderships.silent.add(name)
        self._return_later(name)

    def _return_later(self, name: str) -> None:
        asyncio.get_running_loop().call_later(self._random.uniform(0.1, 1.2), self._return, name)

    def _return(self, name: str) -> None:
        self._leaderships.silent.discard(name)
        self._nodes[name].boot()


def simulate(world: World) -> None:
    """Run the scenario. Raises ``AssertionError`` if an invariant does not hold."""
    leaderships = ShortLeaderships(world.note, world.random("reigns"))
    quorum.run_under_faults(world, _nodes(world), leaderships, partial(_short_leaderships, world, leaderships))


def _nodes(world: World) -> list[Machine]:
    quick = {"election_timeout_ms": 200, "heartbeat_ms": 40}
    return [
        Machine(
            world,
            address.partition(":")[0],
            lambda machine, ports: run_metadata_node(machine, ports, metadata_settings(machine, OneEntryAtATime, **quick)),
        )
        for address in metadata_addresses()
    ]


async def _short_leaderships(world: World, leaderships: ShortLeaderships, nodes: list[Machine]) -> None:
    _Fates(nodes, leaderships, world.random("fates"))
    await quorum.watch(nodes, leaderships, FAULTS_S)
    leaderships.end([node.name for node in nodes if node.is_up])
    for node in nodes:
        node.boot()
