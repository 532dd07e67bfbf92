"""The worker's rate limit: callers wait in order for their own and all earlier amounts."""

from __future__ import annotations

import asyncio

import pytest

from stratalog_tiering.offload.ports import Throttle


class ManualClock:
    """Time that the test moves; ``sleep`` of the loop is not involved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now * 1000)


async def test_the_throttle_serves_waiters_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = ManualClock(), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    throttle = Throttle(100, clock)
    await throttle.take(25)
    assert slept == []
    await throttle.take(100)
    assert slept == [1.0]
    await throttle.take(50)
    assert slept == [1.0, 0.5]
