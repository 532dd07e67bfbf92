"""The schedule of a tiering worker, against a model that looks at everything each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stratalog_tiering.core.schedule import Schedule

NAMES = st.sampled_from("abcdef")
TIMES = st.integers(0, 20)
STEPS = st.lists(
    st.tuples(st.just("due"), NAMES, TIMES)
    | st.tuples(st.just("take"), TIMES, st.integers(0, 4))
    | st.tuples(st.just("end"), st.integers(0, 5), st.none() | TIMES),
    max_size=60,
)


@given(steps=STEPS)
def test_it_takes_what_is_due_the_longest_due_first(steps: list[tuple[str, str | int, int | None]]) -> None:
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
