"""The simulated network duplicates requests that senders retry; a proposal arrives once, as the product sends it."""

from __future__ import annotations

import asyncio

import pytest

from simulation.world.machine import World
from simulation.world.network import SimulatedTransport
from stratalog_core.ports import Request
from stratalog_metadata.protocol import messages

ADDRESS = "metadata-1:9300"


@pytest.mark.parametrize(("method", "arrivals"), [(messages.RAFT, 2), (messages.CHANGE_MEMBERS, 2), (messages.PROPOSE, 1)])
def test_only_what_senders_repeat_arrives_twice(method: int, arrivals: int) -> None:
    world = World(1)
    world.network.faults.duplicate_chance = 1.0
    arrived: list[int] = []

    def handle(request: Request) -> None:
        arrived.append(request.method)
        request.reply()

    async def scenario() -> None:
        world.network.listen(ADDRESS, handle)
        channel = SimulatedTransport(world.network, "client-1").channel(ADDRESS)
        await channel.call(method, (b"",), timeout_s=1.0)
        await asyncio.sleep(1.0)

    try:
        world.loop.run_until_complete(scenario())
    finally:
        world.loop.close()

    assert arrived == [method] * arrivals
