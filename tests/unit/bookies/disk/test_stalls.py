"""When a disk counts as one that hangs, and what happens to its calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from stratalog_bookies.disk.core.stall import StallWatch
from stratalog_bookies.disk.disk_calls import DiskCalls
from stratalog_core.errors import StorageFailed
from stratalog_core.system import ThreadBackground

LOOKS = 3


def watched(*looks: Sequence[int | None]) -> bool:
    watch = StallWatch(LOOKS)
    for waits in looks:
        watch.observe(waits)
    return watch.is_stalled


def test_a_wait_that_outlasts_enough_looks_is_a_stall() -> None:
    assert not watched(*[(1,)] * LOOKS)
    assert watched(*[(1,)] * (LOOKS + 1))
    assert watched(*[(None, 7), (1, 7), (2, 7), (None, 7)]), "one kind of work is enough"


def test_a_disk_that_is_idle_or_slow_is_none() -> None:
    assert not watched(*[(None, None)] * 10)
    assert not watched(*[(number, number) for number in range(10)])
    assert not watched((1,), (1,), (1,), (1,), (2,)), "it works again"


async def test_calls_of_one_disk_take_no_more_than_their_threads_and_can_be_given_up() -> None:
    background = ThreadBackground(3, "disks")
    hanging, other = DiskCalls(background, 2), DiskCalls(background, 1)
    works = threading.Event()
    calls = [asyncio.ensure_future(hanging.run(works.wait)) for _ in range(5)]
    oldest = hanging.oldest
    assert oldest is not None
    assert await other.run(lambda: "done") == "done"
    assert other.oldest is None
    hanging.give_up("it hangs")
    for call in calls:
        with pytest.raises(StorageFailed, match="it hangs"):
            await call
    with pytest.raises(StorageFailed, match="it hangs"):
        hanging.run(works.wait)
    assert hanging.oldest == oldest, "a thread is in it all the same"
    works.set()
    hanging.resume()
    assert await hanging.run(lambda: "works again") == "works again"
    async with asyncio.timeout(60):
        while hanging.oldest is not None:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
    background.close()


async def test_a_call_fails_as_its_function_does_and_a_cancelled_one_does_not_start() -> None:
    background = ThreadBackground(1, "disk")
    calls, begun = DiskCalls(background, 1), threading.Event()
    release = threading.Event()
    first = asyncio.ensure_future(calls.run(release.wait))
    cancelled = asyncio.ensure_future(calls.run(begun.set))
    cancelled.cancel()
    release.set()
    assert await first
    with pytest.raises(ZeroDivisionError):
        await calls.run(lambda: 1 // 0)
    assert not begun.is_set()
    background.close()
