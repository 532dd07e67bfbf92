"""Balance: which partitions move, which do not, and that balancing ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from stratalog_metadata.controller.balance import (
    IDLE,
    NOTHING_MOVED,
    SPREAD_BEGIN,
    WINDOWS,
    Move,
    Place,
    Placed,
    Rates,
    plan_moves,
)

PLACES = st.dictionaries(
    st.integers(0, 6), st.builds(Place, rack=st.sampled_from(["", "a", "b"]), is_leaving=st.booleans()), min_size=1, max_size=6
)
BROKERS = st.integers(2, 5).map(lambda count: {number: Place() for number in range(count)})
RATE = st.sampled_from([0.0, 0.01, 1.0, 1.0, 1.0, 3.0]) | st.floats(0.01, 20.0)
RATES = st.just(IDLE) | RATE.map(lambda rate: (rate,) * WINDOWS) | st.tuples(*[RATE] * WINDOWS)
PARTITIONS = st.lists(
    st.builds(
        Placed,
        owner=st.integers(0, 7),
        rates=RATES,
        rack=st.sampled_from(["", "", "a", "b", "nowhere"]),
        may_level=st.booleans() | st.just(True),
    ),
    max_size=40,
)
WITHOUT_RACKS = st.lists(st.builds(Placed, owner=st.integers(0, 5), rates=RATES), max_size=40)


def steady(rate: float) -> Rates:
    return (rate,) * WINDOWS


def moved(partitions: list[Placed], moves: list[Move]) -> list[Placed]:
    after = list(partitions)
    for move in moves:
        after[move.position] = replace(after[move.position], owner=move.target)
    return after


def counted(partitions: list[Placed], brokers: dict[int, Place]) -> Counter[int]:
    found = Counter(dict.fromkeys(brokers, 0))
    found.update(partition.owner for partition in partitions if partition.owner in brokers)
    return found


def loads(partitions: list[Placed], brokers: dict[int, Place]) -> dict[int, Rates]:
    return {
        broker_id: tuple(
            sum(partition.rates[window] for partition in partitions if partition.owner == broker_id)
            for window in range(WINDOWS)
        )
        for broker_id in brokers
    }


def widest_traffic(partitions: list[Placed], brokers: dict[int, Place]) -> tuple[float, float]:
    """Return the difference of two brokers in every window, and the mean load of the busiest window."""
    found = loads(partitions, brokers)
    apart = [min(a - b for a, b in zip(found[one], found[other], strict=True)) for one, other in permutations(brokers, 2)]
    return max(apart, default=0.0), max(sum(window) for window in zip(*found.values(), strict=True)) / len(brokers)


def settle(partitions: list[Placed], brokers: dict[int, Place], moves_max: int) -> tuple[list[Placed], list[Move]]:
    """Run rounds until nothing moves."""
    made: list[Move] = []
    plan = NOTHING_MOVED
    for _ in range(500):
        plan = plan_moves(partitions, brokers, leaving_max=moves_max, others_max=moves_max, before=plan)
        assert len(plan.moves) <= moves_max
        if not plan.moves:
            return partitions, made
        partitions = moved(partitions, list(plan.moves))
        made += plan.moves
    raise AssertionError("it goes on for ever")


@given(PARTITIONS, PLACES, st.integers(1, 5))
def test_balancing_ends(partitions: list[Placed], brokers: dict[int, Place], moves_max: int) -> None:
    after, _ = settle(partitions, brokers, moves_max)
    takers = {number for number, place in brokers.items() if not place.is_leaving}
    for partition in after:
        if partition.owner not in brokers or not takers:
            continue
        assert partition.owner in takers, "nobody owns anything on a broker that leaves"
        preferred = {number for number in takers if brokers[number].rack == partition.rack}
        assert not (partition.rack and preferred) or partition.owner in preferred


@given(PARTITIONS, PLACES)
def test_no_partition_moves_twice_within_one_plan(partitions: list[Placed], brokers: dict[int, Place]) -> None:
    plan = plan_moves(partitions, brokers, leaving_max=1000, others_max=1000)
    for move in plan.moves:
        assert move.target in brokers
        assert not brokers[move.target].is_leaving
    assert all(count == 1 for count in Counter(move.position for move in plan.moves).values())


@given(st.lists(st.integers(1, 4), max_size=60), st.integers(2, 5))
def test_partition_counts_end_within_two_of_each_other(owners: list[int], count: int) -> None:
    brokers = {number: Place() for number in range(1, count + 1)}
    partitions = [Placed(owner=min(owner, count)) for owner in owners]
    after, made = settle(partitions, brokers, 3)
    counts, before = counted(after, brokers), counted(partitions, brokers)
    mean = len(partitions) / count
    if made:
        assert max(counts.values()) - min(counts.values()) <= max(1, 0.2 * mean)
        assert len(made) <= sum(max(0, one - len(partitions) // count) for one in before.values()), "no more than is needed"
    else:
        assert max(counts.values()) - min(counts.values()) <= max(1, SPREAD_BEGIN * mean)


@given(WITHOUT_RACKS, BROKERS)
def test_an_even_distribution_is_not_changed(partitions: list[Placed], brokers: dict[int, Place]) -> None:
    plan = plan_moves(partitions, brokers, leaving_max=9, others_max=9)
    counts = counted(partitions, brokers)
    apart, mean_load = widest_traffic(partitions, brokers)
    are_even = max(counts.values()) - min(counts.values()) <= SPREAD_BEGIN * counts.total() / len(brokers)
    if are_even and apart <= SPREAD_BEGIN * mean_load:
        assert not plan.moves


@given(WITHOUT_RACKS, BROKERS)
def test_a_move_improves_traffic_in_every_window_or_is_idle_and_evens_counts(
    partitions: list[Placed], brokers: dict[int, Place]
) -> None:
    """An idle partition does not move for traffic, and no partition moves that has load in some windows only."""
    for move in settle(partitions, brokers, 4)[1]:
        rates, source = partitions[move.position].rates, partitions[move.position].owner
        if rates == IDLE:
            counts = counted(partitions, brokers)
            assert counts[source] - counts[move.target] >= 2
        else:
            now = loads(partitions, brokers)
            for rate, more, less in zip(rates, now[source], now[move.target], strict=True):
                assert 0 < rate <= (more - less) * (1 + 1e-9)
        partitions = moved(partitions, [move])


def test_a_joining_broker_gets_a_share_and_nothing_else_moves() -> None:
    for rates in (IDLE, steady(1.0)):
        partitions = [Placed(owner=1 + number % 2, rates=rates) for number in range(30)]
        after, made = settle(partitions, {1: Place(), 2: Place(), 3: Place()}, 4)
        counts = Counter(partition.owner for partition in after)
        assert all(9 <= count <= 11 for count in counts.values())
        assert len(made) == counts[3], "what others give, and nothing else"


def test_a_joining_broker_gets_traffic_and_partitions() -> None:
    """Few partitions carry most traffic, and hundreds carry little: both traffic and counts must become even."""
    partitions = [Placed(owner=1 + number % 2, rates=steady(100.0 if number < 40 else 0.1)) for number in range(600)]
    brokers = {1: Place(), 2: Place(), 3: Place()}
    after, made = settle(partitions, brokers, 20)
    counts = counted(after, brokers)
    assert max(counts.values()) - min(counts.values()) <= 0.2 * 200
    apart, mean = widest_traffic(after, brokers)
    assert apart <= 0.2 * mean
    assert len(made) < 220


def test_a_partition_that_is_the_whole_load_does_not_move() -> None:
    partitions = [Placed(owner=1, rates=steady(100.0)), Placed(owner=2, rates=steady(0.1))]
    assert not plan_moves(partitions, {1: Place(), 2: Place()}, leaving_max=9, others_max=9).moves


def test_a_hot_partition_causes_no_useless_moves() -> None:
    for others in (0.0, 0.05):
        partitions = [Placed(owner=number % 2, rates=steady(100.0 if number == 0 else others)) for number in range(376)]
        assert not plan_moves(partitions, {0: Place(), 1: Place()}, leaving_max=9, others_max=9).moves


def test_a_difference_that_is_not_in_every_window_moves_nothing() -> None:
    for rates in ((0.0, 10.0, 10.0), (10.0, 0.0, 10.0), (10.0, 10.0, 0.0), (1.0, 10.0, 10.0)):
        partitions = [Placed(owner=number // 4, rates=rates if number < 4 else IDLE) for number in range(8)]
        assert not plan_moves(partitions, {0: Place(), 1: Place()}, leaving_max=9, others_max=9).moves
    partitions = [Placed(owner=number // 4, rates=(8.0, 10.0, 10.0) if number < 4 else IDLE) for number in range(8)]
    plan = plan_moves(partitions, {0: Place(), 1: Place()}, leaving_max=9, others_max=9)
    assert Counter(move.target for move in plan.moves if partitions[move.position].rates != IDLE) == {1: 2}


def test_drained_partitions_go_to_the_least_loaded_brokers() -> None:
    busy, idle = steady(5.0), IDLE
    partitions = [
        Placed(owner=1, rates=busy), *[Placed(owner=2, rates=idle)] * 3,
        *[Placed(owner=3, rates=busy)] * 2, *[Placed(owner=3, rates=idle)] * 2,
    ]  # fmt: skip
    plan = plan_moves(partitions, {1: Place(), 2: Place(), 3: Place(is_leaving=True)}, leaving_max=9)
    after = moved(partitions, list(plan.moves))
    brokers = {1: Place(), 2: Place()}
    assert counted(after, brokers) == {1: 4, 2: 4}
    assert sorted(load[0] for load in loads(after, brokers).values()) == [5.0, 10.0]


# --- assignments -----------------------------------------------------------------------------------------------------

ASSIGNED = st.lists(
    st.builds(
        Placed, owner=st.integers(0, 4), rates=RATES, rack=st.sampled_from(["", "a"]),
        assigned=st.lists(st.integers(0, 6), unique=True, max_size=3).map(tuple),
    ),
    max_size=30,
)  # fmt: skip


@given(partitions=ASSIGNED, brokers=PLACES)
def test_partitions_end_at_the_first_broker_of_their_assignment_and_stay_there(
    partitions: list[Placed], brokers: dict[int, Place]
) -> None:
    after, _ = settle(partitions, brokers, 5)
    takers = [broker_id for broker_id, place in brokers.items() if not place.is_leaving]
    for partition in after:
        wanted = [broker_id for broker_id in partition.assigned if broker_id in takers]
        if wanted and partition.owner in brokers:
            assert partition.owner == wanted[0]
