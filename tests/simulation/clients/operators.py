"""Operators during other faults: one changes a topic's replication factor, one has partitions handed over."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Final

import msgspec

from simulation.world import roles
from simulation.world.machine import Machine, Ports
from stratalog_broker.admin.replication_factor import change_replication_factor
from stratalog_core.errors import NotFound, StratalogError
from stratalog_metadata.records import Broker, Partition, Topic, topic_key
from stratalog_metadata.state.commands import Command, Put, VersionIs

FACTORS: Final = (2, 3, 4)
PAUSE_MEAN_S: Final = 3.0
TIMEOUT_S: Final = 10.0
RETRY_S: Final = 0.1
MOVE_MEAN_S: Final = 2.0


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


async def lower_factor(topic: str, most: int, ports: Ports) -> None:
    """Limit the topic's replication factor to ``most``, as an operator does when a bookie is lost for good."""
    metadata = await roles.connect_metadata(ports)
    while True:
        try:
            (found,) = await metadata.read([topic_key(topic)], TIMEOUT_S)
            assert found is not None
            assert isinstance(found.record, Topic)
            await change_replication_factor(metadata, topic, min(found.record.replication_factor, most))
            return
        except NotFound:
            raise
        except StratalogError:
            await asyncio.sleep(RETRY_S)


async def order_handovers(machine: Machine, ports: Ports) -> None:
    """Order handovers of partitions to any live broker until the machine crashes."""
    client = await roles.connect_metadata(ports)
    while True:
        await asyncio.sleep(ports.random.expovariate(1 / MOVE_MEAN_S))
        live = [each.broker_id for each in client.view.all(Broker)]
        owned = [each for each in client.view.all(Partition) if each.owner in live]
        others = [(each, target) for each in owned for target in live if target != each.owner]
        if not others:
            continue
        chosen, target = ports.random.choice(others)
        stored = client.view.get(chosen.key())
        if stored is None or not machine.world.decides(f"move {ports.now:.4f}"):
            continue
        order = Put(record=msgspec.structs.replace(chosen, next_owner=target))
        with contextlib.suppress(StratalogError):
            await client.propose(Command(updates=(order,), requirements=(VersionIs(key=chosen.key(), version=stored.version),)))
