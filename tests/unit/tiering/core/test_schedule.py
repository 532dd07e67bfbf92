"""The schedule of a tiering worker, compared with a model that checks every partition each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_tiering.core.schedule import BurstPacer, Schedule

NAMES = st.sampled_from("abcdef")
TIMES = st.integers(0, 20)
STEPS = st.lists(
    st.tuples(st.just("due"), NAMES, TIMES)
    | st.tuples(st.just("take"), TIMES, st.integers(0, 4))
    | st.tuples(st.just("end"), st.integers(0, 5), st.none() | TIMES),
    max_size=60,
)


@given(steps=STEPS)
def test_due_partitions_are_returned_longest_overdue_first(steps: list[tuple[str, str | int, int | None]]) -> None:
    schedule = Schedule()
    due: dict[str, float] = {}
    at_work: list[str] = []
    for kind, first, second in steps:
        if kind == "due":
            assert isinstance(first, str)
            assert second is not None
            schedule.set_due(first, second)
            due[first] = min(second, due.get(first, second))
        elif kind == "take":
            assert isinstance(first, int)
            assert second is not None
            ready = sorted((at, name) for name, at in due.items() if at <= first and name not in at_work)
            expected = [name for _, name in ready[: max(0, second - len(at_work))]]
            assert list(schedule.take_due(first, second)) == expected
            at_work += expected
            for name in expected:
                del due[name]
        elif at_work:
            assert isinstance(first, int)
            name = at_work.pop(first % len(at_work))
            schedule.ended(name, second)
            if second is not None:
                due[name] = min(second, due.get(name, second))
        assert schedule.at_work_count == len(at_work)
        assert schedule.next_at() == min((at for name, at in due.items() if name not in at_work), default=None)


def test_the_schedule_returns_due_partitions_once_and_keeps_concurrent_changes() -> None:
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


@given(st.lists(st.floats(0, 100), max_size=60), st.integers(1, 5), st.integers(1, 20))
def test_paced_work_stays_within_its_rate_and_does_not_wait_below_it(gaps: list[float], burst: int, per_s: int) -> None:
    pace, now = BurstPacer(burst, per_s, 1e6), 0.0
    begun: list[tuple[float, float]] = []
    for gap in gaps:
        now += gap
        begun.append((now, pace.next_at(now)))
    for first in range(len(begun)):
        for last in range(first, len(begun)):
            asked = last - first + 1
            assert asked <= burst + 1 + (begun[last][1] - begun[first][1]) * per_s + 1e-6
    if all(gap >= 1 / per_s + 1e-9 for gap in gaps):
        assert all(abs(asked - at) <= 1e-6 for asked, at in begun), "but for rounding"


def test_a_thousand_at_once() -> None:
    pace = BurstPacer(100, 50, 30.0)
    begins = [pace.next_at(7.0) for _ in range(1000)]
    assert begins[:100] == [7.0] * 100
    assert begins[-1] == pytest.approx(7.0 + 900 / 50)
    assert pace.next_at(1000.0) == 1000.0


def test_sustained_overload_delays_by_a_bounded_time() -> None:
    pace = BurstPacer(10, 10, 3.0)
    late = [pace.next_at(number / 100) - number / 100 for number in range(10_000)]
    assert max(late) <= 3.0 + 1e-9
    assert late[-1] == pytest.approx(3.0)
