"""Read plans: replica order, hedging, absence, corrupt copies, stripes."""

from __future__ import annotations

from functools import partial
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_bookies.client.core.read_plan import Ask, ReadPlan
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import EntryState, RangeAnswer, ReadEntry, Status, entry_matches
from stratalog_core.errors import Invalid, NoSuchEntry, Unavailable
from stratalog_metadata.records import Fragment, Ledger

LEDGER_ID = 9


def make_ledger(ensemble_size: int = 3, write_quorum: int = 3, *fragment_starts: int) -> Ledger:
    names = [f"b{position}" for position in range(ensemble_size)]
    fragments = [Fragment(first_entry=0, bookies=tuple(names))]
    fragments += [
        Fragment(first_entry=start, bookies=tuple(f"{name}@{start}" for name in names)) for start in fragment_starts
    ]  # fmt: skip
    return Ledger(
        ledger_id=LEDGER_ID, topic_id=UUID(int=1), partition=0, base_offset=0, leader_epoch=1,
        write_quorum=write_quorum, ack_quorum=1, fragments=tuple(fragments),
    )  # fmt: skip


def entry(entry_id: int, state: EntryState = EntryState.PRESENT) -> ReadEntry:
    payload = b"payload%d" % entry_id
    header = messages.EntryHeader._make(messages.ENTRY_HEADER.unpack(messages.pack_entry(LEDGER_ID, entry_id, -1, (payload,))))
    return ReadEntry(entry_id, -1, len(payload), header.crc, state, memoryview(payload))


def answer(decided_to: int, *entries: ReadEntry) -> RangeAnswer:
    return RangeAnswer(Status.OK, decided_to, list(entries))


def make_plan(ledger: Ledger, first: int, last: int, *avoid: str) -> ReadPlan:
    return ReadPlan(ledger, first, last, avoid=avoid, accept=partial(entry_matches, LEDGER_ID))


def ids(plan: ReadPlan, bytes_max: int | None = None) -> list[int]:
    return [each.entry_id for each in plan.result(bytes_max)]


def test_one_bookie_serves_a_range() -> None:
    plan = make_plan(make_ledger(), 2, 4)
    (ask,) = plan.start()
    assert ask == Ask("b0", 0, 2, 4)
    assert plan.on_answer(ask, answer(4, entry(2), entry(3), entry(4))) == []
    assert plan.is_finished
    assert ids(plan) == [2, 3, 4]


def test_the_result_is_cut_at_its_bytes_but_the_first_entry_always_comes() -> None:
    plan = make_plan(make_ledger(), 0, 2)
    (ask,) = plan.start()
    plan.on_answer(ask, answer(2, entry(0), entry(1), entry(2)))
    assert ids(plan, 16) == [0, 1]
    assert ids(plan, 1) == [0]


def test_an_answer_cut_short_is_enough() -> None:
    plan = make_plan(make_ledger(), 0, 5)
    (ask,) = plan.start()
    plan.on_answer(ask, answer(1, entry(0), entry(1)))
    assert plan.is_finished
    assert ids(plan) == [0, 1]


def test_avoided_bookies_are_asked_last() -> None:
    plan = make_plan(make_ledger(), 0, 0, "b0", "b2")
    (ask,) = plan.start()
    order = [ask.bookie]
    while asks := plan.on_failure(ask, "gone"):
        (ask,) = asks
        order.append(ask.bookie)
    assert order == ["b1", "b0", "b2"]


def test_absent_only_if_all_say_so() -> None:
    plan = make_plan(make_ledger(), 0, 0)
    (ask,) = plan.start()
    for _ in range(2):
        (ask,) = plan.on_answer(ask, answer(0))
    assert plan.on_answer(ask, answer(0)) == []
    with pytest.raises(NoSuchEntry):
        plan.result()


@pytest.mark.parametrize(
    "bad",
    [
        answer(0, entry(0, EntryState.UNREADABLE)),
        answer(0, entry(0)._replace(crc=7)),
        RangeAnswer(Status.STORAGE_FAILED, -1, []),
    ],
)
def test_a_bad_copy_is_passed_over_and_is_not_absence(bad: RangeAnswer) -> None:
    plan = make_plan(make_ledger(), 0, 0)
    (ask,) = plan.start()
    (ask,) = plan.on_answer(ask, bad)
    (ask,) = plan.on_answer(ask, answer(0))
    assert plan.on_answer(ask, answer(0)) == []
    with pytest.raises(Unavailable):
        plan.result()


def test_a_slow_bookie_is_hedged_and_the_first_answer_wins() -> None:
    plan = make_plan(make_ledger(), 0, 1)
    (slow,) = plan.start()
    (hedge,) = plan.on_slow()
    assert hedge.bookie != slow.bookie
    plan.on_answer(hedge, answer(1, entry(0), entry(1)))
    assert plan.is_finished
    assert ids(plan) == [0, 1]
    assert plan.on_answer(slow, answer(1, entry(0), entry(1))) == []
    assert plan.on_slow() == []


def test_a_hedge_that_fails_leaves_the_slow_one_to_wait_for() -> None:
    plan = make_plan(make_ledger(1, 1), 0, 0)
    (slow,) = plan.start()
    assert plan.on_slow() == []
    assert not plan.is_finished
    plan.on_answer(slow, answer(0, entry(0)))
    assert ids(plan) == [0]


def test_a_range_over_fragments_asks_each_for_its_part() -> None:
    plan = make_plan(make_ledger(3, 3, 5, 8), 3, 9)
    asks = plan.start()
    assert [(ask.bookie, ask.first, ask.last) for ask in asks] == [("b0", 3, 4), ("b0@5", 5, 7), ("b0@8", 8, 9)]
    plan.on_answer(asks[2], answer(9, entry(8), entry(9)))
    plan.on_answer(asks[0], answer(4, entry(3), entry(4)))
    plan.on_failure(asks[1], "gone")
    assert not plan.is_finished
    assert ids(plan) == [3, 4], "a gapless run, whatever came of the rest"


def test_striped_entries_are_asked_of_their_own_bookies() -> None:
    plan = make_plan(make_ledger(4, 2), 0, 5)
    assert [ask.bookie for ask in plan.start()] == ["b0", "b1", "b2", "b3", "b0", "b1"]


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(Invalid):
        make_plan(make_ledger(), 3, 2)


@given(
    data=st.data(),
    quorums=st.sampled_from([(1, 1), (3, 3), (3, 2), (5, 3)]),
    starts=st.lists(st.integers(1, 19), unique=True, max_size=3).map(sorted),
    first=st.integers(0, 19),
)
def test_whatever_one_good_copy_allows_is_read(
    data: st.DataObject, quorums: tuple[int, int], starts: list[int], first: int
) -> None:
    """Bookies randomly lose, corrupt and lack copies: the result is correct, and has the first entry if one copy is good."""
    ledger = make_ledger(*quorums, *starts)
    plan = make_plan(ledger, first, 19)
    asks = plan.start()
    good_first = False
    while asks:
        ask = asks.pop(data.draw(st.integers(0, len(asks) - 1)))
        fate = data.draw(st.sampled_from(["good", "good", "lost", "spoilt", "lacking", "cut"]))
        good_first = good_first or (ask.first == first and fate in ("good", "cut"))
        listed = [entry(each) for each in range(ask.first, ask.last + 1)]
        match fate:
            case "lost":
                asks += plan.on_failure(ask, "lost")
            case "spoilt":
                asks += plan.on_answer(ask, answer(ask.last, *(each._replace(crc=each.crc ^ 1) for each in listed)))
            case "lacking":
                asks += plan.on_answer(ask, answer(ask.last))
            case "cut":
                asks += plan.on_answer(ask, answer(ask.first, listed[0]))
            case _:
                asks += plan.on_answer(ask, answer(ask.last, *listed))
    assert plan.is_finished
    if not good_first:
        with pytest.raises((NoSuchEntry, Unavailable)):
            plan.result()
        return
    run = plan.result()
    assert [each.entry_id for each in run] == list(range(first, first + len(run)))
    assert all(bytes(each.payload) == b"payload%d" % each.entry_id for each in run)
