"""Replays are held to a rate while producers wait, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from simulation.world.clock import SimulatedClock
from simulation.world.loop import SimulatedLoop

from stratalog_broker.reads.replay_pace import QUIET_S, WAIT_MAX_S, ReplayPace
from stratalog_broker.reads.replay_rate import RISE_S
from stratalog_core.metrics.groups import LATENCY_BOUNDS_S, Histogram

MB = 1_000_000
READ = MB
USUAL_S = 0.005
WAITING_S = 0.1
FULL_MB_S = 100
SHARE = 0.25


class Cluster:
    """Producers at 100 requests/s and readers of history, at ``FULL_MB_S`` if nothing holds them."""

    def __init__(self, percent: int = 25) -> None:
        self.loop = SimulatedLoop()
        self.clock = SimulatedClock(self.loop)
        self.produced = Histogram(LATENCY_BOUNDS_S)
        self.pace = ReplayPace(self.clock, lambda: self.produced, percent)
        self.acknowledged_s = USUAL_S
        self.read_bytes = READ
        self.sent = 0

    async def produce(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.produced.observe(self.acknowledged_s)

    async def replay(self, readers: int = 4) -> None:
        await asyncio.gather(*(self._read(self.read_bytes / MB * readers / FULL_MB_S) for _ in range(readers)))

    async def _read(self, pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s)
            if self.pace.limit:
                turn = asyncio.Event()
                self.pace.wait(turn.set)
                await turn.wait()
            self.pace.sent(self.read_bytes)
            self.sent += self.read_bytes

    async def mb_s(self, seconds: float) -> float:
        before = self.sent
        await asyncio.sleep(seconds)
        return (self.sent - before) / MB / seconds

    def run(self, *loads: Coroutine[Any, Any, None], test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def scenario() -> None:
            tasks = [asyncio.ensure_future(load) for load in loads]
            await test()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(scenario())
        self.pace.close()
        self.loop.close()


def test_a_replay_gets_its_share_while_producers_wait_and_all_of_it_afterwards() -> None:
    cluster = Cluster()

    async def test() -> None:
        await asyncio.sleep(5)
        assert await cluster.mb_s(5) == pytest.approx(FULL_MB_S, rel=0.05)
        cluster.acknowledged_s = WAITING_S
        await asyncio.sleep(1)
        assert await cluster.mb_s(5) == pytest.approx(SHARE * FULL_MB_S, rel=0.1)
        cluster.acknowledged_s = USUAL_S
        await asyncio.sleep(RISE_S)
        assert cluster.pace.limit == 0
        assert await cluster.mb_s(5) == pytest.approx(FULL_MB_S, rel=0.05)

    cluster.run(cluster.produce(), cluster.replay(), test=test)


def test_responses_that_are_held_leave_one_after_the_other() -> None:
    """A burst of all of them would delay producers as if nothing were held."""
    cluster = Cluster()
    most = 0

    async def test() -> None:
        nonlocal most
        await asyncio.sleep(5)
        cluster.acknowledged_s = WAITING_S
        await asyncio.sleep(2)
        for _ in range(50):
            most = max(most, int(await cluster.mb_s(0.1)))

    cluster.run(cluster.produce(), cluster.replay(readers=20), test=test)
    assert most <= 2 * SHARE * FULL_MB_S


def test_a_share_of_everything_holds_nothing_and_sets_no_timer() -> None:
    cluster = Cluster(percent=100)

    async def test() -> None:
        cluster.acknowledged_s = WAITING_S
        assert await cluster.mb_s(5) == pytest.approx(FULL_MB_S, rel=0.05)

    cluster.run(cluster.produce(), cluster.replay(), test=test)
    assert cluster.pace._timer is None


def test_without_history_no_timer_is_set_and_the_usual_time_is_that_of_all_requests_meanwhile() -> None:
    cluster = Cluster()

    async def replay_later() -> None:
        cluster.pace.sent(1)
        await asyncio.sleep(QUIET_S + 1)
        assert cluster.pace._timer is None
        cluster.acknowledged_s = 3 * USUAL_S
        await asyncio.sleep(60)
        await cluster.replay()

    async def test() -> None:
        await asyncio.sleep(75)
        assert cluster.sent
        assert cluster.pace.limit == 0

    cluster.run(cluster.produce(), replay_later(), test=test)


def test_producers_that_send_little_are_measured_longer() -> None:
    cluster = Cluster()

    async def produce() -> None:
        while True:
            await asyncio.sleep(0.5)
            cluster.produced.observe(cluster.acknowledged_s)

    async def test() -> None:
        await asyncio.sleep(10)
        cluster.acknowledged_s = WAITING_S
        await asyncio.sleep(3)
        for _ in range(10):
            assert cluster.pace.limit
            await asyncio.sleep(1)

    cluster.run(produce(), cluster.replay(), test=test)


def test_small_reads_get_the_same_share() -> None:
    """A turn counted as much as it could have sent."""
    cluster = Cluster()
    cluster.read_bytes = READ // 4

    async def test() -> None:
        await asyncio.sleep(10)
        cluster.acknowledged_s = WAITING_S
        await asyncio.sleep(1)
        assert await cluster.mb_s(5) == pytest.approx(SHARE * FULL_MB_S, rel=0.2)

    cluster.run(cluster.produce(), cluster.replay(), test=test)


def test_who_waits_is_let_in_when_the_limit_ends_or_in_time() -> None:
    cluster = Cluster()

    async def test() -> None:
        cluster.pace._rate.limit = cluster.pace._free_at_s = 1e9
        began = list[float]()
        cluster.pace.wait(lambda: began.append(cluster.clock.monotonic()))
        left = list[float]()
        cluster.pace.wait(begin := lambda: left.append(0.0))
        cluster.pace.leave(begin)
        await asyncio.sleep(WAIT_MAX_S + 1)
        assert began == [pytest.approx(WAIT_MAX_S)]
        assert not left

    cluster.run(test=test)


def test_turns_that_send_at_once_leave_no_timers_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each such turn left one that set the next one, until the broker did little else."""
    looks = 0
    grant = ReplayPace._grant

    def counted(pace: ReplayPace) -> None:
        nonlocal looks
        looks += 1
        grant(pace)

    monkeypatch.setattr(ReplayPace, "_grant", counted)
    cluster = Cluster()
    turns = 0

    def send() -> None:
        nonlocal turns
        turns += 1
        cluster.pace.sent(READ)
        if cluster.pace.limit:
            cluster.pace.wait(lambda: send())  # each waits under a key of its own

    async def test() -> None:
        await asyncio.sleep(5)
        cluster.acknowledged_s = WAITING_S
        await asyncio.sleep(1)
        for _ in range(20):
            cluster.pace.wait(lambda: send())
        await asyncio.sleep(10)
        assert turns > 2 * SHARE * FULL_MB_S
        assert looks < 8 * turns

    cluster.run(cluster.produce(), cluster.replay(), test=test)
