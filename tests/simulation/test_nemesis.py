"""A nemesis leaves no fault behind."""

from __future__ import annotations

import asyncio

import pytest

from simulation.faults.nemesis import Nemesis, NemesisPlan
from simulation.world.disk import DiskFaults
from simulation.world.machine import Machine, Ports, World

ONLY_DISKS = NemesisPlan(crash=0, disk=1.0, partition=0, one_way=0, lossy=0, clock_jump=0, pause_mean_s=0.1, down_mean_s=600.0)
LONG_S = 5.0


async def _serve(machine: Machine, ports: Ports) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("is_rotten", [False, True])
def test_a_machine_restarts_with_a_healthy_disk_even_if_bits_of_it_have_flipped(is_rotten: bool) -> None:
    world = World(1)
    machine = Machine(world, "bookie-1", _serve)
    machine.is_rotten = machine.is_excused = is_rotten
    nemesis = Nemesis(world, [machine], ONLY_DISKS)

    async def run() -> None:
        machine.boot()
        faults = asyncio.get_running_loop().create_task(nemesis.run())
        await asyncio.sleep(LONG_S)
        assert machine.disk.faults != DiskFaults()
        nemesis.stop()
        await faults

    try:
        world.loop.run_until_complete(run())
    finally:
        world.loop.close()

    assert machine.disk.faults == DiskFaults()
    assert machine.starts == 2
    assert machine.is_up
    assert machine.is_excused is is_rotten
