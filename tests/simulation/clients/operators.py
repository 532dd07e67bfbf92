"""An operator that changes a topic's replication factor during other faults."""

from __future__ import annotations

import asyncio
import itertools
from typing import Final

from simulation.world import roles
from simulation.world.machine import Machine, Ports
from stratalog_broker.admin.replication_factor import change_replication_factor
from stratalog_core.errors import NotFound, StratalogError

FACTORS: Final = (2, 3, 4)
PAUSE_MEAN_S: Final = 3.0


class Operator:
    """Changes the factor until its machine crashes."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    async def run(self, machine: Machine, ports: Ports) -> None:
        metadata = await roles.connect_metadata(ports)
        for turn in itertools.count():
            chance = machine.world.random(f"{machine.name}/{turn}")
            await asyncio.sleep(chance.expovariate(1 / PAUSE_MEAN_S))
            if not machine.world.decides(f"{machine.name}#{turn}"):
                continue
            factor = chance.choice(FACTORS)
            try:
                await change_replication_factor(metadata, self._topic, factor)
            except NotFound:
                raise
            except StratalogError as failure:
                machine.world.note(f"  {machine.name}: {failure!r}")
            else:
                machine.world.note(f"{self._topic} is to have {factor} copies")
