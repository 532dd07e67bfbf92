"""Placement and health: which bookies are chosen and which are avoided."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_bookies.client.core.bookie_health import BookieHealth
from stratalog_bookies.client.core.placement import Candidate, best_spread, choose_ensemble, choose_replacements, spread_of
from stratalog_core.errors import NotEnoughBookies

candidates = st.lists(
    st.builds(
        Candidate,
        bookie_id=st.integers(0, 20).map(lambda number: f"b{number}"),
        rack=st.sampled_from("xyz"),
        host=st.sampled_from(["", "h1", "h2", "h3"]),
        live=st.booleans(),
        read_only=st.booleans(),
        load=st.integers(0, 3).map(float),
    ),
    unique_by=lambda candidate: candidate.bookie_id,
)


def bookie(
    name: str, rack: str = "", *, host: str = "", live: bool = True, read_only: bool = False, load: float = 0.0
) -> Candidate:
    return Candidate(bookie_id=name, rack=rack, host=host, live=live, read_only=read_only, load=load)


@given(candidates=candidates, quorums=st.sampled_from([(1, 1, 1), (3, 3, 2), (3, 2, 2), (5, 3, 2)]), seed=st.integers())
def test_an_ensemble_is_writable_distinct_live_enough_and_spread(
    candidates: list[Candidate], quorums: tuple[int, int, int], seed: int
) -> None:
    ensemble_size, write_quorum, ack_quorum = quorums
    writable = {each.bookie_id: each for each in candidates if not each.read_only}
    live = {name for name, each in writable.items() if each.live}
    live_wanted = ensemble_size - write_quorum + ack_quorum
    if len(live) < live_wanted or len(writable) < ensemble_size:
        with pytest.raises(NotEnoughBookies):
            choose_ensemble(candidates, *quorums, Random(seed))
        return
    chosen = choose_ensemble(candidates, *quorums, Random(seed))
    assert len(set(chosen)) == len(chosen) == ensemble_size
    assert set(chosen) <= set(writable)
    assert len(live & set(chosen)) == min(len(live), ensemble_size)
    hosts_possible = {writable[name].host for name in live}
    hosts = {writable[name].host for name in chosen if name in live}
    assert len(hosts) == min(len(hosts_possible), len(live & set(chosen)))


@given(
    places=st.lists(st.sampled_from(["x/1", "x/2", "y/1", "y/2", "z/1"]), min_size=1, max_size=12),
    ensemble_size=st.integers(1, 5),
    seed=st.integers(),
)
def test_hosts_and_racks_are_both_spanned_as_far_as_they_go(places: list[str], ensemble_size: int, seed: int) -> None:
    """Each host is in one rack. No two copies share a host or a rack while there is one without a copy."""
    known = [bookie(f"b{number}", place[0], host=place) for number, place in enumerate(places)]
    if len(known) < ensemble_size:
        return
    chosen = set(choose_ensemble(known, ensemble_size, ensemble_size, ensemble_size, Random(seed)))
    members = [each for each in known if each.bookie_id in chosen]
    assert spread_of(members) == best_spread(known, ensemble_size)
    ensemble = [each.bookie_id for each in members]
    spare = [each for each in known if each.bookie_id not in chosen]
    replacements = choose_replacements(known, ensemble, (0,), Random(seed))
    assert len(replacements) == min(len(spare), 1)
    for position, name in replacements.items():
        others = [each for each in members if each is not members[position]]
        options = [spread_of([*others, each]) for each in spare]
        assert spread_of([*others, next(each for each in known if each.bookie_id == name)]) == max(options)


def test_a_rack_of_one_host_does_not_take_two_copies_while_another_host_is_free() -> None:
    known = [bookie("a", "x", host="h1"), bookie("b", "x", host="h1"), bookie("c", "y", host="h2"), bookie("d", "y", host="h3")]
    for seed in range(20):
        assert {"c", "d"} < set(choose_ensemble(known, 3, 3, 2, Random(seed)))


def test_the_less_loaded_first() -> None:
    loaded = [bookie("a", load=5), bookie("b", load=1), bookie("c", load=2), bookie("d", load=9)]
    assert set(choose_ensemble(loaded, 2, 2, 2, Random(1))) == {"b", "c"}


def test_a_ledger_may_be_born_with_one_bookie_down() -> None:
    known = [bookie("a"), bookie("b", live=False), bookie("c")]
    assert set(choose_ensemble(known, 3, 3, 2, Random(1))) == {"a", "b", "c"}
    with pytest.raises(NotEnoughBookies, match="start more bookies"):
        choose_ensemble([bookie("a"), bookie("b", live=False), bookie("c", live=False)], 3, 3, 2, Random(1))


def test_replacements_prefer_racks_that_the_rest_does_not_use() -> None:
    known = [bookie("a", "x"), bookie("b", "y"), bookie("c", "z"), bookie("d", "x"), bookie("e", "z", load=9)]
    assert choose_replacements(known, ("a", "b", "c"), (2,), Random(1)) == {2: "e"}


def test_no_bookie_takes_a_second_place_and_scarcity_is_no_error() -> None:
    known = [bookie("a"), bookie("b"), bookie("c"), bookie("d"), bookie("e", live=False), bookie("f", read_only=True)]
    assert choose_replacements(known, ("a", "b", "c"), (0, 1), Random(1)) == {0: "d"}
    assert choose_replacements(known[:3], ("a", "b", "c"), (0, 1), Random(1)) == {}


def test_failures_are_avoided_longer_each_time_and_an_answer_forgives() -> None:
    health = BookieHealth(1.0, 5.0)
    health.failed("a", 10.0)
    assert health.is_avoided("a", 10.9)
    assert not health.is_avoided("a", 11.0)
    health.failed("a", 11.0)
    assert health.avoided(12.9) == {"a"}
    for _ in range(100):
        health.failed("a", 20.0)
    assert health.is_avoided("a", 24.9)
    assert not health.is_avoided("a", 25.0)
    health.answered("a")
    assert not health.is_avoided("a", 20.0)
