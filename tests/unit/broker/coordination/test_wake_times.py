"""When groups and transactions are due. Nothing is left of keys that are forgotten or moved again and again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.coordination.wake_times import _STALE_MIN, WakeTimes

KEYS = st.sampled_from("abc")


@given(st.lists(st.tuples(KEYS, st.none() | st.integers(0, 100)), max_size=30), st.integers(0, 100))
def test_each_key_is_due_once_at_its_earliest_time(changes: list[tuple[str, int | None]], now_ms: int) -> None:
    wakes, expected = WakeTimes(), dict[str, int]()
    for key, at_ms in changes:
        if at_ms is None:
            wakes.forget(key)
            expected.pop(key, None)
        else:
            wakes.plan(key, at_ms)
            expected[key] = min(expected.get(key, at_ms), at_ms)
    assert sorted(wakes.due(now_ms)) == sorted(key for key, at_ms in expected.items() if at_ms <= now_ms)
    assert not list(wakes.due(now_ms))
    assert sorted(wakes.due(100)) == sorted(key for key, at_ms in expected.items() if at_ms > now_ms)


def test_keys_that_are_forgotten_leave_nothing() -> None:
    wakes = WakeTimes()
    wakes.plan("stays", 7)
    for number in range(5 * _STALE_MIN):
        wakes.plan(f"goes {number}", 1_000_000)
        wakes.forget(f"goes {number}")
    assert len(wakes._planned) == 1
    assert len(wakes._heap) <= _STALE_MIN + 2
    assert list(wakes.due(1_000_000)) == ["stays"]


def test_a_key_that_is_moved_again_and_again_is_held_once() -> None:
    wakes = WakeTimes()
    for at_ms in range(5 * _STALE_MIN, 0, -1):
        wakes.plan("a", at_ms)
    assert len(wakes._heap) <= _STALE_MIN + 2
    assert list(wakes.due(1)) == ["a"]
