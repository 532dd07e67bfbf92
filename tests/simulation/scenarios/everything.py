"""Scenario: all faults at once.

The faults of ``log`` (crashes, power cuts, disks, links, clocks, the store) and those of ``ownership-changes`` (late commands,
crashes during recoveries, brokers cut off for about a lease, moves of partitions, openings that take effect late). Brokers are
drained or shut down, an administrator creates, extends, truncates and deletes topics (``administration.py``), segments are
merged.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Final

from simulation.checkers.coverage import CONTROLLED_SHUTDOWN, DRAINED
from simulation.clients.administration import Administrator
from simulation.scenarios import log, ownership_changes
from simulation.scenarios.log import FINISH_S, LOOK_S, bootstrap
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from stratalog_core.errors import StratalogError
from stratalog_metadata.records import DrainedBroker, Partition
from stratalog_metadata.state.commands import Command, Delete, Put

DRAIN_MEAN_S: Final = 4.0
DRAINED_S: Final = 1.5
SHUTDOWN_MEAN_S: Final = 5.0
SHUTDOWN_S: Final = 3.0


class Scenario(ownership_changes.Scenario):
    """One run."""

    reassigns = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.segment_ms = world.random("segments").choice([400, log.SEGMENT_MS])
        self._administrator = Administrator(world, bootstrap())
        self._clients.append(self._machine("administrator", 0, self._administrator.run))

    @property
    def partitions(self) -> int:
        return super().partitions + sum(topic.partitions for topic in self._administrator.live)

    def simulate(self) -> None:
        with roles.merges_of_few_segments():
            super().simulate()

    def _begin_faults(self) -> list[Callable[[], object]]:
        drainer = Machine(self.world, "drainer-0", self._drain)
        drainer.boot()
        shutdowns = asyncio.get_running_loop().create_task(self._shut_down())
        undo = [*log.Scenario._begin_faults(self), *super()._begin_faults(), drainer.crash, shutdowns.cancel]
        self._outsiders.append(drainer)
        return [lambda: setattr(self._administrator, "stop", True), *undo]

    async def _drain(self, machine: Machine, ports: Ports) -> None:
        """Drain one broker for a while, then revoke the order."""
        client = await roles.connect_metadata(ports)
        for turn in itertools.count():
            await asyncio.sleep(ports.random.expovariate(1 / DRAIN_MEAN_S))
            if not self.world.decides(f"drain#{turn}"):
                continue
            record = DrainedBroker(broker_id=roles.number_of(ports.random.choice(self.brokers)))
            with contextlib.suppress(StratalogError):
                await client.propose(Command(updates=(Put(record=record),)))
            for _ in range(int(DRAINED_S / LOOK_S)):
                await asyncio.sleep(LOOK_S)
                if all(each.owner != record.broker_id for each in client.view.all(Partition)):
                    self.world.coverage.meet(DRAINED)
                    break
            await self._undrain(machine, ports)

    async def _undrain(self, machine: Machine, ports: Ports) -> None:
        client = await roles.connect_metadata(ports)
        for record in list(client.view.all(DrainedBroker)):
            with contextlib.suppress(StratalogError):
                await client.propose(Command(updates=(Delete(key=record.key()),)))
        await client.close()

    async def _shut_down(self) -> None:
        for turn in itertools.count():
            randomness = self.world.random(f"shutdown/{turn}")
            await asyncio.sleep(randomness.expovariate(1 / SHUTDOWN_MEAN_S))
            broker = randomness.choice(self.brokers)
            if not self.world.decides(f"shutdown#{turn}"):
                continue
            if await broker.terminate(SHUTDOWN_S):
                self.world.coverage.meet(CONTROLLED_SHUTDOWN)
            broker.boot()

    async def _check_everything(self, machine: Machine, ports: Ports) -> None:
        await self._undrain(machine, ports)
        await self._administrator.stopped.wait()
        for topic in self._administrator.live:
            topic.producer.stop = True
            topic.producer.check_stopped()
        for topic in self._administrator.live:
            await topic.producer.stopped.wait()
        await super()._check_everything(machine, ports)
        await self._administrator.check(machine, ports)
        for _ in range(int(FINISH_S / 2 / LOOK_S)):
            if not self._administrator.leftovers():
                return
            await asyncio.sleep(LOOK_S)
        raise AssertionError(f"deleted topics are still there: {self._administrator.leftovers()}")

    def _check_processes(self) -> None:
        super()._check_processes()
        for topic in self._administrator.topics:
            if topic.machine.failure is not None:
                raise AssertionError(f"{topic.machine.name} failed: {topic.machine.failure!r}") from topic.machine.failure
