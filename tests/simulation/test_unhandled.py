"""The simulated loop reports exceptions that no caller sees and tasks that nothing can wake, of live processes only."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from simulation.world.loop import FailedInBackground, Process, SimulatedLoop

Main = Callable[[], Coroutine[Any, Any, None]]
kept: list[object] = []


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    loop = SimulatedLoop()
    yield loop
    loop.finish()
    loop.close()
    kept.clear()


async def fails_a_future_that_nobody_awaits() -> None:
    asyncio.get_running_loop().create_future().set_exception(OSError("lost"))
    await asyncio.sleep(60)


async def fails_a_future_in_a_reference_cycle() -> None:
    cycle: list[Any] = [asyncio.get_running_loop().create_future()]
    cycle.append(cycle)
    cycle[0].set_exception(OSError("lost"))
    del cycle
    await asyncio.sleep(60)


async def starts_a_task_that_fails() -> None:
    kept.append(asyncio.get_running_loop().create_task(_fail()))
    await asyncio.sleep(60)


async def _fail() -> None:
    raise OSError("lost")


async def awaits_a_future_that_nobody_holds() -> None:
    kept.append(asyncio.get_running_loop().create_task(_wait()))
    kept.clear()
    await asyncio.sleep(60)


async def _wait() -> None:
    await asyncio.get_running_loop().create_future()


def run(loop: SimulatedLoop, main: Main, crash_after_s: float = 0.0) -> Exception | None:
    process = Process("one")

    async def scenario() -> None:
        kept.append(loop.run_as(process, loop.create_task, main()))
        await asyncio.sleep(crash_after_s or 5.0)
        if crash_after_s:
            process.end()
            await asyncio.sleep(5.0)

    gc.disable()
    try:
        loop.run_until_complete(scenario())
        loop.check_at_end()
    except RuntimeError:
        assert loop.failure is not None, "the loop stopped for another reason"
    finally:
        gc.enable()
    return loop.failure


LOST_AT_ONCE = fails_a_future_that_nobody_awaits
LOST_LATER = [
    fails_a_future_in_a_reference_cycle,
    starts_a_task_that_fails,
    awaits_a_future_that_nobody_holds,
]


@pytest.mark.parametrize("main", [LOST_AT_ONCE, *LOST_LATER])
def test_a_failure_that_nobody_handles_ends_the_run(loop: SimulatedLoop, main: Main) -> None:
    assert isinstance(run(loop, main), FailedInBackground)


@pytest.mark.parametrize("main", LOST_LATER)
def test_a_crashed_process_handles_nothing(loop: SimulatedLoop, main: Main) -> None:
    assert run(loop, main, crash_after_s=0.5) is None


def test_a_future_that_fails_for_a_process_that_crashes_before_it_resumes(loop: SimulatedLoop) -> None:
    """Its callback is dropped, which frees the future with its exception unread."""
    process = Process("one")

    async def fail_and_crash() -> None:
        def in_process() -> None:
            future = loop.create_future()
            future.add_done_callback(asyncio.Future.exception)
            loop.call_soon(future.set_exception, OSError("refused"))

        loop.run_as(process, in_process)
        process.light_fuse(2, process.end)
        await asyncio.sleep(3.0)

    loop.run_until_complete(fail_and_crash())
    loop.check_at_end()

    assert not process.alive
    assert loop.failure is None


def test_sets_of_tasks_and_futures_have_the_same_order_in_every_run() -> None:
    def hashes() -> list[int]:
        loop = SimulatedLoop()
        made: list[Any] = []

        async def makes_tasks_and_futures() -> None:
            for _ in range(20):
                made.append(asyncio.get_running_loop().create_task(asyncio.sleep(1)))
                made.append(asyncio.get_running_loop().create_future())
            await asyncio.sleep(2)

        loop.run_until_complete(makes_tasks_and_futures())
        loop.finish()
        loop.close()
        kept.append(made)  # the other run's objects must be elsewhere in memory
        return [hash(each) for each in made]

    first, second = hashes(), hashes()

    assert len(set(first)) == len(first)
    assert first == second
