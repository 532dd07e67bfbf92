"""Decisions of the auditor: which bookies are lost, what a position holds, which copies move where,
what need not be checked.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_bookies.client.core.fragments import with_moved, write_bookies
from stratalog_bookies.client.core.placement import Candidate, best_spread, spread_of
from stratalog_bookies.repair.core.audit_plan import Cause, copies_by_bookie, ledgers_to_restore, plan_moves, with_loads
from stratalog_bookies.repair.core.audit_progress import Progress
from stratalog_bookies.repair.core.lost_bookies import FailedStorage, LostBookies
from stratalog_bookies.repair.core.shares import WINDOW_ENTRIES, runs, share_of
from stratalog_metadata.records import Bookie, Fragment, Ledger, LedgerState

NAMES = [f"b{number}" for number in range(8)]


def closed(
    *fragments: tuple[int, tuple[str, ...]], last: int = 99, write_quorum: int = 3, ledger_id: int = 1, state: str = "closed"
) -> Ledger:
    return Ledger(
        ledger_id=ledger_id, topic_id=UUID(int=1), partition=0, base_offset=0, leader_epoch=1, write_quorum=write_quorum,
        ack_quorum=min(2, write_quorum), state=LedgerState(state), last_entry=last,
        fragments=tuple(Fragment(first_entry=first, bookies=bookies) for first, bookies in fragments),
    )  # fmt: skip


def live(name: str, rack: str = "", load: float = 0.0, host: str = "") -> Candidate:
    return Candidate(bookie_id=name, rack=rack, host=host or f"host of {name}", live=True, load=load)


def down(name: str, rack: str = "") -> Candidate:
    return Candidate(bookie_id=name, rack=rack, host=f"host of {name}", live=False)


def bookie(name: str, *, session_id: int) -> Bookie:
    return Bookie(bookie_id=name, address="h:1", cookie="c", session_id=session_id)


# -- which bookies are lost


def test_a_bookie_is_lost_after_the_delay_and_not_before() -> None:
    lost = LostBookies(600.0)
    records = [bookie("b0", session_id=1), bookie("b1", session_id=0)]
    lost.observe(records, (), 1000.0)
    lost.observe(records, (), 1500.0)
    assert lost.down().bookies == {"b1"}
    assert lost.lost(1599.9).bookies == frozenset()
    assert lost.lost(1600.0).bookies == {"b1"}


def test_a_failed_disk_loses_its_ledgers_alone() -> None:
    lost = LostBookies(10.0)
    record = Bookie(bookie_id="b1", address="h:1", cookie="c", session_id=1, disks=3, failed_disks=(2,))
    for now in (0.0, 10.0):
        lost.observe([record], ("b1",), now)
    assert [ledger_id for ledger_id in range(9) if lost.lost(9.9).of(ledger_id)] == []
    assert [ledger_id for ledger_id in range(9) if lost.lost(10.0).of(ledger_id)] == [2, 5, 8]
    assert [ledger_id for ledger_id in range(9) if record.has_failed_for(ledger_id)] == [2, 5, 8]


def test_a_bookie_that_was_seen_alive_is_waited_for_anew() -> None:
    lost = LostBookies(600.0)
    for now, session_id in ((0.0, 0), (500.0, 7), (510.0, 0)):
        lost.observe([bookie("b1", session_id=session_id)], (), now)
    assert lost.lost(1100.0).bookies == frozenset()
    assert lost.lost(1110.0).bookies == {"b1"}


def test_a_bookie_that_is_named_and_not_registered_is_lost_too() -> None:
    lost = LostBookies(10.0)
    lost.observe([bookie("b0", session_id=1)], ("b0", "gone"), 0.0)
    assert lost.lost(10.0).bookies == {"gone"}


# -- shares

quorums = st.integers(1, 6).flatmap(lambda ensemble: st.tuples(st.just(ensemble), st.integers(1, ensemble)))


@given(quorums=quorums, cuts=st.sets(st.integers(1, 40), max_size=3), last=st.integers(-1, 50))
def test_shares_are_exactly_the_write_sets(quorums: tuple[int, int], cuts: set[int], last: int) -> None:
    """Over all fragments and positions, every entry is held by its write set and by no other bookie."""
    ensemble_size, write_quorum = quorums
    bookies = tuple(NAMES[:ensemble_size])
    firsts = [0, *sorted(cut for cut in cuts if cut <= last + 1)]
    ledger = closed(*((first, bookies) for first in firsts), last=last, write_quorum=write_quorum)
    held: dict[int, list[str]] = {}
    for fragment in range(len(firsts)):
        for position in range(ensemble_size):
            share = share_of(ledger, fragment, position)
            for first, end in share.windows():
                for entry_id in share.within(first, end):
                    held.setdefault(entry_id, []).append(bookies[position])
    assert {entry_id: sorted(names) for entry_id, names in held.items()} == {
        entry_id: sorted(write_bookies(ledger, entry_id)) for entry_id in range(last + 1)
    }


def test_a_long_share_is_looked_at_in_windows() -> None:
    share = share_of(closed((0, ("b0", "b1", "b2")), last=WINDOW_ENTRIES), 0, 1)
    assert list(share.windows()) == [(0, WINDOW_ENTRIES - 1), (WINDOW_ENTRIES, WINDOW_ENTRIES)]


@given(ids=st.sets(st.integers(0, 200)).map(sorted), gap=st.integers(1, 6))
def test_runs_join_neighbours_and_lose_nothing(ids: list[int], gap: int) -> None:
    found = runs(ids, gap)
    assert [entry_id for run in found for entry_id in run] == ids
    for left, right in pairwise(found):
        assert right[0] - left[-1] > gap
    assert all(after - before <= gap for run in found for before, after in pairwise(run))


# -- moves


def test_a_lost_copy_goes_to_a_spare_bookie_of_another_rack() -> None:
    ledger = closed((0, ("b0", "b1", "b2")))
    candidates = [live("b0", "r0"), down("b1", "r1"), live("b2", "r2"), live("b3", "r0"), live("b4", "r1"), live("b5", "r2")]
    (move,) = plan_moves(ledger, {"b1"}, frozenset(), candidates, Random(1))
    assert (move.fragment, move.position, move.target, move.cause) == (0, 1, "b4", Cause.LOST)


def test_every_fragment_that_names_the_bookie_is_mended() -> None:
    ledger = closed((0, ("b0", "b1", "b2")), (10, ("b0", "b3", "b2")), (20, ("b1", "b3", "b2")))
    moves = plan_moves(ledger, {"b1"}, frozenset(), [live(name) for name in NAMES], Random(1))
    assert [(move.fragment, move.position) for move in moves] == [(0, 1), (2, 0)]


@pytest.mark.parametrize("state", ["open", "in_recovery"])
def test_a_ledger_that_is_not_closed_is_left_alone(state: str) -> None:
    ledger = closed((0, ("b0", "b1", "b2")), state=state)
    assert plan_moves(ledger, {"b1"}, {"b2"}, [live(name) for name in NAMES], Random(1)) == []
    assert ledgers_to_restore([ledger], FailedStorage(frozenset({"b1"})), {"b2"}) == []


def test_the_only_spare_bookie_goes_to_the_lost_copy() -> None:
    ledger = closed((0, ("b0", "b1", "b2")))
    candidates = [live("b0"), down("b1"), live("b2"), live("b3")]
    (move,) = plan_moves(ledger, {"b1"}, {"b0"}, candidates, Random(1))
    assert (move.position, move.target, move.cause) == (1, "b3", Cause.LOST)


def test_without_a_spare_nothing_moves() -> None:
    ledger = closed((0, ("b0", "b1", "b2")))
    unfit = [
        Candidate(bookie_id="b3", rack="", live=True, read_only=True),
        Candidate(bookie_id="b4", rack="", live=True, draining=True),
    ]
    assert plan_moves(ledger, {"b1"}, frozenset(), [live("b0"), live("b2"), *unfit], Random(1)) == []


def test_two_copies_in_one_rack_are_spread_when_another_rack_has_room() -> None:
    ledger = closed((0, ("b0", "b1", "b2")))
    candidates = [live("b0", "r0"), live("b1", "r1"), live("b2", "r1"), live("b3", "r0"), live("b4", "r2")]
    (move,) = plan_moves(ledger, frozenset(), frozenset(), candidates, Random(1))
    assert (move.position, move.target, move.cause) == (2, "b4", Cause.MISPLACED)
    assert plan_moves(ledger, frozenset(), frozenset(), candidates[:-1], Random(1)) == []


def test_two_copies_on_one_host_are_spread_when_another_host_has_room() -> None:
    ledger = closed((0, ("b0", "b1", "b2")))
    candidates = [live("b0", host="h0"), live("b1", host="h1"), live("b2", host="h1"), live("b3", host="h0")]
    assert plan_moves(ledger, frozenset(), frozenset(), candidates, Random(1)) == []
    candidates.append(live("b4", host="h2"))
    (move,) = plan_moves(ledger, frozenset(), frozenset(), candidates, Random(1))
    assert (move.position, move.target, move.cause) == (2, "b4", Cause.MISPLACED)


@given(
    places=st.lists(st.sampled_from(["r0/0", "r0/1", "r1/0", "r1/1", "r2/0"]), min_size=5, max_size=8),
    size=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_copies_move_until_no_host_or_rack_could_hold_one_more(places: list[str], size: int, seed: int) -> None:
    """Each host is in one rack; whatever the ensemble was, repeated audits end at the best spread, in few moves."""
    candidates = [live(f"b{number}", place[:2], host=place) for number, place in enumerate(places)]
    known = {each.bookie_id: each for each in candidates}
    ledger = closed((0, tuple(known)[:size]))
    moves_made = 0
    while moves := plan_moves(ledger, frozenset(), frozenset(), candidates, Random(seed)):
        for move in moves:
            ledger = with_moved(ledger, move.fragment, move.position, move.target)
            moves_made += 1
    members = [known[name] for name in ledger.fragments[0].bookies]
    assert spread_of(members) == best_spread(candidates, size)
    assert moves_made <= 2 * size


def test_racks_are_not_repaired_while_a_bookie_is_away() -> None:
    ledger = closed((0, ("b0", "b1", "b2")))
    candidates = [down("b0", "r0"), live("b1", "r1"), live("b2", "r1"), live("b4", "r2")]
    assert plan_moves(ledger, frozenset(), frozenset(), candidates, Random(1)) == []


def test_the_ledgers_with_the_fewest_copies_left_come_first() -> None:
    one = closed((0, ("b0", "b1", "b2")), ledger_id=1)
    two = closed((0, ("b1", "b2", "b3")), ledger_id=2)
    drained = closed((0, ("b4", "b5", "b6")), ledger_id=3)
    well = closed((0, ("b0", "b5", "b6")), ledger_id=4)
    assert [
        each.ledger_id for each in ledgers_to_restore([drained, well, one, two], FailedStorage(frozenset({"b1", "b3"})), {"b4"})
    ] == [2, 1, 3]


def test_copies_go_where_the_least_is() -> None:
    ledgers = [closed((0, ("b0", "b1", "b2")), ledger_id=number) for number in range(3)]
    ledgers.append(closed((0, ("b0", "b1", "b3")), ledger_id=9))
    candidates = with_loads([live(name) for name in ("b0", "b2", "b3", "b4")], copies_by_bookie(ledgers))
    (move,) = plan_moves(ledgers[0], {"b1"}, frozenset(), candidates, Random(1))
    assert move.target == "b4"


def _ensembles(size: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.permutations(NAMES).map(lambda names: tuple(names[:size]))


@st.composite
def situations(draw: st.DrawFn) -> tuple[Ledger, list[Candidate], frozenset[str], frozenset[str]]:
    size = draw(st.integers(1, 5))
    fragments = draw(st.lists(_ensembles(size), min_size=1, max_size=3))
    ledger = closed(*((10 * number, names) for number, names in enumerate(fragments)), write_quorum=draw(st.integers(1, size)))
    lost = draw(st.frozensets(st.sampled_from(NAMES), max_size=4))
    draining = draw(st.frozensets(st.sampled_from(NAMES), max_size=3))
    candidates = [
        Candidate(
            bookie_id=name, rack=draw(st.sampled_from(["r0", "r1", "r2"])), host=draw(st.sampled_from(["h0", "h1", "h2"])),
            live=name not in lost and draw(st.booleans()),
            read_only=draw(st.booleans()), draining=name in draining, load=draw(st.integers(0, 3)),
        )
        for name in draw(st.sets(st.sampled_from(NAMES)).map(sorted))
    ]  # fmt: skip
    return ledger, candidates, lost, draining


@given(situation=situations(), seed=st.integers(0, 99))
def test_every_plan_keeps_the_rules(
    situation: tuple[Ledger, list[Candidate], frozenset[str], frozenset[str]], seed: int
) -> None:
    """Targets are live and suitable, ensembles stay sets, and replaceable bookies are replaced; nothing but bookies changes."""
    ledger, candidates, lost, draining = situation
    fit = {each.bookie_id for each in candidates if each.live and each.takes_ledgers}
    known = {each.bookie_id: each for each in candidates}
    moves = plan_moves(ledger, lost, draining, candidates, Random(seed))
    assert len({(move.fragment, move.position) for move in moves}) == len(moves)
    moved = ledger
    for move in moves:
        assert move.target in fit
        before = moved.fragments[move.fragment].bookies
        moved = with_moved(moved, move.fragment, move.position, move.target)
        after = moved.fragments[move.fragment].bookies
        assert len(set(after)) == len(before)
        if move.cause is Cause.MISPLACED:
            assert not {*before} & (lost | draining)
            assert spread_of([known[name] for name in after]) > spread_of([known[name] for name in before])
        else:
            assert before[move.position] in (lost if move.cause is Cause.LOST else draining)
    for before_fragment, after_fragment in zip(ledger.fragments, moved.fragments, strict=True):
        leaving = [name for name in before_fragment.bookies if name in lost | draining]
        spare = fit - set(before_fragment.bookies)
        left = [name for name in after_fragment.bookies if name in lost | draining]
        assert len(left) == max(0, len(leaving) - len(spare))
        assert after_fragment.first_entry == before_fragment.first_entry
    assert [move.cause for move in moves] == sorted([move.cause for move in moves], key=list(Cause).index)


# -- what need not be looked at again


def test_a_ledger_is_looked_at_until_placed_and_complete() -> None:
    ledger = closed((0, ("b0", "b1", "b2")))
    progress = Progress()
    progress.begin([ledger], [live("b0")])
    progress.placed(ledger, [live("b0")])
    assert progress.unchecked(ledger, {"b1"}) == [(0, 0), (0, 2)]
    for position in range(3):
        assert progress.unsettled([ledger]) == [ledger]
        progress.completed(ledger, 0, position)
    assert progress.unsettled([ledger]) == []
    assert progress.unchecked(ledger, frozenset()) == []
    moved = with_moved(ledger, 0, 1, "b7")
    assert progress.unsettled([moved]) == [moved], "a copy on another bookie is another copy"
    assert progress.unchecked(moved, frozenset()) == [(0, 1)]


def test_placement_is_looked_at_again_when_bookies_change() -> None:
    ledger = closed((0, ("b0",)), write_quorum=1)
    progress = Progress()
    progress.begin([ledger], [live("b0", "r0")])
    progress.placed(ledger, [live("b0", "r0")])
    progress.completed(ledger, 0, 0)
    progress.begin([ledger], [live("b0", "r0", load=5.0)])
    assert progress.unsettled([ledger]) == []
    progress.begin([ledger], [live("b0", "r0"), live("b1", "r1")])
    assert progress.unsettled([ledger]) == [ledger]


def test_what_is_gone_is_forgotten() -> None:
    ledger = closed((0, ("b0",)), write_quorum=1)
    progress = Progress()
    progress.begin([ledger], [])
    progress.placed(ledger, [])
    progress.completed(ledger, 0, 0)
    progress.begin([], [])
    assert progress.unsettled([ledger]) == [ledger]


def test_a_placement_without_a_bookie_that_failed_for_a_moment_is_checked_again() -> None:
    ledger = closed((0, ("b0",)), write_quorum=1)
    progress = Progress()
    everybody = [live("b0", "r0"), live("b1", "r1")]
    progress.begin([ledger], everybody)
    progress.completed(ledger, 0, 0)
    progress.placed(ledger, [live("b0", "r0"), down("b1", "r1")])
    progress.begin([ledger], everybody)
    assert progress.unsettled([ledger]) == [ledger]
    progress.placed(ledger, everybody)
    assert progress.unsettled([ledger]) == []


def test_a_placement_is_checked_again_after_a_move() -> None:
    """Simulation, scenario lost-disks, seed 72000736: the only candidate for a lost copy left two copies on one host."""
    ledger = closed((0, ("b0", "b1")), write_quorum=2)
    present = [live("b0"), live("b2"), live("b3")]
    progress = Progress()
    progress.begin([ledger], present)
    progress.placed(ledger, present)
    progress.completed(ledger, 0, 0)
    moved = with_moved(ledger, 0, 1, "b2")
    progress.moved(moved, 0, 1)
    progress.begin([moved], present)
    assert progress.unsettled([moved]) == [moved]
