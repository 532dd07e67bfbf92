"""Commands on a topic that a broker's view does not have yet, because another broker has just created it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from uuid import UUID

import pytest

from simulation.checkers.audit import Audit
from simulation.world.machine import Machine, Ports, World
from simulation.world.network import Message
from simulation.world.roles import connect_metadata, run_metadata_node
from stratalog_broker.admin.topics import TopicCommands
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_core.errors import NotFound
from stratalog_metadata.client.guarded_updates import propose_guarded
from stratalog_metadata.protocol import messages
from stratalog_metadata.records import Topic
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs

LATE_S = 1.0
STANDS_S = 12.0
"""Longer than two attempts of a guarded update, so that the second one is refused and the record is read."""
TIMEOUT_S = 10.0
BROKER = "broker-1"
TOPIC = Topic(name="flights", topic_id=UUID(int=7), partition_count=1, replication_factor=1, configs={})

Commanding = Callable[[TopicCommands], Awaitable[object]]


def _delay_views(message: Message) -> float:
    return LATE_S if message.method == messages.WATCH and message.is_answer and message.target == BROKER else 0.0


async def _delete(commands: TopicCommands) -> None:
    await commands.delete(TOPIC.name, TIMEOUT_S)


async def _configure(commands: TopicCommands) -> None:
    await commands.configure(TOPIC.name, lambda configs: {**configs, "retention.ms": "1000"}, TIMEOUT_S)


async def _commands_after_creation(ports: Ports, command: Commanding) -> None:
    metadata, other = await connect_metadata(ports), await connect_metadata(ports)
    commands = TopicCommands(BrokerSettings(broker_id=1), metadata, ports.clock, ports.random)
    with pytest.raises(NotFound):
        await command(commands)

    creating = asyncio.get_running_loop().create_task(other.propose(Command(updates=(Put(record=TOPIC),))))
    while not (await other.read([TOPIC.key()]))[0]:  # noqa: ASYNC110 - both views are late, nothing tells
        await asyncio.sleep(0.01)
    assert metadata.view.get(TOPIC.key()) is None
    await command(commands)
    await creating


@pytest.mark.parametrize("command", [_delete, _configure])
def test_a_topic_that_the_view_lacks_is_looked_up(command: Commanding) -> None:
    world = World(1)
    world.audit = Audit(world.note)
    world.network.hold_up = _delay_views
    nodes = [Machine(world, f"metadata-{number}", run_metadata_node) for number in range(1, 4)]
    broker = Machine(world, BROKER, lambda machine, ports: _commands_after_creation(ports, command))
    for machine in [*nodes, broker]:
        world.loop.call_soon(machine.boot)
    try:
        world.loop.run_until_complete(broker.ended.wait())
    finally:
        world.loop.close()

    assert broker.failure is None, broker.failure


class LateUntil:
    """Holds up the broker's view until ``time``."""

    def __init__(self, world: World) -> None:
        self.time = 0.0
        self._world = world

    def hold_up(self, message: Message) -> float:
        is_view = message.method == messages.WATCH and message.is_answer and message.target == BROKER
        return max(self.time - self._world.loop.time(), 0.0) if is_view else 0.0


async def _guarded_update_with_a_late_view(ports: Ports, late: LateUntil) -> None:
    metadata = await connect_metadata(ports)
    late.time = ports.now + STANDS_S
    command = Command(updates=(Put(record=TOPIC),), requirements=(VersionIs(key=TOPIC.key(), version=ABSENT),))
    version = await propose_guarded(metadata, command, TOPIC.key(), timeout_s=2 * STANDS_S)
    found = metadata.view.get(TOPIC.key())
    assert found is not None, "a takeover that follows must know the ledger that was just opened"
    assert found.version == version


def test_a_guarded_update_whose_answers_were_lost_is_in_the_view_when_it_returns() -> None:
    world = World(1)
    world.audit = Audit(world.note)
    late = LateUntil(world)
    world.network.hold_up = late.hold_up
    nodes = [Machine(world, f"metadata-{number}", run_metadata_node) for number in range(1, 4)]
    broker = Machine(world, BROKER, lambda machine, ports: _guarded_update_with_a_late_view(ports, late))
    for machine in [*nodes, broker]:
        world.loop.call_soon(machine.boot)
    try:
        world.loop.run_until_complete(broker.ended.wait())
    finally:
        world.loop.close()

    assert broker.failure is None, broker.failure
