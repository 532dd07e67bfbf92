"""Each segment is due once in each interval, whoever asks and however often."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stratalog_tiering.core.scrub_times import begin_ms, is_due, pause_s

DAY_MS = 24 * 3_600_000
NOW_MS = 1_750_000_000_000


@given(
    key=st.text(max_size=40),
    interval_ms=st.integers(1_000, 400 * DAY_MS),
    cuts=st.lists(st.floats(0.0, 1.0), max_size=20),
    cycles=st.integers(1, 4),
)
def test_a_segment_is_due_once_in_each_interval(key: str, interval_ms: int, cuts: list[float], cycles: int) -> None:
    length_ms = cycles * interval_ms
    times = [NOW_MS, *sorted(NOW_MS + int(cut * length_ms) for cut in cuts), NOW_MS + length_ms]
    due = [is_due(key, after, until, interval_ms) for after, until in pairwise(times)]
    looks_per_cycle = len(times) - 1
    assert is_due(key, NOW_MS, NOW_MS + length_ms, interval_ms)
    assert 1 <= sum(due) <= min(cycles, looks_per_cycle)


def test_the_times_of_many_segments_are_spread() -> None:
    hours = [NOW_MS + hour * 3_600_000 for hour in range(25)]
    keys = [f"segment-{number}" for number in range(2400)]
    looks = [sum(is_due(key, after, until, DAY_MS) for key in keys) for after, until in pairwise(hours)]
    assert sum(looks) == 2400
    assert max(looks) < 150


def test_a_worker_looks_back_and_looks_often() -> None:
    assert begin_ms(NOW_MS, 30 * DAY_MS) == NOW_MS - DAY_MS
    assert begin_ms(NOW_MS, DAY_MS) == NOW_MS - DAY_MS // 10
    assert pause_s(30 * DAY_MS) == 3600
    assert pause_s(1_000) == 0.05
