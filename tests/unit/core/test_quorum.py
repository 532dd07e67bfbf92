"""Quorum arithmetic, against brute force over all small ensembles."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.errors import Invalid
from stratalog_core.quorum import absence_proved, check_quorums, fencing_complete, majority, write_set


@st.composite
def quorums(draw: st.DrawFn) -> tuple[int, int, int]:
    ensemble = draw(st.integers(1, 7))
    write = draw(st.integers(1, ensemble))
    return ensemble, write, draw(st.integers(1, write))


@given(st.integers(1, 50))
def test_two_majorities_intersect_and_none_smaller_would(nodes: int) -> None:
    assert 2 * majority(nodes) > nodes
    assert 2 * (majority(nodes) - 1) <= nodes


@given(quorums(), st.integers(0, 1000))
def test_a_write_set_is_qw_neighbours(shape: tuple[int, int, int], entry_id: int) -> None:
    ensemble, write, _ = shape
    positions = write_set(entry_id, ensemble, write)
    assert len(set(positions)) == write
    assert positions[0] == entry_id % ensemble
    assert all((right - left) % ensemble == 1 % ensemble for left, right in pairwise(positions))


@given(quorums())
def test_absence_is_proved_only_when_no_ack_quorum_can_have_the_entry(shape: tuple[int, int, int]) -> None:
    _, write, ack = shape
    for negatives in range(write + 1):
        could_be_acknowledged = write - negatives >= ack
        assert absence_proved(write, ack, negatives) == (not could_be_acknowledged)


@given(quorums(), st.sets(st.integers(0, 6)))
def test_fencing_is_complete_exactly_when_no_entry_can_reach_qa(shape: tuple[int, int, int], fenced: set[int]) -> None:
    ensemble, write, ack = shape
    fenced = {position for position in fenced if position < ensemble}
    reachable = any(
        set(acks).isdisjoint(fenced)
        for entry in range(ensemble)
        for acks in combinations(write_set(entry, ensemble, write), ack)
    )
    assert fencing_complete(ensemble, write, ack, fenced) == (not reachable)


@given(quorums())
def test_any_e_minus_qa_plus_one_fence_enough(shape: tuple[int, int, int]) -> None:
    ensemble, write, ack = shape
    for fenced in combinations(range(ensemble), ensemble - ack + 1):
        assert fencing_complete(ensemble, write, ack, set(fenced))


@pytest.mark.parametrize(("ensemble", "write", "ack"), [(2, 3, 1), (3, 2, 3), (3, 3, 0), (0, 0, 0)])
def test_impossible_quorums_are_refused(ensemble: int, write: int, ack: int) -> None:
    with pytest.raises(Invalid, match="E >= Qw >= Qa >= 1"):
        check_quorums(ensemble, write, ack)
    check_quorums(3, 3, 2)
