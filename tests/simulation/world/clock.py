"""Clocks of simulated machines: a monotonic clock that may run fast or slow, and a wall clock that may jump."""

from __future__ import annotations

from simulation.world.loop import SimulatedLoop

EPOCH_MS = 1_700_000_000_000


class SimulatedClock:
    """``rate`` is the number of its seconds per simulated second; ``jump`` moves the wall clock only."""

    def __init__(self, loop: SimulatedLoop, rate: float = 1.0) -> None:
        self._loop = loop
        self._rate = rate
        self._wall_offset_ms = 0

    def monotonic(self) -> float:
        return self._loop.time() * self._rate

    def wall_ms(self) -> int:
        return EPOCH_MS + int(self._loop.time() * self._rate * 1000) + self._wall_offset_ms

    def jump(self, by_ms: int) -> None:
        self._wall_offset_ms += by_ms
