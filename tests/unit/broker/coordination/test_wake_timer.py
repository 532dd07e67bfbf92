"""A coordinator's timer wakes once, at the earliest planned time, and not after it was cancelled."""

from __future__ import annotations

import asyncio
import time

from stratalog_broker.coordination.wake_timer import WakeTimer


def now_ms() -> int:
    return int(time.monotonic() * 1000)


async def test_it_wakes_once_at_the_earliest_time() -> None:
    woken = asyncio.Event()
    calls: list[int] = []

    def on_wake() -> None:
        calls.append(now_ms())
        woken.set()

    timer, started_ms = WakeTimer(on_wake), now_ms()
    timer.plan(started_ms + 60_000, started_ms)
    timer.plan(started_ms + 20, started_ms)
    timer.plan(started_ms + 30_000, started_ms)
    timer.plan(None, started_ms)
    async with asyncio.timeout(60):
        await woken.wait()
    assert len(calls) == 1
    assert calls[0] >= started_ms + 19
    woken.clear()
    timer.plan(started_ms, now_ms())
    async with asyncio.timeout(60):
        await woken.wait()
    assert len(calls) == 2, "a time in the past is due at once"


async def test_a_cancelled_timer_does_not_wake_and_can_be_planned_again() -> None:
    woken = asyncio.Event()
    timer = WakeTimer(woken.set)
    timer.plan(now_ms(), now_ms())
    timer.cancel()
    timer.cancel()
    await asyncio.sleep(0.02)
    assert not woken.is_set()
    timer.plan(now_ms() + 1, now_ms())
    async with asyncio.timeout(60):
        await woken.wait()
