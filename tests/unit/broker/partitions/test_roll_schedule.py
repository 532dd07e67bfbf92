"""Open ledgers roll when they are old or idle, and a second costs what is due in it, not what is open."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.partitions.roll_schedule import RollSchedule


class _Log:
    def __init__(self, again_ms: list[int | None] | None = None) -> None:
        self.looks = 0
        self._again_ms = again_ms or []

    def tick(self) -> int | None:
        self.looks += 1
        return self._again_ms.pop(0) if self._again_ms else None


def test_ten_thousand_open_ledgers_cost_nothing_before_their_time() -> None:
    schedule = RollSchedule()
    logs = [_Log() for _ in range(10_000)]
    for position, log in enumerate(logs):
        schedule.look_at(log, 600_000 + position)
    assert sum(schedule.run(now_ms) for now_ms in range(0, 600_000, 1000)) == 0
    assert schedule.run(600_002) == 3
    assert [log.looks for log in logs[:4]] == [1, 1, 1, 0]


def test_one_that_was_looked_at_too_early_is_looked_at_again_when_it_says() -> None:
    schedule, log = RollSchedule(), _Log([500, None])
    schedule.look_at(log, 100)
    assert [schedule.run(now_ms) for now_ms in (99, 100, 499, 500, 10_000)] == [0, 1, 0, 1, 0]


def test_an_earlier_time_counts_and_a_later_one_does_not() -> None:
    schedule, log = RollSchedule(), _Log()
    for due_ms in (300, 100, 200):
        schedule.look_at(log, due_ms)
    assert [schedule.run(now_ms) for now_ms in (99, 100, 1_000)] == [0, 1, 0]


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    schedule = RollSchedule()
    for _ in range(10_000):
        log = _Log()
        schedule.look_at(log, 1_000_000)
        schedule.forget(log)
    assert len(schedule) == 0
    assert len(schedule._heap) <= 65


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), max_size=60))
def test_each_is_looked_at_once_at_the_earliest_time_that_was_asked_for(asked: list[tuple[int, int]]) -> None:
    schedule, logs = RollSchedule(), [_Log() for _ in range(6)]
    earliest: dict[int, int] = {}
    for position, due_ms in asked:
        schedule.look_at(logs[position], due_ms)
        earliest[position] = min(due_ms, earliest.get(position, due_ms))
    for now_ms in range(102):
        schedule.run(now_ms)
        assert {position for position, log in enumerate(logs) if log.looks} == {
            position for position, due_ms in earliest.items() if due_ms <= now_ms
        }
    assert all(log.looks <= 1 for log in logs)
