"""Blocking calls in simulated time: each takes a random while and runs at its end, on its own process only."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from math import log
from typing import TypeVar

from simulation.loop import SimulatedLoop

Result = TypeVar("Result")


class SimulatedBackground:
    """See :class:`stratalog_core.ports.Background`. One thread: calls run in the order they were made."""

    def __init__(self, loop: SimulatedLoop, randomness: random.Random, mean_s: float = 0.001) -> None:
        self._loop = loop
        self._randomness = randomness
        self._mean_s = mean_s
        self._free_at = 0.0

    def run(self, call: Callable[[], Result]) -> Awaitable[Result]:
        future: asyncio.Future[Result] = self._loop.create_future()

        def finish() -> None:
            if future.cancelled():
                return
            try:
                result = call()
            except Exception as failure:  # Whatever it is belongs to whoever awaits the future.
                future.set_exception(failure)
            else:
                future.set_result(result)

        start = max(self._loop.time(), self._free_at)
        self._free_at = start - log(1.0 - self._randomness.random()) * self._mean_s
        self._loop.call_at(self._free_at, finish)
        return future

    def close(self) -> None:
        pass
