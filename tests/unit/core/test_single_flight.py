"""Single flight: equal loads run once, whoever gives up, and nobody is left with a load that was cancelled."""

from __future__ import annotations

import asyncio

import pytest

from stratalog_core.errors import Corrupt, Unavailable
from stratalog_core.single_flight import SingleFlight


class Source:
    """Counts its loads; each ends when ``gate`` opens."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()
        self.begun = self.cancelled = 0
        self.failure: Exception | None = None

    async def load(self) -> int:
        self.begun += 1
        self.entered.set()
        number = self.begun
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            raise self.failure
        return number


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def loads() -> SingleFlight[str, int]:
    return SingleFlight()


async def begun(loads: SingleFlight[str, int], source: Source, count: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.ensure_future(loads.get("a", source.load)) for _ in range(count)]
    await source.entered.wait()
    return tasks


async def test_equal_loads_run_once_and_later_ones_anew(loads: SingleFlight[str, int], source: Source) -> None:
    tasks = await begun(loads, source, 5)
    source.gate.set()
    assert await asyncio.gather(*tasks) == [1] * 5
    assert await loads.get("a", source.load) == 2
    assert len(loads) == 0


async def test_all_callers_get_the_failure_and_the_next_tries_again(loads: SingleFlight[str, int], source: Source) -> None:
    tasks = await begun(loads, source, 3)
    source.failure = Corrupt("bad")
    source.gate.set()
    assert [type(found) for found in await asyncio.gather(*tasks, return_exceptions=True)] == [Corrupt] * 3
    source.failure = None
    assert await loads.get("a", source.load) == 2


async def test_a_load_ends_with_its_last_caller_only(loads: SingleFlight[str, int], source: Source) -> None:
    first, second = await begun(loads, source, 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (source.cancelled, "a" in loads) == (0, True)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert "a" not in loads
    source.gate.set()
    assert await loads.get("a", source.load) == 2
    assert source.cancelled == 1


async def test_a_load_that_is_kept_outlives_its_callers(loads: SingleFlight[str, int], source: Source) -> None:
    reading = asyncio.ensure_future(loads.get("a", source.load, keep=True))
    await source.entered.wait()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    source.gate.set()
    assert await loads.get("a", source.load) == 1


async def test_a_load_that_has_just_ended_is_not_joined(loads: SingleFlight[str, int], source: Source) -> None:
    first = loads.start("a", source.load, keep=True)
    await source.entered.wait()
    source.gate.set()
    started: list[tuple[bool, asyncio.Task[int]]] = []
    asyncio.get_running_loop().call_soon(lambda: started.append((first.done(), loads.start("a", source.load, keep=True))))
    assert await first == 1
    ((had_ended, second),) = started
    assert had_ended, "its callbacks were still to come"
    assert await second == 2
    assert len(loads) == 0


async def test_a_caller_in_a_hurry_leaves_the_load_for_its_retry(loads: SingleFlight[str, int], source: Source) -> None:
    with pytest.raises(Unavailable):
        await loads.get("a", source.load, 0.001)
    source.gate.set()
    assert await loads.get("a", source.load) == 1


async def test_closing_cancels_what_runs(loads: SingleFlight[str, int], source: Source) -> None:
    tasks = await begun(loads, source, 2)
    await loads.close()
    assert [type(found) for found in await asyncio.gather(*tasks, return_exceptions=True)] == [Unavailable] * 2
