"""How fast history is sent while producers wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.reads.replay_rate import KNOWN_S, RISE_S, ReplayRate

LOOK_S = 0.25
MB = 1_000_000
USUAL_S = 0.005
SHARE = 0.25


def looked(rate: ReplayRate, seconds: float, acknowledged_s: float | None, mb_s: float) -> ReplayRate:
    """After looks at requests of that mean time and history sent at that rate."""
    for _ in range(round(seconds / LOOK_S)):
        rate.update(LOOK_S, acknowledged_s, int(mb_s * MB * LOOK_S))
    return rate


def held(acknowledged_s: float = 4 * USUAL_S) -> ReplayRate:
    """The rate of a replay of 100 MB/s that has just been held."""
    rate = looked(ReplayRate(SHARE), 1, USUAL_S, 0)
    looked(rate, 5, USUAL_S, 100)
    assert rate.limit == 0
    return looked(rate, LOOK_S, acknowledged_s, 100)


def test_history_is_held_to_its_share_as_soon_as_producers_wait() -> None:
    assert held().limit == pytest.approx(SHARE * 100 * MB, rel=0.01)


def test_one_that_does_not_slow_producers_down_is_not_held() -> None:
    rate = looked(ReplayRate(SHARE), 1, USUAL_S, 0)
    assert looked(rate, 60, 1.4 * USUAL_S, 100).limit == 0


def test_the_rate_rises_again_when_producers_wait_no_longer() -> None:
    rate = looked(held(), RISE_S / 2, USUAL_S, 25)
    assert rate.limit == pytest.approx(75 * MB, rel=0.05)
    assert looked(rate, RISE_S / 2, USUAL_S, 75).limit == 0


def test_it_falls_at_once_if_they_wait_again() -> None:
    rate = looked(held(), RISE_S / 2, USUAL_S, 25)
    assert looked(rate, LOOK_S, 4 * USUAL_S, 75).limit == pytest.approx(25 * MB, rel=0.01)


def test_without_producers_nothing_is_held() -> None:
    assert looked(held(), LOOK_S, None, 25).limit == 0


def test_what_stays_slow_while_history_is_held_is_taken_for_usual() -> None:
    """Something else slows the producers down."""
    rate = looked(held(), 60, 4 * USUAL_S, 25)
    assert looked(rate, RISE_S, 4 * USUAL_S, 25).limit == 0
    assert looked(rate, 10, 4 * USUAL_S, 100).limit == 0


def test_if_the_usual_time_is_not_known_history_is_held_for_a_moment() -> None:
    rate = looked(ReplayRate(SHARE), KNOWN_S, 3 * USUAL_S, 100)
    assert 0 < rate.limit <= SHARE * 100 * MB
    looked(rate, KNOWN_S, USUAL_S, 20)
    assert rate.limit == 0
    assert looked(rate, KNOWN_S, 3 * USUAL_S, 100).limit, "three times the usual time"
    rate = looked(ReplayRate(SHARE), 2 * KNOWN_S, 3 * USUAL_S, 100)
    assert looked(rate, 60, 3 * USUAL_S, 100).limit == 0, "the usual time"


def test_history_that_is_sent_slowly_anyway_is_not_held() -> None:
    rate = looked(ReplayRate(SHARE), 1, USUAL_S, 0)
    looked(rate, 5, USUAL_S, 3)
    assert looked(rate, 5, 9 * USUAL_S, 3).limit == 0


def test_the_burst_at_the_beginning_is_not_taken_for_the_rate() -> None:
    rate = looked(ReplayRate(SHARE), 1, USUAL_S, 0)
    assert looked(rate, KNOWN_S / 2, 9 * USUAL_S, 1000).limit == 0


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.one_of(st.none(), st.floats(0, 10)), st.integers(0, 1 << 30)), max_size=60),
    st.sampled_from((0.01, 0.25, 0.9)),
)
def test_it_is_never_held_below_its_share(looks: list[tuple[float, float | None, int]], share: float) -> None:
    rate, full = ReplayRate(share), 0.0
    for elapsed_s, acknowledged_s, sent in looks:
        was_free = rate.limit == 0
        rate.update(elapsed_s, acknowledged_s, sent)
        if was_free and rate.limit:
            full = rate.limit / share
        assert rate.limit == 0 or share * full * 0.999 <= rate.limit < full
