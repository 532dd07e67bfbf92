"""Blocking calls in simulated time: each takes a random time and runs at its end, in its own process only."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from math import log
from typing import TypeVar

from simulation.world.disk import Disk
from simulation.world.loop import SimulatedLoop

Result = TypeVar("Result")
STEPS_MAX = 8


class SimulatedBackground:
    """See :class:`stratalog_core.ports.Background`. One thread: calls run in the order they were made."""

    def __init__(self, loop: SimulatedLoop, randomness: random.Random, mean_s: float = 0.001) -> None:
        self._loop = loop
        self._randomness = randomness
        self._mean_s = mean_s
        self._free_at = 0.0
        self.hangs_until = 0.0
        self._pending: deque[Callable[[], object]] = deque()

    def run(self, call: Callable[[], Result]) -> Awaitable[Result]:
        future: asyncio.Future[Result] = self._loop.create_future()

        def finish() -> None:
            self._pending.popleft()
            if future.cancelled():
                return
            try:
                result = call()
            except Exception as failure:  # Every exception goes to the caller that awaits the future.
                future.set_exception(failure)
            else:
                future.set_result(result)

        self._pending.append(call)
        start = max(self._loop.time(), self._free_at)
        self._free_at = start - log(1.0 - self._randomness.random()) * self._mean_s
        self._loop.call_at(self._free_at, finish)
        return future

    def hang(self, seconds: float) -> None:
        """Complete no call that is made from now on before ``seconds`` have passed."""
        self._free_at = self.hangs_until = max(self._loop.time(), self._free_at) + seconds

    @property
    def is_hanging(self) -> bool:
        return self._loop.time() < self.hangs_until

    def crash(self, disk: Disk) -> None:
        """Cut the power while the thread is in the middle of its call, or between two calls."""
        if self._pending and self._randomness.random() < 0.5:
            disk.cut_power_after(self._randomness.randrange(STEPS_MAX), self._pending[0])

    def close(self) -> None:
        pass
