"""Rendezvous hashing: when a worker leaves, only its own leases move."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stratalog_tiering.worker.leases import preferred_worker


@given(st.sets(st.text(max_size=5), min_size=2, max_size=6), st.lists(st.text(max_size=8), max_size=30))
def test_a_worker_that_leaves_moves_only_its_own_share(workers: set[str], names: list[str]) -> None:
    everyone = sorted(workers)
    gone, stayed = everyone[0], everyone[1:]
    for name in names:
        before = preferred_worker(name, everyone)
        assert preferred_worker(name, stayed) == before or before == gone


def test_without_workers_there_is_no_preference() -> None:
    assert preferred_worker("x", []) is None
