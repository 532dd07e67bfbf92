"""Many that come at once are spread; few, or slow ones, never wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_tiering.core.pace import Pace


@given(st.lists(st.floats(0, 100), max_size=60), st.integers(1, 5), st.integers(1, 20))
def test_no_second_has_more_than_its_share_and_who_keeps_to_it_never_waits(gaps: list[float], burst: int, per_s: int) -> None:
    pace, now = Pace(burst, per_s, 1e6), 0.0
    begun: list[tuple[float, float]] = []
    for gap in gaps:
        now += gap
        begun.append((now, pace.next_at(now)))
    for first in range(len(begun)):
        for last in range(first, len(begun)):
            asked = last - first + 1
            assert asked <= burst + 1 + (begun[last][1] - begun[first][1]) * per_s + 1e-6
    if all(gap >= 1 / per_s + 1e-9 for gap in gaps):
        assert all(asked == at for asked, at in begun)


def test_a_thousand_at_once() -> None:
    pace = Pace(100, 50, 30.0)
    begins = [pace.next_at(7.0) for _ in range(1000)]
    assert begins[:100] == [7.0] * 100
    assert begins[-1] == pytest.approx(7.0 + 900 / 50)
    assert pace.next_at(1000.0) == 1000.0


def test_more_than_the_pace_for_long_are_late_by_a_bounded_time() -> None:
    pace = Pace(10, 10, 3.0)
    late = [pace.next_at(number / 100) - number / 100 for number in range(10_000)]
    assert max(late) <= 3.0 + 1e-9
    assert late[-1] == pytest.approx(3.0)
