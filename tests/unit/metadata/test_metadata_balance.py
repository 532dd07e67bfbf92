"""Balance: what moves, what does not, and that it comes to an end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from stratalog_metadata.balance import SPREAD_BEGIN, Move, Place, Placed, plan_moves

PLACES = st.dictionaries(
    st.integers(0, 6), st.builds(Place, rack=st.sampled_from(["", "a", "b"]), is_leaving=st.booleans()), min_size=1, max_size=6
)
PARTITIONS = st.lists(
    st.builds(
        Placed,
        owner=st.integers(0, 7),
        load=st.sampled_from([0.5, 1.0, 1.0, 1.0, 3.0]) | st.floats(0.01, 20.0),
        rack=st.sampled_from(["", "", "a", "b", "nowhere"]),
        may_level=st.booleans() | st.just(True),
    ),
    max_size=40,
)


def moved(partitions: list[Placed], moves: list[Move]) -> list[Placed]:
    after = list(partitions)
    for move in moves:
        after[move.position] = replace(after[move.position], owner=move.target)
    return after


def loads(partitions: list[Placed], brokers: dict[int, Place]) -> dict[int, float]:
    found = dict.fromkeys((number for number, place in brokers.items() if not place.is_leaving), 0.0)
    for partition in partitions:
        if partition.owner in found:
            found[partition.owner] += partition.load
    return found


def settle(partitions: list[Placed], brokers: dict[int, Place], moves_max: int) -> tuple[list[Placed], list[Move]]:
    """Round after round, until nothing moves."""
    made: list[Move] = []
    is_levelling = False
    for _ in range(500):
        moves = plan_moves(partitions, brokers, leaving_max=moves_max, others_max=moves_max, is_levelling=is_levelling)
        assert len(moves) <= moves_max
        if not moves:
            return partitions, made
        partitions, is_levelling = moved(partitions, moves), True
        made += moves
    raise AssertionError("it goes on for ever")


@given(PARTITIONS, PLACES, st.integers(1, 5))
def test_rounds_end_and_leave_nothing_to_do(partitions: list[Placed], brokers: dict[int, Place], moves_max: int) -> None:
    after, _ = settle(partitions, brokers, moves_max)
    takers = {number for number, place in brokers.items() if not place.is_leaving}
    for partition in after:
        if partition.owner not in brokers or not takers:
            continue
        assert partition.owner in takers, "nobody owns anything on a broker that leaves"
        preferred = {number for number in takers if brokers[number].rack == partition.rack}
        assert not (partition.rack and preferred) or partition.owner in preferred


@given(PARTITIONS, PLACES)
def test_no_partition_comes_back_within_one_plan(partitions: list[Placed], brokers: dict[int, Place]) -> None:
    moves = plan_moves(partitions, brokers, leaving_max=1000, others_max=1000)
    for move in moves:
        assert move.target in brokers
        assert not brokers[move.target].is_leaving
    by_levelling = [move for move in moves if partitions[move.position].rack == ""]
    assert all(count <= len(brokers) for count in Counter(move.position for move in by_levelling).values())


@given(st.lists(st.integers(1, 4), max_size=60), st.integers(2, 5))
def test_equal_loads_end_within_two_of_each_other(owners: list[int], count: int) -> None:
    brokers = {number: Place() for number in range(1, count + 1)}
    partitions = [Placed(owner=min(owner, count)) for owner in owners]
    after, made = settle(partitions, brokers, 3)
    counts = Counter(dict.fromkeys(brokers, 0) | Counter(partition.owner for partition in after))
    before = Counter(dict.fromkeys(brokers, 0) | Counter(partition.owner for partition in partitions))
    mean = len(partitions) / count
    if made:
        assert max(counts.values()) - min(counts.values()) <= max(1, 0.2 * mean)
        assert len(made) <= sum(max(0, one - len(partitions) // count) for one in before.values()), "no more than is needed"
    else:
        assert max(counts.values()) - min(counts.values()) <= max(1, SPREAD_BEGIN * mean)


@given(PARTITIONS, PLACES)
def test_what_is_even_enough_stays(partitions: list[Placed], brokers: dict[int, Place]) -> None:
    brokers = {number: replace(place, is_leaving=False) for number, place in brokers.items()}
    partitions = [replace(partition, rack="") for partition in partitions]
    spread = loads(partitions, brokers)
    mean = sum(spread.values()) / len(spread)
    moves = plan_moves(partitions, brokers, leaving_max=9, others_max=9)
    if max(spread.values()) - min(spread.values()) <= SPREAD_BEGIN * mean:
        assert moves == []


@given(PARTITIONS, PLACES)
def test_levelling_never_widens_the_spread(partitions: list[Placed], brokers: dict[int, Place]) -> None:
    brokers = {number: replace(place, is_leaving=False) for number, place in brokers.items()}
    partitions = [replace(partition, rack="") for partition in partitions]
    after, _ = settle(partitions, brokers, 4)
    assert sum(load**2 for load in loads(after, brokers).values()) <= (
        sum(load**2 for load in loads(partitions, brokers).values()) + 1e-6
    )


def test_a_broker_that_joins_gets_a_share_and_others_give_no_more() -> None:
    partitions = [Placed(owner=1 + number % 2) for number in range(30)]
    after, made = settle(partitions, {1: Place(), 2: Place(), 3: Place()}, 4)
    counts = Counter(partition.owner for partition in after)
    assert all(9 <= count <= 11 for count in counts.values())
    assert len(made) == counts[3], "what others give, and nothing else"


def test_one_partition_that_is_the_whole_load_is_not_passed_around() -> None:
    partitions = [Placed(owner=1, load=100.0), Placed(owner=2, load=0.1)]
    assert plan_moves(partitions, {1: Place(), 2: Place()}, leaving_max=9, others_max=9) == []
