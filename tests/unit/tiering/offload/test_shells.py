"""The small shells under the worker: uploads, the throttle, the schedule, who does what, bounded caches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.errors import Unavailable
from stratalog_tiering.cold.block_cache import LruCache
from stratalog_tiering.core.schedule import Schedule
from stratalog_tiering.offload.throttle import Throttle
from stratalog_tiering.offload.upload import StreamedUpload
from stratalog_tiering.worker.leases import preferred_worker

Store = Any
PART = 5 * 1024 * 1024


class ManualClock:
    """Time that the test moves; ``sleep`` of the loop is not involved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now * 1000)


async def test_a_small_object_is_one_put(store: Store) -> None:
    upload = StreamedUpload(store, "a/b", part_bytes=PART, parts_at_once=2)
    await upload.write([b"one", memoryview(b"two")])
    await upload.finish()
    assert await store.get("a/b") == b"onetwo"
    assert store.count("create_upload") == 0


async def test_a_large_object_goes_in_parts_cut_anywhere(store: Store) -> None:
    content = bytes(range(256)) * (PART * 3 // 256 + 77)
    upload = StreamedUpload(store, "a/b", part_bytes=PART, parts_at_once=2)
    for first in range(0, len(content), 1_234_567):
        await upload.write([content[first : first + 1_234_567]])
    await upload.finish()
    assert await store.get("a/b") == content
    assert store.count("put_part") == 4


async def test_a_failed_part_fails_the_upload_and_leaves_nothing(store: Store) -> None:
    failed = False

    def fail_once(name: str, key: str) -> BaseException | None:
        nonlocal failed
        if name == "put_part" and not failed:
            failed = True
            return Unavailable("no")
        return None

    store.before = fail_once
    upload = StreamedUpload(store, "a/b", part_bytes=PART, parts_at_once=2)
    with pytest.raises(Unavailable):
        await write_and_finish(upload)
    await upload.abort()
    assert [left async for left in store.list_uploads()] == []


async def write_and_finish(upload: StreamedUpload) -> None:
    for _ in range(4):
        await upload.write([b"x" * PART])
    await upload.finish()


async def test_the_throttle_makes_takers_pay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_schedule_gives_what_is_due_once_and_remembers_changes_meanwhile() -> None:
    schedule = Schedule()
    schedule.set_all_due(["a", "b", "c"], 10)
    schedule.set_due("late", 50)
    assert list(schedule.take_due(9, 4)) == []
    assert list(schedule.take_due(10, 2)) == ["a", "b"]
    assert list(schedule.take_due(10, 2)) == []
    schedule.set_due("a", 12)
    assert schedule.next_at() == 10
    schedule.ended("a", 100)
    schedule.ended("b", None)
    assert list(schedule.take_due(12, 4)) == ["c", "a"]
    assert schedule.next_at() == 50


@given(st.sets(st.text(max_size=5), min_size=2, max_size=6), st.lists(st.text(max_size=8), max_size=30))
def test_a_worker_that_leaves_moves_only_its_own_share(workers: set[str], names: list[str]) -> None:
    everyone = sorted(workers)
    gone, stayed = everyone[0], everyone[1:]
    for name in names:
        before = preferred_worker(name, everyone)
        assert preferred_worker(name, stayed) == before or before == gone


def test_no_worker_no_preference() -> None:
    assert preferred_worker("x", []) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), max_size=60))
def test_the_cache_never_exceeds_its_bound_and_keeps_the_latest(puts: list[tuple[int, int]]) -> None:
    evicted: list[int] = []
    cache: LruCache[int, int] = LruCache(20, lambda weight: weight, lambda key, _: evicted.append(key))
    for key, weight in puts:
        cache.put(key, weight)
        assert cache.weight <= 20
        assert cache.get(key) == weight
