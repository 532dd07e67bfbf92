"""When maintenance is due: after changes and at expirations, at most once per interval, and in turns after failures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.maintenance_times import RETRY_S, MaintenanceTask, MaintenanceTimes

RETENTION_S, SWEEP_S = 60.0, 3600.0
SETTINGS = TieringSettings(
    worker_id="w", retention_interval_ms=int(RETENTION_S * 1000), sweep_interval_ms=int(SWEEP_S * 1000)
)  # fmt: skip


def times(*, spread: float = 0.0, recheck: bool = False) -> MaintenanceTimes:
    return MaintenanceTimes(SETTINGS, 0.0, spread=spread, spread_s=0.0, recheck=recheck)


def looked(at: MaintenanceTimes, depends_on: str, expires_at_ms: int | None = None, now: float = 0.0) -> None:
    at.swept(now)
    at.nothing_due_before(depends_on, expires_at_ms, now)


def test_an_unchanged_partition_is_left_alone_until_something_expires() -> None:
    at = times()
    looked(at, "v1", expires_at_ms=500_000)
    assert at.due("v1", 499.0, 499_000) is None
    assert at.next_s("v1", 499.0, 499_000) == 1.0
    assert at.due("v1", 500.0, 500_000) is MaintenanceTask.RETENTION
    looked(at, "v1", None, 500.0)
    assert at.next_s("v1", 500.0, 500_000) == SWEEP_S


def test_a_change_is_checked_at_most_once_per_interval() -> None:
    at = times()
    looked(at, "v1")
    assert at.due("v2", RETENTION_S - 1, 0) is None
    assert at.next_s("v2", RETENTION_S - 1, 0) == 1.0
    assert at.due("v2", RETENTION_S, 0) is MaintenanceTask.RETENTION
    at.changed(RETENTION_S)
    assert at.due("v3", RETENTION_S, 0) is MaintenanceTask.RETENTION, "there may be more to do"


def test_a_sweep_that_is_wanted_at_once_does_not_wait_for_its_interval() -> None:
    at = times()
    looked(at, "v1")
    at.sweep_at_once(1.0)
    assert at.due("v1", 1.0, 0) is MaintenanceTask.SWEEP
    at.failed(MaintenanceTask.SWEEP, 1.0)
    assert at.has_failed("v1"), "what it reports stays until it succeeds"


def test_retention_is_not_due_without_cold_history() -> None:
    at = times()
    at.swept(0.0)
    assert at.due(None, RETENTION_S * 10, 0) is None
    assert at.next_s(None, 0.0, 0) == SWEEP_S


def test_failures_of_one_task_do_not_block_the_other_and_are_remembered() -> None:
    at = times()
    assert {at.due("v1", 0.0, 0)} <= set(MaintenanceTask)
    at.failed(MaintenanceTask.SWEEP, 0.0)
    assert at.due("v1", 0.0, 0) is MaintenanceTask.RETENTION
    at.nothing_due_before("v1", None, 0.0)
    assert at.due("v1", 0.0, 0) is None
    assert at.has_failed("v1")
    assert at.due("v1", RETRY_S, 0) is MaintenanceTask.SWEEP
    at.swept(RETRY_S)
    assert not at.has_failed("v1")


def test_an_earlier_sessions_error_is_cleared_after_all_tasks_succeed() -> None:
    at = times(spread=0.9, recheck=True)
    assert at.has_failed("v1")
    at.swept(0.0)
    assert not at.has_failed(None), "there is nothing to retain"
    assert at.has_failed("v1")
    assert at.due("v1", 0.0, 0) is MaintenanceTask.RETENTION
    at.nothing_due_before("v1", None, 0.0)
    assert not at.has_failed("v1")


STEPS = st.tuples(st.floats(0, 500), st.sampled_from(["v1", "v2", None]), st.sampled_from(["ok", "fail"]))


@given(steps=st.lists(STEPS, max_size=40))
def test_due_work_is_returned_at_once_but_not_more_often_than_the_intervals(
    steps: list[tuple[float, str | None, str]],
) -> None:
    at, now, done = times(), 0.0, dict.fromkeys(MaintenanceTask, -1000000000.0)
    intervals = {MaintenanceTask.RETENTION: RETENTION_S, MaintenanceTask.SWEEP: SWEEP_S}
    for later_s, depends_on, outcome in steps:
        now += later_s
        task = at.due(depends_on, now, int(now * 1000))
        assert (task is not None) == (at.next_s(depends_on, now, int(now * 1000)) == 0.0)
        if task is None:
            continue
        assert now - done[task] >= min(RETRY_S, intervals[task])
        done[task] = now
        if outcome == "fail":
            at.failed(task, now)
        elif task is MaintenanceTask.SWEEP:
            at.swept(now)
        else:
            at.nothing_due_before(depends_on, None, now)
