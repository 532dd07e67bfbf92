"""Work of a scenario that must come to its end: on a machine of its own, or an event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from simulation.world import roles
from simulation.world.machine import Machine, World

_Result = TypeVar("_Result")


async def in_time(event: Awaitable[_Result], what: str, seconds: float) -> _Result:
    """Wait for ``event``, for at most ``seconds``. Raises ``AssertionError`` with ``what``."""
    try:
        return await asyncio.wait_for(event, seconds)
    except TimeoutError:
        raise AssertionError(f"{what} in {seconds:g} s") from None


async def run_in_checker(world: World, work: roles.Main, seconds: float, name: str = "checker-0") -> None:
    """Run ``work`` on a machine that has no faults, for at most ``seconds``. Raises what it raises, or ``AssertionError``."""
    machine = Machine(world, name, work)
    machine.boot()
    await in_time(machine.ended.wait(), f"{getattr(work, '__qualname__', work)} did not come to its end", seconds)
    if machine.failure is not None:
        raise machine.failure
