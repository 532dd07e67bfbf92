"""When a metadata node's disk counts as stalled."""

from __future__ import annotations

from stratalog_metadata.node.disk_stall import TIMEOUTS, DiskStall

TIMEOUT_S = 0.5
HEARTBEAT_S = 0.1
TURNS = round(TIMEOUTS * TIMEOUT_S / HEARTBEAT_S)


def watched(turns: list[tuple[int, int]], step_s: float = HEARTBEAT_S) -> DiskStall:
    """A judge that saw each (commit, stable) once, ``step_s`` apart."""
    stall = DiskStall(TIMEOUT_S, HEARTBEAT_S, 0.0)
    for number, (commit, stable) in enumerate(turns, 1):
        stall.observe(commit, stable, number * step_s)
    return stall


def test_a_disk_that_lacks_what_others_have_stored_is_stalled_after_the_limit() -> None:
    assert not watched([(5, 4)] * (TURNS - 5)).is_stalled
    assert watched([(5, 4)] * (TURNS + 5)).is_stalled


def test_a_disk_that_makes_progress_is_not_stalled() -> None:
    assert not watched([(number + 10, number) for number in range(10 * TURNS)]).is_stalled


def test_nothing_is_stalled_while_nothing_more_is_committed() -> None:
    assert not watched([(4, 4)] * 10 * TURNS).is_stalled


def test_one_write_ends_a_stall() -> None:
    assert not watched([(9, 4)] * 2 * TURNS + [(9, 5)]).is_stalled


def test_a_stall_of_the_process_is_none_of_the_disk() -> None:
    assert not watched([(5, 4)] * 3, step_s=100.0).is_stalled
